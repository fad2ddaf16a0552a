-- report_drift: of which kernels did sampled counters change over the run?
--
-- The first half of the windows of the attribution against the second. Given are changes of 5 % or more
-- that exceed four standard errors.
--
-- Columns:
--   device           VARCHAR  -                 UUID, or process/ordinal where that is not known.
--   kernel_class_id  BIGINT   -                 Which kernel with which shape.
--   kernel           VARCHAR  -                 Demangled name.
--   counter          VARCHAR  -                 Column of samples.
--   unit             VARCHAR  -                 Unit of the counter.
--   first_per_s      DOUBLE   counter unit / s  Mean rate while it ran, in the first half.
--   second_per_s     DOUBLE   counter unit / s  In the second half.
--   change_pct       DOUBLE   %                 Second over first, less 100.
--   errors           DOUBLE   1                 The change over its standard error.
--   time_share       DOUBLE   1                 Share of the kernel in the time of all kernels, 0 to 1.
WITH windows AS (
    SELECT
        device, counter_group, counter, unit, kernel_class_id, rate_per_s, standard_error,
        CAST(time_ns AS DOUBLE) AS weight,
        2 * window_number < max(window_number) OVER (PARTITION BY device, counter_group) + 1 AS is_first
    FROM attribution_windows
    WHERE kernel_class_id IS NOT NULL AND is_told_apart AND standard_error IS NOT NULL AND time_ns > 0
),
halves AS (
    SELECT
        device, counter_group, counter, unit, kernel_class_id, is_first,
        sum(rate_per_s * weight) / sum(weight) AS rate_per_s,
        sqrt(sum(standard_error * standard_error * weight * weight)) / sum(weight) AS standard_error
    FROM windows
    GROUP BY device, counter_group, counter, unit, kernel_class_id, is_first
),
changes AS (
    SELECT
        f.device, f.kernel_class_id, f.counter, f.unit,
        f.rate_per_s AS first_per_s, s.rate_per_s AS second_per_s,
        100 * s.rate_per_s / NULLIF(f.rate_per_s, 0) - 100 AS change_pct,
        (s.rate_per_s - f.rate_per_s)
            / NULLIF(sqrt(f.standard_error * f.standard_error + s.standard_error * s.standard_error), 0) AS errors
    FROM halves AS f
    JOIN halves AS s
        ON s.device = f.device AND s.counter_group = f.counter_group AND s.counter = f.counter
        AND s.kernel_class_id = f.kernel_class_id AND NOT s.is_first
    WHERE f.is_first
),
shares AS (
    SELECT kernel_class_id, CAST(total_ns AS DOUBLE) / NULLIF(sum(total_ns) OVER (), 0) AS time_share
    FROM _class_totals
)
SELECT
    c.device, c.kernel_class_id, COALESCE(k.name, concat('class ', CAST(c.kernel_class_id AS VARCHAR))) AS kernel,
    c.counter, c.unit, c.first_per_s, c.second_per_s, c.change_pct, c.errors, s.time_share
FROM changes AS c
LEFT JOIN kernel_classes AS k ON k.kernel_class_id = c.kernel_class_id
LEFT JOIN shares AS s ON s.kernel_class_id = c.kernel_class_id
WHERE abs(c.change_pct) >= 5 AND abs(c.errors) > 4
ORDER BY abs(c.change_pct) * s.time_share DESC NULLS LAST, c.device, c.kernel_class_id, c.counter, c.first_per_s
