-- ranges: ranges of host code, one row each.
--
-- Columns:
--   range_id    BIGINT   -      Unique in the process.
--   parent_id   BIGINT   -      Enclosing range of the same thread.
--   depth       INTEGER  -      0 for an outermost range.
--   name        VARCHAR  -      The range's name.
--   source      VARCHAR  -      annotate or nvtx.
--   thread_id   BIGINT   -      Native id of the thread.
--   start_ns    BIGINT   ns     When it was opened (host).
--   end_ns      BIGINT   ns     When it was closed; NULL if it never was.
--   flops       DOUBLE   FLOP   Floating-point operations the user says it does.
--   bytes       DOUBLE   bytes  Bytes the user says it must move.
--   attributes  VARCHAR  -      Further attributes, as a JSON object.
--   process     VARCHAR  -      Which process wrote the row.
SELECT
    range_id, parent_id, depth, name, source, thread_id, start_ns, end_ns, flops, bytes,
    attributes, process
FROM raw.ranges
