-- device_state: clocks, power and temperature of a device over time.
--
-- Columns:
--   time_ns           BIGINT   ns       When it was read.
--   device_id         INTEGER  -        CUDA ordinal in the process.
--   sm_clock_hz       BIGINT   Hz       SM clock.
--   memory_clock_hz   BIGINT   Hz       Memory clock.
--   power_mw          BIGINT   mW       Power draw.
--   temperature_c     INTEGER  Celsius  GPU temperature.
--   throttle_reasons  BIGINT   -        NVML's bit mask of reasons to lower the clocks.
--   process           VARCHAR  -        Which process wrote the row.
SELECT
    time_ns, device_id, sm_clock_hz, memory_clock_hz, power_mw, temperature_c, throttle_reasons,
    process
FROM raw.device_state
