-- settings: the thresholds that the verdicts use.
--
-- Columns:
--   name     VARCHAR  -                 Name of the setting.
--   value    DOUBLE   as the setting's  Its value.
--   unit     VARCHAR  -                 Unit of the value.
--   meaning  VARCHAR  -                 What it decides.
SELECT name, value, unit, meaning
FROM raw.settings
