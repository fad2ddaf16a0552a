-- pauses: when the recorder switched itself off for a moment to measure its own effect.
--
-- Kernels and copies launched in a pause are in no view, so sums over a run lack them; ranges are there.
--
-- Columns:
--   start_ns     BIGINT   ns  When it began to switch its layers off: launches from here on may be missing.
--   off_ns       BIGINT   ns  When all were off: launches from here on are missing.
--   end_ns       BIGINT   ns  When it began to switch them on again.
--   complete_ns  BIGINT   ns  When a kernel launched after the pause had begun on every device; NULL if not seen.
--   process      VARCHAR  -   Which process wrote the row.
SELECT start_ns, off_ns, end_ns, complete_ns, process
FROM raw.pauses
