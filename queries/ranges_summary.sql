-- ranges_summary: what did each named range of host code cost on the GPU, and at what declared rate?
--
-- A kernel counts as own for the innermost range it was launched in, and in `kernels` for that
-- one and every range that encloses it on the same thread. Ranges of one name that enclose each
-- other therefore count a kernel once each. Rates use the ranges that declare the amount, whose
-- kernels all have known durations and into which no pause of the recorder fell.
--
-- Columns:
--   name             VARCHAR  -         Name of the range.
--   ranges           BIGINT   ranges    How often it was entered.
--   ranges_open      BIGINT   ranges    Those never closed.
--   ranges_paused    BIGINT   ranges    Those into which a pause fell: kernels launched in it are missing.
--   host_ns          BIGINT   ns        Host time in the closed ones.
--   kernels          BIGINT   launches  Launched in it or in ranges inside it.
--   kernels_untimed  BIGINT   launches  Those whose duration is not known.
--   kernel_ns        BIGINT   ns        Sum of the known durations.
--   own_kernels      BIGINT   launches  Launched in it, outside of any range inside it.
--   own_kernel_ns    BIGINT   ns        Sum of their known durations.
--   flops            DOUBLE   FLOP      Declared in all.
--   bytes            DOUBLE   bytes     Declared in all.
--   flops_per_s      DOUBLE   FLOP/s    Declared operations over kernel time.
--   bytes_per_s      DOUBLE   bytes/s   Declared bytes over kernel time.
WITH RECURSIVE placed AS (
    SELECT
        process, launches, launches_timed, total_ns,
        max(piece) OVER (
            PARTITION BY process ORDER BY start_ns, is_launched ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS innermost
    FROM (
        SELECT
            process, start_ns, 1 AS is_launched, launches, launches_timed, total_ns,
            CAST(NULL AS STRUCT(at_ns BIGINT, range_id BIGINT)) AS piece
        FROM _launch_segments
        WHERE start_ns IS NOT NULL
        UNION ALL
        SELECT process, start_ns, 0, 0, 0, NULL, struct_pack(at_ns := start_ns, range_id := range_id)
        FROM _range_segments
    ) AS instants
),
launched AS (
    SELECT
        process, innermost.range_id AS range_id,
        CAST(sum(launches) AS BIGINT) AS kernels,
        CAST(sum(launches_timed) AS BIGINT) AS timed,
        COALESCE(sum(total_ns), 0) AS kernel_ns
    FROM placed
    WHERE launches > 0 AND innermost.range_id IS NOT NULL
    GROUP BY process, innermost.range_id
),
enclosing (process, range_id, ancestor_id, distance) AS (
    SELECT process, range_id, range_id, 0
    FROM ranges
    UNION ALL
    SELECT e.process, e.range_id, r.parent_id, e.distance + 1
    FROM enclosing AS e
    JOIN ranges AS r ON r.process = e.process AND r.range_id = e.ancestor_id
    -- The limit ends the walk where damaged data has a range enclose itself.
    WHERE r.parent_id IS NOT NULL AND e.distance < 200
),
inclusive AS (
    SELECT
        e.process, e.ancestor_id AS range_id,
        sum(l.kernels) AS kernels, sum(l.timed) AS timed, sum(l.kernel_ns) AS kernel_ns
    FROM (SELECT DISTINCT process, range_id, ancestor_id FROM enclosing) AS e
    JOIN launched AS l ON l.process = e.process AND l.range_id = e.range_id
    GROUP BY e.process, e.ancestor_id
),
-- A pause touches a range if the latest end of all pauses that began before the range's end lies after its start: a
-- running maximum, since a join of intervals looks at each pair.
touched AS (
    SELECT
        process, range_id,
        max(paused_until_ns) OVER (
            PARTITION BY process ORDER BY at_ns, place ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) > start_ns AS is_paused
    FROM (
        SELECT process, end_ns AS at_ns, 0 AS place, range_id, start_ns, CAST(NULL AS BIGINT) AS paused_until_ns
        FROM ranges
        WHERE end_ns IS NOT NULL
        UNION ALL
        SELECT process, start_ns, 1, NULL, NULL, end_ns
        FROM _pause_spans
    ) AS spans
),
paused AS (
    SELECT DISTINCT process, range_id FROM touched WHERE is_paused
),
each_range AS (
    SELECT
        r.name, r.end_ns,
        p.range_id IS NOT NULL AS is_paused,
        CASE WHEN r.flops BETWEEN 0 AND 1e30 AND NOT isnan(r.flops) THEN r.flops END AS flops,
        CASE WHEN r.bytes BETWEEN 0 AND 1e30 AND NOT isnan(r.bytes) THEN r.bytes END AS bytes,
        CASE WHEN r.start_ns >= 0 AND r.end_ns >= r.start_ns THEN r.end_ns - r.start_ns END AS host_ns,
        COALESCE(i.kernels, 0) AS kernels,
        COALESCE(i.timed, 0) AS timed,
        COALESCE(i.kernel_ns, 0) AS kernel_ns,
        COALESCE(o.kernels, 0) AS own_kernels,
        COALESCE(o.kernel_ns, 0) AS own_kernel_ns,
        i.timed = i.kernels AND i.kernel_ns > 0 AND p.range_id IS NULL AS is_timed
    FROM ranges AS r
    LEFT JOIN inclusive AS i ON i.process = r.process AND i.range_id = r.range_id
    LEFT JOIN launched AS o ON o.process = r.process AND o.range_id = r.range_id
    LEFT JOIN paused AS p ON p.process = r.process AND p.range_id = r.range_id
)
SELECT
    name,
    count(*) AS ranges,
    count(*) - count(end_ns) AS ranges_open,
    count(CASE WHEN is_paused THEN 1 END) AS ranges_paused,
    TRY_CAST(sum(host_ns) AS BIGINT) AS host_ns,
    CAST(sum(kernels) AS BIGINT) AS kernels,
    CAST(sum(kernels - timed) AS BIGINT) AS kernels_untimed,
    TRY_CAST(sum(kernel_ns) AS BIGINT) AS kernel_ns,
    CAST(sum(own_kernels) AS BIGINT) AS own_kernels,
    TRY_CAST(sum(own_kernel_ns) AS BIGINT) AS own_kernel_ns,
    sum(flops) AS flops,
    sum(bytes) AS bytes,
    1e9 * sum(CASE WHEN is_timed THEN flops END)
        / CAST(sum(CASE WHEN is_timed AND flops IS NOT NULL THEN kernel_ns END) AS DOUBLE) AS flops_per_s,
    1e9 * sum(CASE WHEN is_timed THEN bytes END)
        / CAST(sum(CASE WHEN is_timed AND bytes IS NOT NULL THEN kernel_ns END) AS DOUBLE) AS bytes_per_s
FROM each_range
GROUP BY name
ORDER BY kernel_ns DESC, name
