-- processes: one row a process that recorded: the latest that it wrote.
--
-- Columns:
--   recorded_ns          BIGINT   ns        When this row was written.
--   host                 VARCHAR  -         Host name.
--   pid                  BIGINT   -         Process id on that host.
--   rank                 BIGINT   -         Global rank from the launcher's environment.
--   local_rank           BIGINT   -         Rank on the host.
--   world_size           BIGINT   -         Number of ranks.
--   started_ns           BIGINT   ns        When recording started.
--   ended_ns             BIGINT   ns        When recording ended.
--   ending               VARCHAR  -         How it ended: stop, exit or failed.
--   command              VARCHAR  -         The process's argv, as a JSON array.
--   settings             VARCHAR  -         The recorder's settings, as a JSON object.
--   nanalyze_version     VARCHAR  -         Version of the recorder.
--   python_version       VARCHAR  -         Version of Python.
--   cuda_driver_version  BIGINT   -         CUDA version of the driver, 13000 = 13.0.
--   gpu_driver_version   VARCHAR  -         Version of the GPU driver.
--   cupti_version        BIGINT   -         CUPTI's API version, 130001 = 13.0.1.
--   cupti_path           VARCHAR  -         The CUPTI library in use.
--   layers               VARCHAR  -         Layers that ran, comma-separated.
--   kernels_written      BIGINT   launches  Rows written to kernels.
--   records_lost         BIGINT   records   Activity records known to be lost.
--   shards               VARCHAR  -         Shards written per table, as a JSON object.
--   recorder_cpu_ns      BIGINT   ns        CPU time of the recorder's threads.
--   process              VARCHAR  -         Which process wrote the row.
SELECT
    recorded_ns, host, pid, rank, local_rank, world_size, started_ns, ended_ns, ending, command,
    settings, nanalyze_version, python_version, cuda_driver_version, gpu_driver_version,
    cupti_version, cupti_path, layers, kernels_written, records_lost, shards, recorder_cpu_ns,
    process
FROM raw.processes
QUALIFY row_number() OVER (PARTITION BY process ORDER BY recorded_ns DESC, ended_ns DESC NULLS LAST) = 1
