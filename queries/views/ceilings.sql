-- ceilings: what each pipe and each level of the memory of a device reached when it was calibrated.
--
-- `nanalyze doctor --calibrate` measures them; empty where that was not done. The last measurement counts.
--
-- Columns:
--   device_id         INTEGER  -         CUDA ordinal in the process.
--   ceiling           VARCHAR  -         A pipe (fp32, tensor_bf16, ...), or a level and a direction (l2_read).
--   method            VARCHAR  -         Instruction that it was reached with.
--   unit              VARCHAR  -         FLOP/s, OP/s or bytes/s; a multiply-add is two operations.
--   per_s             DOUBLE   as unit   Median of the repetitions.
--   low_per_s         DOUBLE   as unit   Lowest repetition.
--   high_per_s        DOUBLE   as unit   Highest repetition.
--   repetitions       INTEGER  launches  How often it was measured.
--   is_partial        BOOLEAN  -         Whether the method is known not to reach the pipe's peak on this device.
--   sm_clock_hz       BIGINT   Hz        SM clock that ran, by the kernel's own cycles.
--   memory_clock_hz   BIGINT   Hz        Memory clock while it ran.
--   throttle_reasons  BIGINT   -         NVML's bit mask of reasons to lower the clocks while it ran.
--   measured_ns       BIGINT   ns        When it was measured.
--   process           VARCHAR  -         Which process saw the device.
SELECT
    device_id, ceiling, method, unit, per_s, low_per_s, high_per_s, repetitions, is_partial,
    sm_clock_hz, memory_clock_hz, throttle_reasons, measured_ns, process
FROM raw.ceilings
QUALIFY row_number() OVER (PARTITION BY process, device_id, ceiling, method ORDER BY measured_ns DESC, per_s DESC) = 1
