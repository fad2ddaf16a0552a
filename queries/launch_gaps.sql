-- launch_gaps: how long did each stream stand idle between its kernels and copies?
--
-- In a pause of the recorder nobody knows what ran, so it is neither a gap nor part of one.
--
-- Columns:
--   process         VARCHAR  -       Which process.
--   device_id       INTEGER  -       CUDA ordinal in the process.
--   context_id      BIGINT   -       CUPTI's context id.
--   stream_id       BIGINT   -       CUPTI's stream id.
--   activities      BIGINT   -       Kernels, copies and sets with known times.
--   span_ns         BIGINT   ns      From the first one's start to the last one's end.
--   paused_ns       BIGINT   ns      Of it, between two of them and in a pause of the recorder.
--   gaps            BIGINT   gaps    Times that nothing ran between two of them, and nothing was paused.
--   gap_ns          BIGINT   ns      Length of all gaps.
--   gap_share       DOUBLE   1       gap_ns over span_ns without paused_ns, 0 to 1.
--   mean_gap_ns     DOUBLE   ns      Mean length of a gap.
--   longest_gap_ns  BIGINT   ns      The longest gap.
SELECT
    process, device_id, context_id, stream_id,
    activities,
    last_ns - first_ns AS span_ns,
    paused_ns,
    gaps,
    gap_ns,
    CAST(gap_ns AS DOUBLE) / NULLIF(last_ns - first_ns - paused_ns, 0) AS gap_share,
    CAST(gap_ns AS DOUBLE) / NULLIF(gaps, 0) AS mean_gap_ns,
    longest_gap_ns
FROM _stream_time
ORDER BY gap_ns DESC, process, device_id, context_id, stream_id
