-- run: the run directory itself, one row, as its run.json says.
--
-- Columns:
--   run_id          VARCHAR  -   Random identifier.
--   created_ns      BIGINT   ns  When the directory was made.
--   source          VARCHAR  -   recorder, or the name of the importer.
--   format_version  INTEGER  -   Version of the run directory.
SELECT run_id, created_ns, source, format_version
FROM raw.run
