-- communication_patterns: regular expressions for the names of kernels that communicate.
--
-- Columns:
--   pattern  VARCHAR  -  Searched for in the kernel's own name, its arguments left out.
--   meaning  VARCHAR  -  Which library it stands for.
SELECT pattern, meaning
FROM raw.communication_patterns
