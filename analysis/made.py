"""Which relations of a run Python works out, with their columns and the views that this reads.

Apart from the modules that do it, so that a statement that needs none of them loads none of those.
"""

from __future__ import annotations

Columns = tuple[tuple[str, str], ...]

_ESTIMATE: Columns = (
    ("kernel_class_id", "BIGINT"),
    ("term", "VARCHAR"),
    ("rate_per_s", "DOUBLE"),
    ("standard_error", "DOUBLE"),
    ("low_per_s", "DOUBLE"),
    ("high_per_s", "DOUBLE"),
    ("time_ns", "BIGINT"),
)
_SOURCE: Columns = (
    ("device", "VARCHAR"),
    ("counter_group", "INTEGER"),
    ("counter", "VARCHAR"),
    ("unit", "VARCHAR"),
)

# Relations of schema `raw` that `attribution.attribute` fills.
ATTRIBUTION: dict[str, Columns] = {
    "attribution": (
        *_SOURCE,
        *_ESTIMATE,
        ("launches", "BIGINT"),
        ("is_told_apart", "BOOLEAN"),
        ("merged_terms", "BIGINT"),
        ("variance_inflation", "DOUBLE"),
        ("degrees", "DOUBLE"),
    ),
    "attribution_windows": (
        *_SOURCE,
        ("window_number", "INTEGER"),
        ("start_ns", "BIGINT"),
        ("end_ns", "BIGINT"),
        *_ESTIMATE,
        ("is_told_apart", "BOOLEAN"),
    ),
    "attribution_quality": (
        *_SOURCE,
        ("start_ns", "BIGINT"),
        ("end_ns", "BIGINT"),
        ("samples", "BIGINT"),
        ("samples_dropped", "BIGINT"),
        ("blocks", "BIGINT"),
        ("terms", "BIGINT"),
        ("terms_merged", "BIGINT"),
        ("explained", "DOUBLE"),
        ("mean_per_s", "DOUBLE"),
        ("clock_method", "VARCHAR"),
    ),
    "sampled_counters": (
        ("kernel_class_id", "BIGINT"),
        ("counter", "VARCHAR"),
        ("value", "DOUBLE"),
        ("unit", "VARCHAR"),
        ("standard_error", "DOUBLE"),
        ("low", "DOUBLE"),
        ("high", "DOUBLE"),
        ("launches", "BIGINT"),
        ("missing", "VARCHAR"),
        ("lasting_error", "DOUBLE"),
    ),
}

# The one that `overhead.measure` fills, and views that it reads.
OVERHEAD: dict[str, Columns] = {
    "overhead": (
        ("process", "VARCHAR"),
        ("range_name", "VARCHAR"),
        ("depth", "INTEGER"),
        ("pauses", "BIGINT"),
        ("pairs", "BIGINT"),
        ("steps_on", "BIGINT"),
        ("steps_off", "BIGINT"),
        ("mean_on_ns", "DOUBLE"),
        ("mean_off_ns", "DOUBLE"),
        ("slowdown_pct", "DOUBLE"),
        ("low_pct", "DOUBLE"),
        ("high_pct", "DOUBLE"),
        ("reason", "VARCHAR"),
    )
}
OVERHEAD_READS = ("processes", "ranges", "pauses", "_pause_spans")

# What a run with fewer launches asks, the views answer as quickly as a pass over all launches would.
FEWEST_LAUNCHES = 1_000_000

# Views that `launch_scan.scan` stands in for, and what it reads.
SCANNED = ("_device_time", "_kernel_pairs", "_launch_segments")
SCAN_READS = (
    "_class_devices", "_communicating", "_device_numbers", "_device_unknown", "_exact_durations", "_launch_cuts",
    "_pause_spans", "device_state", "devices", "ranges", "settings",
)  # fmt: skip

# The view that `launch_streams.stream_times` stands in for, what that reads, and what `device_use` does.
STREAMS = "_stream_time"
STREAM_READS = ("_activities", "_pause_spans")
USE_READS = ("raw.kernels", "devices", "_pause_spans")
