-- _communicating: kernel classes whose name marks communication between devices.
--
-- Columns:
--   kernel_class_id  BIGINT  -  Which kernel with which shape.
SELECT DISTINCT c.kernel_class_id
FROM kernel_classes AS c
JOIN communication_patterns AS p
    -- Only the function's own name counts, not its arguments.
    ON regexp_matches(regexp_replace(replace(c.name, '(anonymous namespace)::', ''), '[<(].*', ''), p.pattern)
