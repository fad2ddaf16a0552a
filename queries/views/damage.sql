-- damage: shards that were left out or found missing, one row each; empty where all is well.
--
-- Columns:
--   path        VARCHAR  -  File or folder, within the run directory.
--   table_name  VARCHAR  -  Which table.
--   process     VARCHAR  -  Which process; NULL where it is not known.
--   problem     VARCHAR  -  What is wrong.
--   remedy      VARCHAR  -  What to do about it.
SELECT path, table_name, process, problem, remedy
FROM raw.damage
