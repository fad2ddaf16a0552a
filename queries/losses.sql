-- losses: what is missing from this run, and why?
--
-- Columns:
--   source   VARCHAR  -  damage (of the run directory), event (of the recorder) or process.
--   process  VARCHAR  -  Which process.
--   subject  VARCHAR  -  The path that is damaged, the recorder's layer, or the process's ending.
--   message  VARCHAR  -  One sentence: what, and what would fix it.
--   count    BIGINT   -  How many records, launches or files it concerns; NULL where not known.
WITH written AS (
    SELECT p.process, p.kernels_written, COALESCE(sum(k.launches), 0) AS kernels_found
    FROM processes AS p
    LEFT JOIN (
        SELECT process, launches FROM _class_devices
        UNION ALL
        SELECT process, launches FROM _rolled_up
    ) AS k ON k.process = p.process
    WHERE p.ended_ns IS NOT NULL
    GROUP BY p.process, p.kernels_written
),
found AS (
    SELECT 'damage' AS source, process, path AS subject, concat(problem, '. ', remedy) AS message, 1 AS count
    FROM damage
    UNION ALL
    SELECT 'event', process, layer, message, count
    FROM events
    WHERE kind IN ('loss', 'failure')
    UNION ALL
    SELECT 'process', process, COALESCE(ending, 'running'), 'Activity records were lost.', records_lost
    FROM processes
    WHERE records_lost > 0
    UNION ALL
    SELECT
        'process', process, 'running',
        'Did not end: it still runs, or was killed and lost at most its last flush.', NULL
    FROM processes
    WHERE ended_ns IS NULL
    UNION ALL
    SELECT
        'process', process, 'kernels', 'Launches that the process wrote are not in the run directory.',
        kernels_written - kernels_found
    FROM written
    WHERE kernels_written > kernels_found
)
SELECT source, process, subject, message, CAST(count AS BIGINT) AS count
FROM found
ORDER BY source, process NULLS FIRST, subject, message, count NULLS FIRST
