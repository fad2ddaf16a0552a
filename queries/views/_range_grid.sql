-- _range_grid: equal pieces of time for each process that has ranges, about four a range, by which launches find theirs.
--
-- They lie between the starts of its first and last ranges; the square root of all ranges is left out at both ends, so
-- that a few with odd times do not stretch them. What comes before the first piece is in it, what comes after the
-- last one in that: at x it is least(greatest(x // width_ns, first_bucket), last_bucket).
--
-- Columns:
--   process       VARCHAR  -   Which process.
--   width_ns      BIGINT   ns  Length of a piece.
--   first_bucket  BIGINT   -   Number of the first one.
--   last_bucket   BIGINT   -   Number of the last one.
WITH opened AS (
    SELECT
        process, start_ns,
        row_number() OVER (PARTITION BY process ORDER BY start_ns) AS place,
        count(*) OVER (PARTITION BY process) AS opened
    FROM ranges
    WHERE start_ns IS NOT NULL
),
spans AS (
    SELECT process, opened, min(start_ns) AS first_ns, max(start_ns) AS last_ns
    FROM opened
    WHERE place >= floor(sqrt(opened)) AND place <= opened + 1 - floor(sqrt(opened))
    GROUP BY process, opened
),
-- Divided before they are subtracted: what a file says may be anywhere.
widths AS (
    SELECT process, first_ns, last_ns, greatest((last_ns // opened - first_ns // opened) // 4, 1) AS width_ns
    FROM spans
)
SELECT process, width_ns, first_ns // width_ns AS first_bucket, last_ns // width_ns AS last_bucket
FROM widths
