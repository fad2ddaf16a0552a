"""Everything a report needs, read from an open run and aggregated in DuckDB.

No table of launches, ranges or copies comes over whole: what comes has a row a kernel class, a
range name, a kind of copy, a device or a piece of the run's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nanalyze import queries
from nanalyze.analysis.report import measurements, perturbation
from nanalyze.analysis.report.cells import Row
from nanalyze.analysis.report.cost import costs
from nanalyze.analysis.report.kernels import TOP_KERNELS, by_bound, methods, shape_text, shares
from nanalyze.analysis.report.names import cut
from nanalyze.analysis.report.sections import distinct_devices
from nanalyze.analysis.report.steps import MOST_STEPS

if TYPE_CHECKING:
    from nanalyze.analysis.run import Run

Step = Callable[[str], None]

BUCKETS = 240
LABEL_CHARACTERS = 60  # of a device's or a process' name: plots are labelled with it
# Tables written as CSV, by file name, with the statement that gives them; the rest are collected anyway.
PLAIN_TABLES = {
    "counters": "SELECT * FROM counters ORDER BY kernel_class_id, counter",
    "graph_counters": "SELECT * FROM graph_counters ORDER BY process, device_id, graph_id, counter",
    "devices": "SELECT * FROM devices ORDER BY process, device_id",
    "processes": "SELECT * FROM processes ORDER BY rank NULLS LAST, process",
    "events": "SELECT * FROM events ORDER BY time_ns, process, layer, message, count",
    "damage": "SELECT * FROM damage ORDER BY table_name, process NULLS FIRST, path, problem",
    "settings": "SELECT * FROM settings ORDER BY name",
    "overhead": "SELECT * FROM overhead ORDER BY process",
    "perturbation": perturbation.STATEMENT,
    "pauses": "SELECT * FROM pauses ORDER BY start_ns, process",
    "throttling": "SELECT * FROM throttling ORDER BY start_ns, device, reason",
    "attribution_quality": "SELECT * FROM attribution_quality ORDER BY device, counter_group, counter",
    "sampled_against_exact": "SELECT * FROM sampled_against_exact ORDER BY counter, time_share DESC, kernel_class_id",
}
SHIPPED_TABLES = {
    "ranges": "ranges_summary",
    "copies": "copies_summary",
    "roofline": "roofline_points",
    "ceilings": "roofline_ceilings",
    "losses": "losses",
    "ranks": "ranks",
    "throttling_summary": "report_throttling",
    "drift": "report_drift",
    "time_by_cause": "time_by_cause",
    "kernel_losses": "kernel_losses",
    "opportunities": "opportunities",
}
STEPS = 1 + len(PLAIN_TABLES) + len(SHIPPED_TABLES) + 4


@dataclass(frozen=True)
class Data:
    """A run as a report sees it. `tables` are the CSV files to be; rows are dicts by column name.

    kernels are the largest classes, ranks their places among all by id; `use` has a row a device,
    `pieces` a row a device and piece of time.
    """

    run: Row
    tables: Mapping[str, pa.Table]
    kernels: Sequence[Row]
    shapes: Mapping[int, str]
    shares: Sequence[Row]
    bounds: Sequence[Row]
    methods: Sequence[Row]
    totals: Row
    use: Sequence[Row]
    pieces: Sequence[Row]
    devices: Sequence[Row]
    losses: Sequence[Row]
    recording: Row
    costs: Sequence[Row]
    is_clock_read: bool
    windows: int
    measurements: Sequence[measurements.Measurement]

    def rows(self, table: str) -> list[Row]:
        """All rows of one of `tables`; for those that stay small."""
        rows: list[Row] = self.tables[table].to_pylist()
        return rows


def collect(run: Run, name: str, step: Step) -> Data:
    """Read everything; `step` is called with the name of each of the STEPS before it begins."""
    step("launches")
    busy = run.prepare(BUCKETS)
    verdicts = run.arrow("SELECT * FROM verdicts ORDER BY total_ns DESC NULLS LAST, kernel_class_id")
    tables = {"verdicts": verdicts}
    for table, statement in PLAIN_TABLES.items():
        step(table)
        tables[table] = run.arrow(statement)
    for table, shipped in SHIPPED_TABLES.items():
        step(table)
        tables[table] = _shipped(run, shipped)
    step("steps")
    about = {"range_name": _step_name(tables["overhead"]), "rows": MOST_STEPS}
    tables["steps"] = _shipped(run, "steps", **about)
    recording = _recording(run, tables)
    step("measurements")
    found = measurements.collect(run)
    if found:
        tables["measurements"] = measurements.table(found)
    step("utilisation")
    span = _span(run)
    pieces = _pieces(run, span, busy)
    step("summary")
    kernels = verdicts.slice(0, TOP_KERNELS).to_pylist()
    share_rows = shares(verdicts)
    devices = distinct_devices(tables["devices"].to_pylist())
    return Data(
        run={**run.info, "name": name},
        tables=tables,
        kernels=kernels,
        shapes=_shapes(run, kernels),
        shares=share_rows,
        bounds=by_bound(share_rows),
        methods=methods(verdicts),
        totals=_totals(verdicts, tables, span),
        use=_use(pieces, span, devices),
        pieces=pieces,
        devices=devices,
        losses=tables["losses"].to_pylist(),
        recording=recording,
        costs=costs(*(tables[name].to_pylist() for name in ("overhead", "processes", "pauses"))),
        is_clock_read=_count(run, "SELECT count(*) FROM device_state") > 0,
        windows=_count(run, "SELECT COALESCE(max(window_number) + 1, 0) FROM attribution_windows"),
        measurements=found,
    )


def _count(run: Run, statement: str) -> int:
    """The one number that `statement` gives."""
    return int(run.arrow(statement).column(0)[0].as_py())


def ranks(data: Data) -> dict[int, int]:
    """The place of each kernel class by time, from 1."""
    ids = data.tables["verdicts"].column("kernel_class_id").to_pylist()
    return {class_id: place for place, class_id in enumerate(ids, 1)}


def _step_name(overhead: pa.Table) -> str | None:
    """The range that the recorder's own cost was measured by, if it is one and the same in all processes."""
    names = {name for name in overhead.column("range_name").to_pylist() if name is not None}
    return names.pop() if len(names) == 1 else None


def _shipped(run: Run, name: str, **parameters: object) -> pa.Table:
    """The result of a shipped query."""
    shipped = queries.query(name)
    return run.arrow(shipped.sql, queries.bind(shipped, parameters) or None)


def _span(run: Run) -> Row:
    """First start and last end of kernels that took any time."""
    statement = "SELECT min(first_long_ns) AS first_ns, max(last_long_ns) AS last_ns FROM _class_devices"
    rows: list[Row] = run.arrow(statement).to_pylist()
    return rows[0]


def _pieces(run: Run, span: Row, known: pa.Table | None) -> list[Row]:
    """Per device and piece of the run's time: busy_ns, copy_ns, sm_clock_hz and the piece's ends.

    known: the rows of timeline_utilisation, if they are.
    """
    busy = (_shipped(run, "timeline_utilisation", buckets=BUCKETS) if known is None else known).to_pylist()
    if not busy or span["first_ns"] is None:
        return []
    width = busy[0]["end_ns"] - busy[0]["start_ns"]
    others = _shipped(run, "report_timeline", first_ns=busy[0]["start_ns"], width_ns=width, buckets=BUCKETS)
    extra = {(row["device"], row["bucket"]): row for row in others.to_pylist()}
    nothing: Row = {"copy_ns": None, "sm_clock_hz": None}
    return [
        {**row, **{key: extra.get((row["device"], row["bucket"]), nothing)[key] for key in nothing}} for row in busy
    ]


def _use(pieces: Sequence[Row], span: Row, devices: Sequence[Row]) -> list[Row]:
    """One row a device that ran kernels: active, busy and copy time, from the first to the last kernel."""
    if not pieces:
        return []
    active = span["last_ns"] - span["first_ns"]
    names = device_labels(devices, {piece["device"] for piece in pieces})
    found: dict[str, Row] = {
        piece["device"]: {"device": piece["device"], "label": names[piece["device"]], "active_ns": active,
                          "busy_ns": 0, "copy_ns": 0, "kernel_ns": 0, "paused_ns": 0, "clocks": []}
        for piece in pieces
    }  # fmt: skip
    for piece in pieces:
        row = found[piece["device"]]
        for key in ("busy_ns", "copy_ns", "kernel_ns", "paused_ns"):
            row[key] += piece[key] or 0
        if piece["sm_clock_hz"] is not None:
            row["clocks"].append(piece["sm_clock_hz"])
    return [_with_shares(row) for row in found.values()]


def _with_shares(row: Row) -> Row:
    clocks = row.pop("clocks")
    active = row["active_ns"] - row["paused_ns"]  # what nobody saw is neither busy nor idle
    return {
        **row,
        "busy_share": min(row["busy_ns"] / active, 1.0) if active > 0 else None,
        "copy_share": min(row["copy_ns"] / active, 1.0) if active > 0 else None,
        "sm_clock_low_hz": min(clocks, default=None),
        "sm_clock_high_hz": max(clocks, default=None),
    }


def device_labels(devices: Sequence[Row], keys: Iterable[str]) -> dict[str, str]:
    """`GPU 0: NVIDIA H200 (node0-0-100)` for each of `keys`, a UUID or process/ordinal."""
    known: dict[str, str] = {}
    for device in devices:
        count = len(device["processes"])
        who = cut(device["processes"][0], LABEL_CHARACTERS) if count == 1 else f"{count:,} processes"
        text = f"GPU {device['device_id']}: {cut(str(device['name']), LABEL_CHARACTERS)} ({who})"
        for key in (device["uuid"], f"{device['process']}/{device['device_id']}"):
            known.setdefault(key, text)
    return {key: known.get(key, cut(key, LABEL_CHARACTERS)) for key in keys}


def labels(data: Data) -> dict[str, str]:
    """What the page calls each device, by its key in the views."""
    keys = {device["uuid"] or f"{device['process']}/{device['device_id']}" for device in data.devices}
    keys |= {row["device"] for row in data.use} | {row["device"] for row in data.rows("time_by_cause")}
    return device_labels(data.devices, keys)


def _shapes(run: Run, kernels: Sequence[Row]) -> dict[int, str]:
    if not kernels:
        return {}
    ids = ", ".join(str(int(row["kernel_class_id"])) for row in kernels)
    rows = run.arrow(f"SELECT * FROM kernel_classes WHERE kernel_class_id IN ({ids})").to_pylist()
    return {row["kernel_class_id"]: shape_text(row) for row in rows}


def _totals(verdicts: pa.Table, tables: Mapping[str, pa.Table], span: Row) -> Row:
    """Sums over the whole run; times in ns, NULL where unknown."""
    processes = tables["processes"].to_pylist()
    starts = [row["started_ns"] for row in processes if row["started_ns"] is not None]
    ends = [row["ended_ns"] for row in processes]
    complete = bool(starts) and all(end is not None for end in ends)
    timed = [value for value in verdicts.column("total_ns").to_pylist() if value is not None]
    measured = verdicts.column("launches_measured").to_pylist()
    return {
        "kernel_classes": sum(1 for launches in verdicts.column("launches").to_pylist() if launches),
        "classes_with_counters": sum(1 for count in measured if count),
        "launches": sum(verdicts.column("launches").to_pylist()),
        "launches_untimed": sum(verdicts.column("launches_untimed").to_pylist()),
        "launches_in_graphs": sum(verdicts.column("launches_in_graphs").to_pylist()),
        "launches_measured": sum(measured),
        "kernel_ns": sum(timed) if timed else None,
        "first_ns": span["first_ns"],
        "last_ns": span["last_ns"],
        "active_ns": span["last_ns"] - span["first_ns"] if span["first_ns"] is not None else None,
        "recorded_ns": max(max(ends) - min(starts), 0) if complete else None,
    }


def _recording(run: Run, tables: Mapping[str, pa.Table]) -> Row:
    """What recording took and lost."""
    exact = _shipped(run, "report_exact_cost").to_pylist()
    processes = tables["processes"].to_pylist()
    cpu = [row["recorder_cpu_ns"] for row in processes if row["recorder_cpu_ns"] is not None]
    lost = [row["records_lost"] for row in processes if row["records_lost"] is not None]
    return {
        "cpu_ns": sum(cpu) if cpu else None,
        "exact_launches": sum(row["launches"] for row in exact),
        "exact_graphs": sum(row["graphs"] for row in exact),
        "exact_ns": sum(row["cost_ns"] or 0 for row in exact) if exact else None,
        "exact_passes": max((row["passes"] for row in exact), default=None),
        "records_lost": sum(lost) if lost else None,
        "losses": tables["losses"].num_rows,
        "damage": tables["damage"].num_rows,
        **run.arrow(ROLLED_UP).to_pylist()[0],
    }


ROLLED_UP = """
SELECT
    COALESCE(sum(launches), 0) AS rolled_up_launches, min(first_ns) AS rolled_up_first_ns,
    max(last_ns) AS rolled_up_last_ns
FROM _rolled_up
"""
