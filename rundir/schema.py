"""The tables of a run directory, version 3: every column with type, unit and meaning.

This module is the single source: the recorder writes by it, the analysis checks against it and
`docs/run-directory.md` is generated from it (`python -m nanalyze.rundir.document`).

Storage is integer nanoseconds and bytes. All `*_ns` instants count from the Unix epoch on the
host's realtime clock, which is also CUPTI's clock, so tables line up without calibration.
What was not measured is NULL, never 0 or -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_NAME = "nanalyze"
# The newest version, and the one that recorders and importers write: a run becomes the newest by what is done to it.
FORMAT_VERSION = 3
RECORDED_VERSION = 1
HISTORY = {
    1: "First version: kernels, classes, copies, ranges, exact counters, samples, device state, pauses.",
    2: "Launches that were rolled up: the table `kernel_minutes`. Runs are of version 1 until that is first done.",
    3: "Samples that were rolled up: the table `sampled_windows`. Only runs in which that was done are of it.",
}

VERSION_KEY = b"nanalyze.format_version"
TABLE_KEY = b"nanalyze.table"

# How a column is written. Chosen by measurement on real training traces (docs/measurements.md):
# instants and counters that grow step by little are delta-encoded, everything that repeats goes
# through a dictionary, and durations are left to zstd. BYTE_STREAM_SPLIT would save another 0.1
# bytes a launch, but DuckDB before 2.0 and pyarrow before 17 cannot read it for integers.
DELTA = "DELTA_BINARY_PACKED"
PLAIN = "PLAIN"
DICTIONARY = "RLE_DICTIONARY"


@dataclass(frozen=True)
class Column:
    """One column: Arrow type name, unit ('' where it has none), meaning, Parquet encoding.

    The type `histogram` is a list of structs of `bin` (int32) and `launches` (int64).
    """

    name: str
    type: str
    unit: str
    meaning: str
    nullable: bool = False
    encoding: str = DICTIONARY

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        factories: dict[str, Any] = {
            "int32": pa.int32,
            "int64": pa.int64,
            "float64": pa.float64,
            "string": pa.string,
            "bool": pa.bool_,
            "histogram": lambda: pa.list_(
                pa.field("element", pa.struct([("bin", pa.int32()), ("launches", pa.int64())]))
            ),
        }
        return factories[self.type]()

    @property
    def leaves(self) -> tuple[str, ...]:
        """Paths of its Parquet columns."""
        if self.type == "histogram":
            return tuple(f"{self.name}.list.element.{leaf}" for leaf in ("bin", "launches"))
        return (self.name,)


@dataclass(frozen=True)
class Table:
    """One table: a folder of shards, partitioned by `process`.

    `open_ended` tables may carry further float64 columns beyond the declared ones (one a
    hardware counter); every other table has exactly the declared columns. `version` is the format
    version that brought the table; its shards carry it.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    open_ended: bool = False
    version: int = RECORDED_VERSION

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def arrow_schema(self, extra: tuple[str, ...] = ()) -> pa.Schema:
        """The Arrow schema, with `extra` float64 counter columns where the table is open-ended."""
        import pyarrow as pa

        if extra and not self.open_ended:
            raise ValueError(f"table {self.name} has a fixed set of columns, got {extra}")
        fields = [pa.field(c.name, c.arrow_type(), nullable=c.nullable) for c in self.columns]
        fields += [pa.field(name, pa.float64()) for name in extra]
        metadata = {VERSION_KEY: str(self.version).encode(), TABLE_KEY: self.name.encode()}
        return pa.schema(fields, metadata=metadata)


PROCESS_COLUMN = Column(
    "process",
    "string",
    "",
    "Which process wrote the row: `<host>-<rank>-<pid>`. Not stored in the files: it is the name "
    "of their folder (Hive partitioning).",
)

PROCESSES = Table(
    "processes",
    "One row when recording starts and one when it ends; the row with the latest `recorded_ns` "
    "counts. A process without `ended_ns` is still running or was cut off.",
    (
        Column("recorded_ns", "int64", "ns", "When this row was written."),
        Column("host", "string", "", "Host name."),
        Column("pid", "int64", "", "Process id on that host."),
        Column("rank", "int64", "", "Global rank from the launcher's environment.", True),
        Column("local_rank", "int64", "", "Rank on the host.", True),
        Column("world_size", "int64", "", "Number of ranks.", True),
        Column("started_ns", "int64", "ns", "When recording started."),
        Column("ended_ns", "int64", "ns", "When recording ended.", True),
        Column(
            "ending",
            "string",
            "",
            "How it ended: stop, exit (of the interpreter) or failed (an exception left the block).",
            True,
        ),
        Column("command", "string", "", "The process's argv, as a JSON array."),
        Column("settings", "string", "", "The recorder's settings, as a JSON object."),
        Column("nanalyze_version", "string", "", "Version of the recorder."),
        Column("python_version", "string", "", "Version of Python."),
        Column("cuda_driver_version", "int64", "", "CUDA version of the driver, 13000 = 13.0.", True),
        Column("gpu_driver_version", "string", "", "Version of the GPU driver.", True),
        Column("cupti_version", "int64", "", "CUPTI's API version, 130001 = 13.0.1.", True),
        Column("cupti_path", "string", "", "The CUPTI library in use.", True),
        Column("layers", "string", "", "Layers that ran, comma-separated."),
        Column("kernels_written", "int64", "launches", "Rows written to `kernels`."),
        Column("records_lost", "int64", "records", "Activity records known to be lost.", True),
        Column("shards", "string", "", "Shards written per table, as a JSON object.", True),
        Column("recorder_cpu_ns", "int64", "ns", "CPU time of the recorder's threads.", True),
    ),
)

DEVICES = Table(
    "devices",
    "One row a GPU that the process can see: properties from the driver and NVML, peaks from them "
    "and from the per-architecture table.",
    (
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("uuid", "string", "", "The GPU's (or MIG instance's) UUID.", True),
        Column("name", "string", "", "Product name."),
        Column("chip", "string", "", "Chip name as CUPTI knows it, such as GH100.", True),
        Column("cc_major", "int32", "", "Compute capability, major.", True),
        Column("cc_minor", "int32", "", "Compute capability, minor.", True),
        Column("sm_count", "int32", "SMs", "Streaming multiprocessors.", True),
        Column("warp_size", "int32", "threads", "Threads a warp.", True),
        Column("threads_per_sm_max", "int32", "threads", "Resident threads an SM.", True),
        Column("blocks_per_sm_max", "int32", "blocks", "Resident blocks an SM.", True),
        Column("registers_per_sm", "int32", "registers", "32-bit registers an SM.", True),
        Column("shared_bytes_per_sm", "int64", "bytes", "Shared memory an SM.", True),
        Column(
            "shared_reserved_bytes_per_block", "int64", "bytes", "Shared memory the driver takes from each block.", True
        ),
        Column("l2_bytes", "int64", "bytes", "L2 cache.", True),
        Column("memory_bytes", "int64", "bytes", "Device memory.", True),
        Column("memory_bus_bits", "int32", "bits", "Width of the memory bus.", True),
        Column("sm_clock_max_hz", "int64", "Hz", "Highest SM clock.", True),
        Column("memory_clock_max_hz", "int64", "Hz", "Highest memory clock.", True),
        Column("dram_peak_bytes_per_s", "float64", "bytes/s", "2 x memory clock x bus width.", True),
        Column("fp64_flops_per_sm_cycle", "float64", "FLOP/cycle/SM", "FP64 pipe; an FMA is two.", True),
        Column("fp32_flops_per_sm_cycle", "float64", "FLOP/cycle/SM", "FP32 pipe.", True),
        Column("fp16_flops_per_sm_cycle", "float64", "FLOP/cycle/SM", "Packed FP16 outside the tensor pipe.", True),
        Column("tensor_fp64_flops_per_sm_cycle", "float64", "FLOP/cycle/SM", "Tensor pipe, FP64, dense.", True),
        Column("tensor_tf32_flops_per_sm_cycle", "float64", "FLOP/cycle/SM", "Tensor pipe, TF32, dense.", True),
        Column(
            "tensor_fp16_flops_per_sm_cycle", "float64", "FLOP/cycle/SM", "Tensor pipe, FP16 and BF16, dense.", True
        ),
        Column("tensor_fp8_flops_per_sm_cycle", "float64", "FLOP/cycle/SM", "Tensor pipe, FP8, dense.", True),
        Column("tensor_int8_ops_per_sm_cycle", "float64", "OP/cycle/SM", "Tensor pipe, INT8, dense.", True),
        Column("peaks_source", "string", "", "Where the pipe rates come from.", True),
        Column("is_mig", "bool", "", "Whether this is a MIG instance.", True),
    ),
)

CEILINGS = Table(
    "ceilings",
    "One row for each ceiling that `nanalyze doctor --calibrate` measured on a device: what a small kernel that "
    "does nothing else reaches. They are copied here when the device is described, or added later with `-o`.",
    (
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("ceiling", "string", "", "A pipe (fp32, tensor_bf16, ...), or a level and a direction (l2_read)."),
        Column("method", "string", "", "Instruction that it was reached with."),
        Column("unit", "string", "", "FLOP/s, OP/s or bytes/s; a multiply-add is two operations."),
        Column("per_s", "float64", "as unit", "Median of the repetitions.", False, PLAIN),
        Column("low_per_s", "float64", "as unit", "Lowest repetition.", False, PLAIN),
        Column("high_per_s", "float64", "as unit", "Highest repetition.", False, PLAIN),
        Column("repetitions", "int32", "launches", "How often it was measured."),
        Column("is_partial", "bool", "", "Whether the method is known not to reach the pipe's peak on this device."),
        Column("sm_clock_hz", "int64", "Hz", "SM clock that ran, by the kernel's own cycles.", True),
        Column("memory_clock_hz", "int64", "Hz", "Memory clock while it ran.", True),
        Column("throttle_reasons", "int64", "", "NVML's bit mask of reasons to lower the clocks while it ran.", True),
        Column("measured_ns", "int64", "ns", "When it was measured."),
    ),
)

KERNELS = Table(
    "kernels",
    "One row a kernel launch. A launch that ran under the exact-counter session has no times here "
    "(the profiler suppresses them); its duration stands in `exact`.",
    (
        Column("start_ns", "int64", "ns", "When the kernel started on the GPU.", True, DELTA),
        Column("duration_ns", "int64", "ns", "How long it ran.", True, PLAIN),
        Column("kernel_class_id", "int64", "", "Which kernel with which shape: see `kernel_classes`."),
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("context_id", "int64", "", "CUPTI's context id; NULL where an imported trace has none.", True),
        Column("stream_id", "int64", "", "CUPTI's stream id; NULL where an imported trace has none.", True),
        Column("graph_id", "int64", "", "CUDA graph the launch came from.", True),
        Column("graph_node_id", "int64", "", "Node in that graph.", True, DELTA),
        Column(
            "correlation_id",
            "int64",
            "",
            "CUPTI's correlation id: one an API call, so the nodes of one graph launch share it.",
            True,
            DELTA,
        ),
        Column("queued_ns", "int64", "ns", "When the launch call was made (host).", True, DELTA),
    ),
)

KERNEL_MINUTES = Table(
    "kernel_minutes",
    "Launches that were rolled up (`nanalyze compact --roll-up-older-than`): one row for those of one class on one "
    "device that started in one minute, or several to be added up. The numbers of its files are those of the files "
    "of `kernels` that they take the place of.",
    (
        Column("minute_ns", "int64", "ns", "Start of the minute.", False, DELTA),
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("kernel_class_id", "int64", "", "Which kernel with which shape: see `kernel_classes`."),
        Column("launches", "int64", "launches", "All launches."),
        Column("launches_untimed", "int64", "launches", "Those whose duration is not known."),
        Column("launches_in_graphs", "int64", "launches", "Those that came from a CUDA graph."),
        Column(
            "total_ns",
            "int64",
            "ns",
            "Sum of the known durations, those in `exact` included; NULL where none is known.",
            True,
            DELTA,
        ),
        Column(
            "overlapped_ns",
            "int64",
            "ns",
            "Of `total_ns`, the time in which a kernel of the process that had started earlier still ran on the "
            "device: the sum of `total_ns` - `overlapped_ns` over all classes is how long the device ran kernels.",
            True,
            DELTA,
        ),
        Column("shortest_ns", "int64", "ns", "Shortest launch.", True, DELTA),
        Column("longest_ns", "int64", "ns", "Longest launch.", True, DELTA),
        Column(
            "p50_bin",
            "int32",
            "",
            "Bin of durations in which their median lies. Bin b holds those from exp(b / 92) to exp((b + 1) / 92) ns, "
            "bin -1 those of 0 ns.",
            True,
            DELTA,
        ),
        Column("p90_bin", "int32", "", "Bin in or below which nine of ten lie.", True, DELTA),
        Column("p99_bin", "int32", "", "Bin in or below which all but a hundredth lie.", True, DELTA),
        Column(
            "histogram",
            "histogram",
            "",
            "How many launches of the hour lie in which bin, on the first minute of each class, device and hour of a "
            "file; NULL on the others. Histograms add up to those of any hours.",
            True,
        ),
    ),
    version=2,
)

KERNEL_CLASSES = Table(
    "kernel_classes",
    "One row for each kernel with its launch shape and resources. The id is a 63-bit hash of all "
    "other columns but the demangled name, so the same class has the same id in every process and run.",
    (
        Column("kernel_class_id", "int64", "", "The hash."),
        Column("name_mangled", "string", "", "Symbol name; bytes that are not UTF-8 appear as \\xNN."),
        Column("name", "string", "", "Demangled name."),
        Column("grid_x", "int32", "blocks", "Grid."),
        Column("grid_y", "int32", "blocks", "Grid."),
        Column("grid_z", "int32", "blocks", "Grid."),
        Column("block_x", "int32", "threads", "Block."),
        Column("block_y", "int32", "threads", "Block."),
        Column("block_z", "int32", "threads", "Block."),
        Column("cluster_x", "int32", "blocks", "Thread-block cluster; 0 where none is used."),
        Column("cluster_y", "int32", "blocks", "Thread-block cluster."),
        Column("cluster_z", "int32", "blocks", "Thread-block cluster."),
        Column("registers_per_thread", "int32", "registers", "As compiled.", True),
        Column("static_shared_bytes", "int64", "bytes", "Static shared memory a block.", True),
        Column("dynamic_shared_bytes", "int64", "bytes", "Dynamic shared memory a block.", True),
        Column("local_bytes_per_thread", "int64", "bytes", "Local memory a thread.", True),
    ),
)

COPIES = Table(
    "copies",
    "One row a memory copy or memory set on the GPU.",
    (
        Column("start_ns", "int64", "ns", "When it started.", True, DELTA),
        Column("duration_ns", "int64", "ns", "How long it took.", True, PLAIN),
        Column("kind", "string", "", "memset, or HtoD, DtoH, DtoD, HtoH, PtoP, ... for copies."),
        Column("bytes", "int64", "bytes", "Bytes copied or set."),
        Column("source", "string", "", "Memory kind copied from: pageable, pinned, device, array, managed.", True),
        Column("destination", "string", "", "Memory kind copied or set to.", True),
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("source_device_id", "int32", "", "For peer copies.", True),
        Column("destination_device_id", "int32", "", "For peer copies.", True),
        Column("context_id", "int64", "", "CUPTI's context id; NULL where an imported trace has none.", True),
        Column("stream_id", "int64", "", "CUPTI's stream id; NULL where an imported trace has none.", True),
        Column("is_async", "bool", "", "Whether the call was asynchronous.", True),
        Column("graph_id", "int64", "", "CUDA graph it came from.", True),
        Column("graph_node_id", "int64", "", "Node in that graph.", True),
        Column("correlation_id", "int64", "", "CUPTI's correlation id.", True, DELTA),
    ),
)

RANGES = Table(
    "ranges",
    "One row a range of host code (`recorder.annotate`, NVTX). A kernel belongs to the innermost "
    "range that was open when it was launched (`queued_ns`), whichever thread launched it.",
    (
        Column("range_id", "int64", "", "Unique in the process."),
        Column("parent_id", "int64", "", "Enclosing range of the same thread.", True),
        Column("depth", "int32", "", "0 for an outermost range."),
        Column("name", "string", "", "The range's name."),
        Column(
            "source",
            "string",
            "",
            "annotate, nvtx, or what an imported trace calls it: record_function, collective, proton.",
        ),
        Column("thread_id", "int64", "", "Native id of the thread."),
        Column("start_ns", "int64", "ns", "When it was opened (host).", False, DELTA),
        Column("end_ns", "int64", "ns", "When it was closed; NULL if it never was.", True, DELTA),
        Column("flops", "float64", "FLOP", "Floating-point operations the user says it does.", True),
        Column("bytes", "float64", "bytes", "Bytes the user says it must move.", True),
        Column("attributes", "string", "", "Further attributes, as a JSON object.", True),
    ),
)

SAMPLES = Table(
    "samples",
    "One row a PM sample of a device: the sum of each counter over the whole device between start "
    "and end. One further column a counter, NULL where its group was not being counted.",
    (
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("start_ns", "int64", "ns", "Start of the sample.", False, DELTA),
        Column("end_ns", "int64", "ns", "End of the sample.", False, DELTA),
        Column("counter_group", "int32", "", "Which group of counters was running."),
    ),
    open_ended=True,
)

SAMPLED_WINDOWS = Table(
    "sampled_windows",
    "Samples that were rolled up (`nanalyze compact --roll-up-older-than`): one row for each counter of each kernel "
    "class in a window of time, attributed while its launches were still there. The numbers of its files are those of "
    "the files of `samples` that they take the place of.",
    (
        Column("start_ns", "int64", "ns", "Start of the window's first sample."),
        Column("end_ns", "int64", "ns", "End of its last sample."),
        Column("kernel_class_id", "int64", "", "Which kernel with which shape: see `kernel_classes`."),
        Column("counter", "string", "", "The counter, as in the view `counters`."),
        Column("value", "float64", "", "Mean over the window, within 8e-6, in the counter's unit.", False, PLAIN),
        Column(
            "standard_error",
            "float64",
            "",
            "Its standard error; NULL where the value is known for certain.",
            True,
            PLAIN,
        ),
        Column(
            "lasting_error",
            "float64",
            "",
            "The part of the standard error that more samples do not remove: where launches begin and end, what L2 "
            "keeps of DRAM bytes from launch to launch, how far a class's clock is known, and 1 % of the value.",
            True,
            PLAIN,
        ),
        Column("low", "float64", "", "Lower end of its 95 % interval.", False, PLAIN),
        Column("high", "float64", "", "Upper end of its 95 % interval.", False, PLAIN),
        Column("launches", "int64", "launches", "Launches of the class that met the window."),
        Column("time_ns", "int64", "ns", "How long the class ran while samples were taken."),
        Column("missing", "string", "", "Parts of the counter that were not sampled; NULL for none.", True),
    ),
    version=3,
)

EXACT = Table(
    "exact",
    "One row for each metric of each launch measured by the range profiler (replayed, serialised).",
    (
        Column("scope", "string", "", "kernel: one launch. graph: the sum over one graph launch."),
        Column("measured_ns", "int64", "ns", "When the measurement ended (host).", True, DELTA),
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("correlation_id", "int64", "", "Of the launch; of the last of several graph launches.", True, DELTA),
        Column("kernel_class_id", "int64", "", "Class of the launch; NULL for a graph.", True),
        Column("graph_id", "int64", "", "The executable graph, for scope graph.", True),
        Column("metric", "string", "", "Metric with its rollup, as CUPTI spells it."),
        Column("value", "float64", "as the metric", "NULL where the profiler gave no finite number.", True, PLAIN),
        Column("passes", "int32", "passes", "Passes the whole set took.", True),
        Column("cost_ns", "int64", "ns", "Host time this launch took under the profiler.", True),
    ),
)

DEVICE_STATE = Table(
    "device_state",
    "Clocks, power and temperature of a device, about once a second (NVML).",
    (
        Column("time_ns", "int64", "ns", "When it was read.", False, DELTA),
        Column("device_id", "int32", "", "CUDA ordinal in the process."),
        Column("sm_clock_hz", "int64", "Hz", "SM clock.", True),
        Column("memory_clock_hz", "int64", "Hz", "Memory clock.", True),
        Column("power_mw", "int64", "mW", "Power draw.", True),
        Column("temperature_c", "int32", "Celsius", "GPU temperature.", True),
        Column("throttle_reasons", "int64", "", "NVML's bit mask of reasons to lower the clocks.", True),
    ),
)

PAUSES = Table(
    "pauses",
    "One row for each time the recorder switched itself off for a moment to measure its own effect. Kernels and "
    "copies launched meanwhile are in no table; ranges are. `settings` in `processes` says how often that is done.",
    (
        Column(
            "start_ns", "int64", "ns", "When it began to switch its layers off: launches from here on may be missing."
        ),
        Column("off_ns", "int64", "ns", "When all were off: launches from here on are missing."),
        Column("end_ns", "int64", "ns", "When it began to switch them on again; launches are recorded from then on."),
        Column(
            "complete_ns",
            "int64",
            "ns",
            "When every device in use had begun a kernel launched after the pause: until then kernels launched in it "
            "may have been running. NULL where that was not seen.",
            True,
        ),
    ),
)

EVENTS = Table(
    "events",
    "What happened to the recorder itself: losses, failures, its own cost.",
    (
        Column("time_ns", "int64", "ns", "When it was noticed."),
        Column("layer", "string", "", "timeline, exact, samples, ranges, device_state, recorder, or import."),
        Column("kind", "string", "", "loss, failure, odd_record or note."),
        Column("message", "string", "", "One sentence: what, and what would fix it."),
        Column("count", "int64", "", "How many records or launches it concerns.", True),
    ),
)

# Shards of the first are numbered as those of the second, and stand in the place of those whose numbers they cover.
ROLLED_UP = {"kernel_minutes": "kernels", "sampled_windows": "samples"}

TABLES = {
    table.name: table
    for table in (
        PROCESSES,
        DEVICES,
        CEILINGS,
        KERNELS,
        KERNEL_MINUTES,
        KERNEL_CLASSES,
        COPIES,
        RANGES,
        SAMPLES,
        SAMPLED_WINDOWS,
        EXACT,
        DEVICE_STATE,
        PAUSES,
        EVENTS,
    )
}
