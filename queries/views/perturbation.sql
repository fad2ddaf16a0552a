-- perturbation: time of each kernel class without the profiler beside its time under exact counters.
--
-- A launch that is replayed for counters runs alone, with memory restored before each pass and clocks as
-- they are, so it may take longer or shorter than in the undisturbed job. Intervals are Welch's, for means
-- of launches that do not depend on each other; a class has no interval with fewer than two launches of
-- either kind.
--
-- Columns:
--   kernel_class_id      BIGINT   -         Which kernel with which shape: see kernel_classes.
--   kernel               VARCHAR  -         Demangled name.
--   launches             BIGINT   launches  Timed in the undisturbed job.
--   mean_ns              DOUBLE   ns        Their mean duration.
--   launches_replayed    BIGINT   launches  Measured under the profiler.
--   replayed_ns          DOUBLE   ns        Their mean duration as the profiler measured it.
--   difference_ns        DOUBLE   ns        replayed_ns - mean_ns.
--   difference_low_ns    DOUBLE   ns        Lower end of its 95 % interval.
--   difference_high_ns   DOUBLE   ns        Upper end.
--   difference_share     DOUBLE   1         difference_ns over mean_ns.
--   differs              BOOLEAN  -         Whether the interval leaves out no difference; NULL without one.
WITH means AS (
    SELECT
        kernel_class_id,
        count(CASE WHEN duration_method = 'timeline' THEN 1 END) AS launches,
        avg(CASE WHEN duration_method = 'timeline' THEN duration_ns END) AS mean_ns,
        var_samp(CASE WHEN duration_method = 'timeline' THEN duration_ns END) AS variance,
        count(CASE WHEN duration_method = 'exact' THEN 1 END) AS launches_replayed,
        avg(CASE WHEN duration_method = 'exact' THEN duration_ns END) AS replayed_ns,
        var_samp(CASE WHEN duration_method = 'exact' THEN duration_ns END) AS replayed_variance
    FROM _launches
    WHERE kernel_class_id IS NOT NULL
    GROUP BY kernel_class_id
),
errors AS (
    SELECT
        *,
        variance / launches AS square,
        replayed_variance / launches_replayed AS replayed_square
    FROM means
    WHERE launches > 0 AND launches_replayed > 0
),
spread AS (
    SELECT
        *,
        sqrt(square + replayed_square) AS standard_error,
        -- Welch and Satterthwaite; without any scatter there is nothing to be uncertain about.
        COALESCE(
            (square + replayed_square) * (square + replayed_square) / NULLIF(
                square * square / NULLIF(launches - 1, 0)
                + replayed_square * replayed_square / NULLIF(launches_replayed - 1, 0),
                0
            ),
            30
        ) AS degrees
    FROM errors
),
halves AS (
    SELECT
        s.*,
        s.replayed_ns - s.mean_ns AS difference_ns,
        t.quantile * s.standard_error AS half_ns
    FROM spread AS s
    LEFT JOIN raw.student_t AS t ON t.degrees = least(greatest(CAST(floor(s.degrees) AS INTEGER), 1), 30)
)
SELECT
    h.kernel_class_id,
    c.name AS kernel,
    h.launches, h.mean_ns, h.launches_replayed, h.replayed_ns, h.difference_ns,
    h.difference_ns - h.half_ns AS difference_low_ns,
    h.difference_ns + h.half_ns AS difference_high_ns,
    h.difference_ns / NULLIF(h.mean_ns, 0) AS difference_share,
    abs(h.difference_ns) > h.half_ns AS differs
FROM halves AS h
LEFT JOIN kernel_classes AS c ON c.kernel_class_id = h.kernel_class_id
