-- _pause_spans: when what a process ran on its devices is not known, because of a pause of the recorder.
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
