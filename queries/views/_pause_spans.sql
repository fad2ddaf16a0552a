-- _pause_spans: when what a process ran on its devices is not known, launch by launch.
--
-- That is in a pause of the recorder and in the time whose launches were rolled up.
--
-- Columns:
--   process   VARCHAR  -   Which process.
--   start_ns  BIGINT   ns  Start of the pause.
--   end_ns    BIGINT   ns  When kernels launched in the pause had ended, as far as that was seen.
SELECT process, start_ns, greatest(end_ns, COALESCE(complete_ns, end_ns)) AS end_ns
FROM pauses
WHERE start_ns BETWEEN 0 AND 4000000000000000000
    AND end_ns BETWEEN start_ns AND 4000000000000000000
    AND COALESCE(complete_ns, end_ns) <= 4000000000000000000
UNION ALL
SELECT process, min(first_ns), max(last_ns)
FROM _rolled_up
GROUP BY process
