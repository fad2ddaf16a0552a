-- verdict_shares: how is the GPU time divided by what bounds the kernels?
--
-- Columns:
--   bound             VARCHAR  -         See verdicts.
--   classes           BIGINT   classes   Kernel classes with that verdict.
--   launches          BIGINT   launches  Their launches.
--   launches_untimed  BIGINT   launches  Those whose duration is not known.
--   total_ns          BIGINT   ns        Their time; NULL where none is known.
--   share             DOUBLE   1         Of all kernel time, 0 to 1.
SELECT
    bound,
    count(*) AS classes,
    CAST(sum(launches) AS BIGINT) AS launches,
    CAST(sum(launches_untimed) AS BIGINT) AS launches_untimed,
    TRY_CAST(sum(total_ns) AS BIGINT) AS total_ns,
    sum(share) AS share
FROM verdicts
GROUP BY bound
ORDER BY total_ns DESC NULLS LAST, bound
