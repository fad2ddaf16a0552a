-- copies_summary: how much was copied or set on the GPU, between what, and how fast?
--
-- Columns:
--   kind         VARCHAR  -        memset, or HtoD, DtoH, DtoD, ... for copies.
--   source       VARCHAR  -        Memory kind copied from; NULL for a set.
--   destination  VARCHAR  -        Memory kind copied or set to.
--   copies       BIGINT   copies   How many.
--   bytes        BIGINT   bytes    Bytes in all.
--   mean_bytes   DOUBLE   bytes    Mean size.
--   total_ns     BIGINT   ns       Sum of the known durations; NULL where none is known.
--   bytes_per_s  DOUBLE   bytes/s  Bytes over time, of those with known durations.
WITH timed AS (
    SELECT
        kind, source, destination, bytes,
        CASE WHEN duration_ns BETWEEN 0 AND 1000000000000000 THEN duration_ns END AS duration_ns
    FROM copies
)
SELECT
    kind, source, destination,
    count(*) AS copies,
    TRY_CAST(sum(bytes) AS BIGINT) AS bytes,
    avg(bytes) AS mean_bytes,
    TRY_CAST(sum(duration_ns) AS BIGINT) AS total_ns,
    1e9 * CAST(sum(CASE WHEN duration_ns IS NOT NULL THEN bytes END) AS DOUBLE)
        / NULLIF(CAST(sum(duration_ns) AS DOUBLE), 0) AS bytes_per_s
FROM timed
GROUP BY kind, source, destination
ORDER BY total_ns DESC NULLS LAST, kind, source NULLS FIRST, destination NULLS FIRST
