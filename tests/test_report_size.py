"""A report stays small, whatever the run: many kernel classes, long and hostile names, many ranges and processes."""

from __future__ import annotations

import json
from pathlib import Path
from trace import Trace

import pytest

import nanalyze.analysis as na
from nanalyze.analysis import report
from nanalyze.analysis.report import activity, collect, summary

MOST_BYTES = 3_000_000
CLASSES = 5_000
PROCESSES = 60
STEP_NS = 20_000


def name(number: int) -> str:
    """A different name of some 4 kB for each number: templates, markup, controls, no space to break at."""
    text = f"<script>&\"'\x1b[31m\u202e{number}"
    return f"void ns::kernel_{number}<{text * 3}{'T<int, ' * 500}{'>' * 500}>(float*)"


def test_many_classes_with_long_names_make_a_small_page(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device()
    for number in range(CLASSES):
        kernel = trace.kernel_class(name(number), grid=(1 + number % 300, 1, 1))
        for launch in range(2):
            at = (launch * CLASSES + number) * STEP_NS
            trace.kernel(kernel, at, 5_000 + number % 9_000, queued_ns=at - 2_000)
    for number in range(1_000):
        trace.range(name(number % 100), number * 5 * STEP_NS, (number + 1) * 5 * STEP_NS)
    for number in range(0, CLASSES, 100):
        trace.exact({"raw<b>metric</b>" * 40: 1.0}, kernel_class_id=number, correlation_id=number)
    for rank in range(PROCESSES):
        process = f"node{rank // 8}-{rank}-100"
        trace.process_row(process, command=f'["{name(rank)}"]')
        trace.device(process, device_id=rank % 8, uuid=f"GPU-{rank}", name=name(rank))
        trace.kernel(kernel, rank * STEP_NS, 9_000, process=process, device_id=rank % 8)
    trace.write()
    with na.open(trace.run_dir) as run:
        written = report.write(run, tmp_path / "out")
    page = written.page.read_bytes()
    assert len(page) < MOST_BYTES
    assert (tmp_path / "out" / "summary.json").stat().st_size < MOST_BYTES
    assert b"<script>&" not in page
    assert f"kernel_{CLASSES - 1}&lt;".encode() in page  # the longest


def test_of_very_many_devices_and_processes_the_report_holds_the_first_or_the_least_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "MOST_ROWS", 4)
    monkeypatch.setattr(summary, "MOST_CHARACTERS", 30)
    monkeypatch.setattr(activity, "SHOWN_DEVICES", 2)
    trace = Trace(tmp_path / "run")
    kernel = trace.kernel_class(name(1))
    for rank in range(6):
        process = f"node0-{rank}-100"
        trace.process_row(process)
        trace.device(process, device_id=rank, uuid=f"GPU-{rank}", name=f"H200 {'x' * 40} {rank}")
        for launch in range(3):
            trace.kernel(kernel, launch * 10_000, 9_000 - 1_000 * rank, process=process, device_id=rank)
    trace.write()
    with na.open(trace.run_dir) as run:
        data = collect.collect(run, "run", lambda name: None)
        content = json.loads(report.to_json(run))
    assert content["cut_short"] == {
        "utilisation": 6, "time_by_cause": len(data.rows("time_by_cause")), "costs": 6,
        "ceilings": len(data.rows("ceilings")), "devices": 6, "processes": 6,
    }  # fmt: skip
    assert [row["uuid"] for row in content["devices"]] == [f"GPU-{number}" for number in range(4)]
    assert {len(row["name"]) for row in content["devices"]} == {30}
    assert content["kernels"][0]["kernel"] == name(1)
    assert {row["kernel"][:10] for row in content["time_by_cause"] if row["kernel"]} == {name(1)[:10]}
    grid = activity.use_grid(data.use)
    assert [row[0].text.split()[1] for row in grid.rows] == ["5:", "4:"]
    assert grid.foot.endswith("Of 6 devices these are the 2 least busy; the query timeline_utilisation has all.")
    assert activity.use_grid(data.use[:2]).rows[0] == activity.use_grid(data.use[:1]).rows[0]
