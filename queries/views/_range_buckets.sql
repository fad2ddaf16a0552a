-- _range_buckets: the pieces of _range_segments in which a range is open, once for each piece of _range_grid that they
-- touch: some six rows a range.
--
-- Columns:
--   process   VARCHAR  -   Which process.
--   bucket    BIGINT   -   Number of the piece of _range_grid.
--   start_ns  BIGINT   ns  Start of the piece of _range_segments.
--   last_ns   BIGINT   ns  Its last nanosecond.
--   range_id  BIGINT   -   The innermost open range.
WITH pieces AS (
    SELECT
        process, start_ns, range_id,
        COALESCE(lead(start_ns) OVER (PARTITION BY process ORDER BY start_ns) - 1, 9223372036854775807) AS last_ns
    FROM _range_segments
)
SELECT
    p.process,
    unnest(range(
        least(greatest(p.start_ns // g.width_ns, g.first_bucket), g.last_bucket),
        1 + least(greatest(p.last_ns // g.width_ns, g.first_bucket), g.last_bucket)
    )) AS bucket,
    p.start_ns, p.last_ns, p.range_id
FROM pieces AS p
JOIN _range_grid AS g ON g.process = p.process
WHERE p.range_id IS NOT NULL
