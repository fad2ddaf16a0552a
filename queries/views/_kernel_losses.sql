-- _kernel_losses: what of its time each kernel class could save at most: by its rate, full waves or occupancy.
--
-- Columns:
--   kernel_class_id            BIGINT   -       Which kernel with which shape.
--   kernel                     VARCHAR  -       Demangled name.
--   bound                      VARCHAR  -       See verdicts.
--   level_or_pipe              VARCHAR  -       See verdicts.
--   launches                   BIGINT   launches  All launches.
--   total_ns                   BIGINT   ns      Sum of the known durations.
--   share                      DOUBLE   1       Of all kernel time, 0 to 1.
--   mean_ns                    DOUBLE   ns      Mean of the known durations.
--   compute_pct                DOUBLE   %       Speed of light of the SM.
--   memory_pct                 DOUBLE   %       Speed of light of the memory system.
--   method                     VARCHAR  -       Of the counters: exact, imported or sampled.
--   peak_pct                   DOUBLE   %       The larger of the two at the lower ends of their intervals, at most 100;
--                                               NULL where one is missing or impossible.
--   dram_read_bytes            DOUBLE   bytes   Read from DRAM, a launch.
--   dram_write_bytes           DOUBLE   bytes   Written to DRAM, a launch.
--   waves                      DOUBLE   -       Blocks of the grid over the blocks the device holds at once.
--   blocks_per_sm              BIGINT   blocks  Resident blocks an SM.
--   last_wave                  DOUBLE   1       How much of the device the last of several waves fills.
--   occupancy_pct              DOUBLE   %       Achieved occupancy.
--   theoretical_occupancy_pct  DOUBLE   %       The most that registers, shared memory and block size allow.
--   limiter                    VARCHAR  -       What limits a low occupancy.
--   tail_share                 DOUBLE   1       Of its time, the most that full waves could save.
--   occupancy_share            DOUBLE   1       The most that full occupancy could save.
WITH limits AS (
    SELECT max(CASE WHEN name = 'low_occupancy_pct' THEN value END) AS low_occupancy_pct FROM settings
),
classes AS (
    SELECT
        v.*, o.blocks_per_sm, l.low_occupancy_pct, c.dram_read_bytes, c.dram_write_bytes,
        CASE
            WHEN v.compute_pct IS NOT NULL AND v.memory_pct IS NOT NULL AND NOT v.over_peak
                THEN least(
                    greatest(
                        COALESCE(v.compute_low_pct, v.compute_pct), COALESCE(v.memory_low_pct, v.memory_pct), 0
                    ),
                    100
                )
        END AS peak_pct,
        CASE WHEN v.waves > 1 THEN v.waves - ceil(v.waves) + 1 END AS last_wave,
        -- Achieved, else what fits, of which a grid of less than a wave fills a part.
        COALESCE(v.occupancy_pct, v.theoretical_occupancy_pct * least(v.waves, 1)) < l.low_occupancy_pct AS is_low
    FROM verdicts AS v
    LEFT JOIN _occupancy AS o ON o.kernel_class_id = v.kernel_class_id
    LEFT JOIN _class_counters AS c ON c.kernel_class_id = v.kernel_class_id
    CROSS JOIN limits AS l
)
SELECT
    kernel_class_id, kernel, bound, level_or_pipe, launches, total_ns, share, mean_ns, compute_pct, memory_pct, method,
    peak_pct, dram_read_bytes, dram_write_bytes, waves, blocks_per_sm, last_wave,
    occupancy_pct, theoretical_occupancy_pct,
    CASE
        WHEN is_low AND bound <> 'communication' THEN CASE
            WHEN waves < 1 THEN 'grid'
            WHEN theoretical_occupancy_pct < low_occupancy_pct THEN CASE occupancy_limiter
                WHEN 'registers' THEN 'registers'
                WHEN 'shared' THEN 'shared memory'
                ELSE 'block size'
            END
            WHEN theoretical_occupancy_pct IS NOT NULL THEN 'uneven blocks'
        END
    END AS limiter,
    CASE WHEN waves > 1 AND bound <> 'communication' THEN 1 - waves / ceil(waves) END AS tail_share,
    CASE
        WHEN is_low AND bound = 'latency' AND occupancy_pct IS NOT NULL
            THEN 1 - least(greatest(occupancy_pct, peak_pct), 100) / 100
    END AS occupancy_share
FROM classes
