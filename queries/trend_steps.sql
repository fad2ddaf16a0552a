-- trend_steps: which ranges repeat, and how long did they take on the host, piece by piece?
--
-- Ranges that a process opened less than five times are left out. Of each name and process the ranges are cut into
-- pieces of equally many.
--
-- Parameters:
--   pieces  INTEGER  64  How many.
--
-- Columns:
--   name     VARCHAR  -       Name of the range.
--   piece    BIGINT   -       Number of the piece, from 0.
--   depth    INTEGER  -       Least depth at which it was opened.
--   ranges   BIGINT   ranges  How many were opened and closed in the piece, by all processes.
--   host_ns  BIGINT   ns      Sum of their host time.
WITH numbered AS (
    SELECT
        name, depth, end_ns - start_ns AS host_ns,
        row_number() OVER (PARTITION BY process, name ORDER BY start_ns, range_id) - 1 AS number,
        count(*) OVER (PARTITION BY process, name) AS ranges
    FROM ranges
    WHERE start_ns >= 0 AND end_ns >= start_ns
)
SELECT
    name,
    CAST(floor(number * CAST(least($pieces, ranges) AS DOUBLE) / ranges) AS BIGINT) AS piece,
    min(depth) AS depth,
    count(*) AS ranges,
    CAST(sum(host_ns) AS BIGINT) AS host_ns
FROM numbered
WHERE ranges >= 5
GROUP BY name, CAST(floor(number * CAST(least($pieces, ranges) AS DOUBLE) / ranges) AS BIGINT)
ORDER BY name, piece
