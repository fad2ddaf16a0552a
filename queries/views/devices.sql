-- devices: one row a GPU that a process can see.
--
-- Columns:
--   device_id                        INTEGER  -              CUDA ordinal in the process.
--   uuid                             VARCHAR  -              The GPU's (or MIG instance's) UUID.
--   name                             VARCHAR  -              Product name.
--   chip                             VARCHAR  -              Chip name as CUPTI knows it, such as GH100.
--   cc_major                         INTEGER  -              Compute capability, major.
--   cc_minor                         INTEGER  -              Compute capability, minor.
--   sm_count                         INTEGER  SMs            Streaming multiprocessors.
--   warp_size                        INTEGER  threads        Threads a warp.
--   threads_per_sm_max               INTEGER  threads        Resident threads an SM.
--   blocks_per_sm_max                INTEGER  blocks         Resident blocks an SM.
--   registers_per_sm                 INTEGER  registers      32-bit registers an SM.
--   shared_bytes_per_sm              BIGINT   bytes          Shared memory an SM.
--   shared_reserved_bytes_per_block  BIGINT   bytes          Shared memory the driver takes from each block.
--   l2_bytes                         BIGINT   bytes          L2 cache.
--   memory_bytes                     BIGINT   bytes          Device memory.
--   memory_bus_bits                  INTEGER  bits           Width of the memory bus.
--   sm_clock_max_hz                  BIGINT   Hz             Highest SM clock.
--   memory_clock_max_hz              BIGINT   Hz             Highest memory clock.
--   dram_peak_bytes_per_s            DOUBLE   bytes/s        2 x memory clock x bus width.
--   fp64_flops_per_sm_cycle          DOUBLE   FLOP/cycle/SM  FP64 pipe; an FMA is two.
--   fp32_flops_per_sm_cycle          DOUBLE   FLOP/cycle/SM  FP32 pipe.
--   fp16_flops_per_sm_cycle          DOUBLE   FLOP/cycle/SM  Packed FP16 outside the tensor pipe.
--   tensor_fp64_flops_per_sm_cycle   DOUBLE   FLOP/cycle/SM  Tensor pipe, FP64, dense.
--   tensor_tf32_flops_per_sm_cycle   DOUBLE   FLOP/cycle/SM  Tensor pipe, TF32, dense.
--   tensor_fp16_flops_per_sm_cycle   DOUBLE   FLOP/cycle/SM  Tensor pipe, FP16 and BF16, dense.
--   tensor_fp8_flops_per_sm_cycle    DOUBLE   FLOP/cycle/SM  Tensor pipe, FP8, dense.
--   tensor_int8_ops_per_sm_cycle     DOUBLE   OP/cycle/SM    Tensor pipe, INT8, dense.
--   peaks_source                     VARCHAR  -              Where the pipe rates come from.
--   is_mig                           BOOLEAN  -              Whether this is a MIG instance.
--   process                          VARCHAR  -              Which process wrote the row.
SELECT
    device_id, uuid, name, chip, cc_major, cc_minor, sm_count, warp_size, threads_per_sm_max,
    blocks_per_sm_max, registers_per_sm, shared_bytes_per_sm, shared_reserved_bytes_per_block,
    l2_bytes, memory_bytes, memory_bus_bits, sm_clock_max_hz, memory_clock_max_hz,
    dram_peak_bytes_per_s, fp64_flops_per_sm_cycle, fp32_flops_per_sm_cycle,
    fp16_flops_per_sm_cycle, tensor_fp64_flops_per_sm_cycle, tensor_tf32_flops_per_sm_cycle,
    tensor_fp16_flops_per_sm_cycle, tensor_fp8_flops_per_sm_cycle, tensor_int8_ops_per_sm_cycle,
    peaks_source, is_mig, process
FROM raw.devices
-- A process that recorded twice describes its devices twice.
QUALIFY row_number() OVER (PARTITION BY process, device_id ORDER BY uuid, name) = 1
