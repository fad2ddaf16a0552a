-- compare_call_sites: in which ranges was each kernel class launched?
--
-- Columns:
--   kernel_class_id  BIGINT   -         Which kernel with which shape.
--   range_name       VARCHAR  -         Name of the innermost range; NULL where none was open.
--   launches         BIGINT   launches  Launched there.
SELECT k.kernel_class_id, r.name AS range_name, count(*) AS launches
FROM kernels AS k
LEFT JOIN ranges AS r ON r.process = k.process AND r.range_id = k.range_id
GROUP BY k.kernel_class_id, r.name
ORDER BY k.kernel_class_id, launches DESC, range_name NULLS LAST
