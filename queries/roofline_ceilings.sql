-- roofline_ceilings: what does each kind of device reach of what its datasheet promises?
--
-- One row for each kind of device and each roof that is known of it: from the datasheet at the highest clock, or
-- measured by `nanalyze doctor --calibrate`, or both. Devices are of one kind if their name and their peaks agree;
-- of several that were calibrated the median counts. A measured rate is at the clock that ran, so it can be compared
-- with datasheet_at_clock_per_s only.
--
-- Columns:
--   device                    VARCHAR  -        Product name.
--   ceiling                   VARCHAR  -        A pipe (fp32, tensor_bf16, ...), or a level and a direction (l2_read).
--   kind                      VARCHAR  -        compute or memory.
--   unit                      VARCHAR  -        FLOP/s, OP/s or bytes/s; a multiply-add is two operations.
--   datasheet_per_s           DOUBLE   as unit  Peak at the highest clock.
--   method                    VARCHAR  -        Instruction that the measured ceiling was reached with.
--   is_partial                BOOLEAN  -        Whether that is known not to reach the pipe's peak on this device.
--   measured_per_s            DOUBLE   as unit  Measured ceiling: median over devices of their medians.
--   low_per_s                 DOUBLE   as unit  Lowest repetition of any.
--   high_per_s                DOUBLE   as unit  Highest repetition of any.
--   devices                   BIGINT   devices  How many were measured; 0 where none was.
--   sm_clock_hz               DOUBLE   Hz       SM clock while it was measured, mean.
--   datasheet_at_clock_per_s  DOUBLE   as unit  Peak at that clock; DRAM's at its highest.
--   share                     DOUBLE   1        measured_per_s over datasheet_at_clock_per_s.
--   measured_ns               BIGINT   ns       When the last was measured.
WITH distinct_devices AS (
    SELECT *
    FROM devices
    QUALIFY row_number() OVER (
        PARTITION BY COALESCE(uuid, concat(process, '/', CAST(device_id AS VARCHAR))) ORDER BY process, device_id
    ) = 1
),
peaks AS (
    SELECT
        d.name AS device, p.ceiling,
        CASE WHEN p.ceiling LIKE 'dram%' THEN 'memory' ELSE 'compute' END AS kind,
        CASE
            WHEN p.ceiling LIKE 'dram%' THEN 'bytes/s'
            WHEN p.ceiling LIKE '%int8' THEN 'OP/s'
            ELSE 'FLOP/s'
        END AS unit,
        max(CASE
            WHEN p.ceiling LIKE 'dram%' THEN d.dram_peak_bytes_per_s
            ELSE d.sm_clock_max_hz * d.sm_count * CASE p.ceiling
                WHEN 'fp64' THEN d.fp64_flops_per_sm_cycle
                WHEN 'fp32' THEN d.fp32_flops_per_sm_cycle
                WHEN 'fp16' THEN d.fp16_flops_per_sm_cycle
                WHEN 'tensor_fp64' THEN d.tensor_fp64_flops_per_sm_cycle
                WHEN 'tensor_tf32' THEN d.tensor_tf32_flops_per_sm_cycle
                WHEN 'tensor_fp16' THEN d.tensor_fp16_flops_per_sm_cycle
                WHEN 'tensor_bf16' THEN d.tensor_fp16_flops_per_sm_cycle
                WHEN 'tensor_fp8' THEN d.tensor_fp8_flops_per_sm_cycle
                WHEN 'tensor_int8' THEN d.tensor_int8_ops_per_sm_cycle
            END
        END) AS datasheet_per_s,
        max(CAST(d.sm_clock_max_hz AS DOUBLE)) AS sm_clock_max_hz
    FROM distinct_devices AS d
    CROSS JOIN (
        VALUES
            ('fp64'), ('fp32'), ('fp16'), ('tensor_fp64'), ('tensor_tf32'), ('tensor_fp16'), ('tensor_bf16'),
            ('tensor_fp8'), ('tensor_int8'), ('dram_read'), ('dram_write'), ('dram_copy')
    ) AS p (ceiling)
    GROUP BY d.name, p.ceiling
),
measured AS (
    SELECT
        d.name AS device, c.ceiling, c.method, c.unit, bool_or(c.is_partial) AS is_partial,
        median(c.per_s) AS measured_per_s, min(c.low_per_s) AS low_per_s, max(c.high_per_s) AS high_per_s,
        count(*) AS devices, avg(c.sm_clock_hz) AS sm_clock_hz, max(c.measured_ns) AS measured_ns
    FROM ceilings AS c
    JOIN distinct_devices AS d ON d.process = c.process AND d.device_id = c.device_id
    GROUP BY d.name, c.ceiling, c.method, c.unit
),
joined AS (
    SELECT
        COALESCE(p.device, m.device) AS device, COALESCE(p.ceiling, m.ceiling) AS ceiling,
        COALESCE(p.kind, CASE WHEN m.unit = 'bytes/s' THEN 'memory' ELSE 'compute' END) AS kind,
        COALESCE(m.unit, p.unit) AS unit, p.datasheet_per_s, m.method, m.is_partial, m.measured_per_s,
        m.low_per_s, m.high_per_s, COALESCE(m.devices, 0) AS devices, m.sm_clock_hz,
        CASE
            WHEN p.kind = 'memory' THEN p.datasheet_per_s
            ELSE p.datasheet_per_s * m.sm_clock_hz / NULLIF(p.sm_clock_max_hz, 0)
        END AS datasheet_at_clock_per_s,
        m.measured_ns
    FROM peaks AS p
    FULL OUTER JOIN measured AS m ON m.device = p.device AND m.ceiling = p.ceiling
)
SELECT
    device, ceiling, kind, unit, datasheet_per_s, method, is_partial, measured_per_s, low_per_s, high_per_s,
    devices, sm_clock_hz,
    CASE WHEN measured_per_s IS NOT NULL THEN datasheet_at_clock_per_s END AS datasheet_at_clock_per_s,
    measured_per_s / NULLIF(datasheet_at_clock_per_s, 0) AS share,
    measured_ns
FROM joined
WHERE datasheet_per_s IS NOT NULL OR measured_per_s IS NOT NULL
ORDER BY device, kind, ceiling, is_partial NULLS FIRST, method NULLS FIRST
