-- _range_segments: the timeline of each process cut where a range opens or closes, with the
-- innermost range of each piece: the latest-opened of those still open, whichever thread opened it.
--
-- Every piece expands once for each range that covers it, so the cost is the number of ranges
-- times their depth of nesting. A range that was never closed is hidden by the next such one,
-- which keeps leaked ranges from covering each other's pieces.
--
-- Columns:
--   process   VARCHAR  -   Which process.
--   start_ns  BIGINT   ns  Start of the piece; it ends where the next one starts.
--   range_id  BIGINT   -   The innermost open range; NULL where none is open.
WITH opened AS (
    SELECT
        process, range_id, start_ns, end_ns,
        row_number() OVER (PARTITION BY process ORDER BY start_ns, depth, range_id) AS opened
    FROM ranges
),
bounded AS (
    SELECT
        process, opened, start_ns,
        COALESCE(
            end_ns,
            lead(start_ns) OVER (PARTITION BY process, end_ns IS NULL ORDER BY opened),
            9223372036854775807
        ) AS end_ns
    FROM opened
),
instants AS (
    SELECT process, at_ns, row_number() OVER (PARTITION BY process ORDER BY at_ns) AS segment
    FROM (
        SELECT process, start_ns AS at_ns FROM bounded
        UNION
        SELECT process, end_ns AS at_ns FROM bounded
    ) AS boundaries
),
covered AS (
    SELECT b.process, b.opened, unnest(range(f.segment, l.segment)) AS segment
    FROM bounded AS b
    JOIN instants AS f ON f.process = b.process AND f.at_ns = b.start_ns
    JOIN instants AS l ON l.process = b.process AND l.at_ns = b.end_ns
    WHERE b.end_ns > b.start_ns
),
innermost AS (
    SELECT process, segment, max(opened) AS opened
    FROM covered
    GROUP BY process, segment
)
SELECT i.process, i.at_ns AS start_ns, o.range_id
FROM instants AS i
LEFT JOIN innermost AS n ON n.process = i.process AND n.segment = i.segment
LEFT JOIN opened AS o ON o.process = n.process AND o.opened = n.opened
