-- kernel_losses: which kernels leave SMs empty, in their last wave or throughout, and what limits them?
--
-- Bounds are upper bounds of what the change could save, for blocks that take equally long; they overlap. A tail:
-- the grid's last wave of blocks does not fill the device, so of ceil(waves) waves only `waves` are used. Low
-- occupancy (below low_occupancy_pct) has a bound only where counters say that the kernel waits for latency: with
-- all warps resident it cannot run faster than in proportion, nor above the peak that it comes closest to.
-- Kernels that communicate are left out: their grids are small on purpose.
--
-- Columns:
--   kernel_class_id            BIGINT   -       Which kernel with which shape.
--   kernel                     VARCHAR  -       Demangled name.
--   bound                      VARCHAR  -       See verdicts.
--   total_ns                   BIGINT   ns      Sum of the known durations.
--   share                      DOUBLE   1       Of all kernel time, 0 to 1.
--   waves                      DOUBLE   -       Blocks of the grid over the blocks the device holds at once.
--   blocks_per_sm              BIGINT   blocks  Resident blocks an SM by registers, shared memory and block size.
--   last_wave                  DOUBLE   1       How much of the device the last of several waves fills, above 0 to 1.
--   tail_bound_ns              BIGINT   ns      The most that full waves could save; NULL with one wave.
--   occupancy_pct              DOUBLE   %       Achieved occupancy; NULL where it was not counted.
--   theoretical_occupancy_pct  DOUBLE   %       The most that registers, shared memory and block size allow.
--   limiter                    VARCHAR  -       Where occupancy is low: grid, registers, shared memory, block size or
--                                               uneven blocks (all would fit, but end at different times).
--   occupancy_bound_ns         BIGINT   ns      The most that full occupancy could save; NULL where not known.
--   method                     VARCHAR  -       Of the counters: exact, imported or sampled.
SELECT
    kernel_class_id, kernel, bound, total_ns, share, waves, blocks_per_sm, last_wave,
    TRY_CAST(total_ns * tail_share AS BIGINT) AS tail_bound_ns,
    occupancy_pct, theoretical_occupancy_pct, limiter,
    TRY_CAST(total_ns * occupancy_share AS BIGINT) AS occupancy_bound_ns,
    method
FROM _kernel_losses
WHERE total_ns > 0 AND (tail_share > 0 OR limiter IS NOT NULL)
ORDER BY
    greatest(total_ns * COALESCE(tail_share, 0), total_ns * COALESCE(occupancy_share, 0)) DESC,
    total_ns DESC, kernel_class_id
