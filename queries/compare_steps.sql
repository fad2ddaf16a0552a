-- compare_steps: which ranges could serve as the steps of a run?
--
-- Columns:
--   name       VARCHAR  -         Name of the range.
--   depth      INTEGER  -         Least depth at which it was opened.
--   ranges     BIGINT   ranges    How often it was opened, by the process that did so most.
--   kernel_ns  BIGINT   ns        Time of the kernels launched in it or in ranges inside it.
--   share      DOUBLE   1         Of the time of all kernels, 0 to 1.
WITH RECURSIVE launched AS (
    SELECT process, range_id, sum(duration_ns) AS kernel_ns
    FROM kernels
    WHERE duration_ns IS NOT NULL
    GROUP BY process, range_id
),
names (process, range_id, ancestor_id, name, distance) AS (
    SELECT r.process, r.range_id, r.range_id, r.name, 0
    FROM ranges AS r
    JOIN launched AS l ON l.process = r.process AND l.range_id = r.range_id
    UNION ALL
    SELECT n.process, n.range_id, p.range_id, p.name, n.distance + 1
    FROM names AS n
    JOIN ranges AS r ON r.process = n.process AND r.range_id = n.ancestor_id
    JOIN ranges AS p ON p.process = r.process AND p.range_id = r.parent_id
    WHERE n.distance < 200
),
inclusive AS (
    SELECT n.name, sum(l.kernel_ns) AS kernel_ns
    FROM (SELECT DISTINCT process, range_id, name FROM names) AS n
    JOIN launched AS l ON l.process = n.process AND l.range_id = n.range_id
    GROUP BY n.name
),
opened AS (
    SELECT name, min(depth) AS depth, max(ranges) AS ranges
    FROM (
        SELECT process, name, min(depth) AS depth, count(*) AS ranges
        FROM ranges
        GROUP BY process, name
    ) AS each_process
    GROUP BY name
)
SELECT
    o.name, o.depth, o.ranges,
    TRY_CAST(i.kernel_ns AS BIGINT) AS kernel_ns,
    CAST(i.kernel_ns AS DOUBLE) / NULLIF(CAST((SELECT sum(kernel_ns) FROM launched) AS DOUBLE), 0) AS share
FROM opened AS o
JOIN inclusive AS i ON i.name = o.name
ORDER BY kernel_ns DESC, o.depth, o.name
