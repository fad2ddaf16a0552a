"""Steps: which range they are, their spread, and what made an outlier differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from trace import PROCESS, T0, Trace
from typing import Any

import pytest

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis.report import steps

OTHER = "node0-1-101"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
MS = 1_000_000
ODD = 4  # the step that differs, from 0
COUNT = 9

Change = Callable[[Trace, int, int], int]


def job(run_dir: Path, change: Change | None = None, *, process: str = PROCESS) -> Trace:
    """Nine steps of 10 ms and some 10 us: two kernels of 4 ms, a collective of 1 ms, 1 ms of nothing.

    `change` adds to the fifth (given the trace, a kernel class and its start) and says by how much it is longer.
    """
    trace = Trace(run_dir, process)
    trace.device()
    kernel, reduce = trace.kernel_class("k"), trace.kernel_class(NCCL)
    start = 0
    for number in range(COUNT):
        trace.state(start - 1)
        trace.kernel(kernel, start, 4 * MS)
        trace.kernel(kernel, start + 4 * MS, 4 * MS)
        trace.kernel(reduce, start + 8 * MS, MS)
        longer = change(trace, kernel, start) if change and number == ODD else 0
        length = 10 * MS + 10_000 * (number % 3) + longer
        trace.range("step", start, start + length)
        trace.range("inner", start, start + MS, depth=1)
        start += length + MS
    return trace


def rows(trace: Trace, **parameters: object) -> list[dict[str, Any]]:
    trace.write()
    query = queries.query("steps")
    with na.open(trace.run_dir) as run:
        found: list[dict[str, Any]] = run.arrow(query.sql, queries.bind(query, parameters)).to_pylist()
    return found


def test_steps_are_the_range_with_the_most_time_that_repeats(tmp_path: Path) -> None:
    trace = job(tmp_path)
    trace.range("whole", -10, 10**12)  # once only
    trace.range("twice", 0, 10**11), trace.range("twice", 2 * 10**11, 3 * 10**11)
    found = rows(trace)
    assert {row["range_name"] for row in found} == {"step"}
    assert sorted(row["step"] for row in found) == list(range(1, COUNT + 1))
    assert {row["steps"] for row in found} == {COUNT}
    first = next(row for row in found if row["step"] == 1)
    assert (first["launches"], first["replayed"], first["kernel_ns"], first["communication_ns"]) == (3, 0, 8 * MS, MS)
    assert (first["span_ns"], first["host_ns"], first["length_ns"], first["idle_ns"]) == (9 * MS, 10 * MS, 10 * MS, MS)
    assert (first["sm_clock_hz"], first["paused"], first["sampled"]) == (1.5e9, False, False)
    assert (first["median_ns"], first["spread_ns"]) == (10 * MS + 10_000, pytest.approx(14_826))
    assert not any(row["is_outlier"] for row in found)
    assert {row["range_name"] for row in rows(job(tmp_path / "b"), range_name="inner")} == {"inner"}


def test_a_step_whose_kernels_run_on_lasts_until_they_end(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    kernel = trace.kernel_class("k")
    for start in (0, 100, 200):
        trace.range("step", start, start + 10)
        trace.kernel(kernel, start + 5, 50)
        trace.kernel(kernel, start + 60, 5, queued_ns=start + 11)  # called after the step
    assert [(row["host_ns"], row["span_ns"], row["length_ns"]) for row in rows(trace)] == [(10, 50, 50)] * 3


def _longer(trace: Trace, kernel: int, start: int) -> int:
    trace.rows["kernels", PROCESS][-2]["duration_ns"] += 2 * MS
    trace.rows["kernels", PROCESS][-1]["start_ns"] += 2 * MS
    return 2 * MS


def _clocked(trace: Trace, kernel: int, start: int) -> int:
    trace.rows["device_state", PROCESS][-1]["sm_clock_hz"] = 1_200_000_000
    return _longer(trace, kernel, start)


def _more(trace: Trace, kernel: int, start: int) -> int:
    trace.kernel(kernel, start + 9 * MS, 2 * MS)
    return 2 * MS


def _waiting(trace: Trace, kernel: int, start: int) -> int:
    trace.rows["kernels", PROCESS][-1]["duration_ns"] += 2 * MS
    return 2 * MS


def _replayed(trace: Trace, kernel: int, start: int) -> int:
    trace.kernel(kernel, None, None, queued_ns=start + 9 * MS)
    return 50 * MS


def _paused(trace: Trace, kernel: int, start: int) -> int:
    trace.pause(start + 9 * MS, start + 9 * MS + 10)
    return 2 * MS


@pytest.mark.parametrize(
    ("change", "cause", "explanation"),
    [
        (_longer, "kernels", "2.0 ms more in kernels"),
        (_clocked, "clock", "2.0 ms more in kernels; SM clock 1.2 GHz, usually 1.5"),
        (_more, "launches", "2.0 ms more in kernels; 4 launches, usually 3"),
        (_waiting, "communication", "2.0 ms more in communication, waiting included"),
        (lambda *_: 2 * MS, "idle", "2.0 ms more in which none of its kernels ran"),
        (_replayed, "recorder",
         "1 launches replayed or not timed; 4 launches, usually 3; 50.0 ms more in which none of its kernels ran"),
        (_paused, "recorder", "the recorder was paused in it; 2.0 ms more in which none of its kernels ran"),
    ],
)  # fmt: skip
def test_an_outlier_is_explained(tmp_path: Path, change: Change, cause: str, explanation: str) -> None:
    found = rows(job(tmp_path, change))
    assert [row["step"] for row in found if row["is_outlier"]] == [ODD + 1]
    assert (found[0]["step"], found[0]["cause"], found[0]["explanation"]) == (ODD + 1, cause, explanation)
    assert all(row["cause"] is None and row["explanation"] is None for row in found[1:])


def test_a_shorter_step_is_explained_as_well(tmp_path: Path) -> None:
    def shorter(trace: Trace, kernel: int, start: int) -> int:
        trace.rows["kernels", PROCESS][-3]["duration_ns"] -= 3 * MS
        for later in (-2, -1):
            for instant in ("start_ns", "queued_ns"):
                trace.rows["kernels", PROCESS][later][instant] -= 3 * MS
        return -3 * MS

    (row, *_) = rows(job(tmp_path, shorter))
    assert (row["cause"], row["explanation"]) == ("kernels", "3.0 ms less in kernels")
    assert row["difference"] == pytest.approx(7.01 / 10.01 - 1)


@pytest.mark.parametrize(("extra", "is_outlier"), [(480_000, False), (510_000, True)])
def test_a_difference_of_less_than_5_percent_is_none(tmp_path: Path, extra: int, is_outlier: bool) -> None:
    (row, *_) = rows(job(tmp_path, lambda *_: extra))
    assert (row["step"], row["is_outlier"]) == (ODD + 1, is_outlier)


def test_what_the_recorder_disturbed_makes_no_median(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for number in range(5):
        length = 100 if number < 2 else 1_000
        trace.range("step", 10_000 * number, 10_000 * number + length)
        if number >= 2:
            trace.pause(10_000 * number, 10_000 * number + 5)
    found = rows(trace)
    assert {row["median_ns"] for row in found} == {100}
    assert sorted(row["cause"] or "" for row in found) == ["", "", "recorder", "recorder", "recorder"]


def test_without_launch_times_the_cause_is_not_guessed(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for start in (0, 1_000, 2_000, 3_000):
        trace.range("step", start, start + (100 if start else 300))
    (row, *_) = rows(trace)
    assert (row["is_outlier"], row["cause"], row["explanation"]) == (True, "unknown", "the first of its process")


def test_sampling_that_was_on_in_few_steps_is_told(tmp_path: Path) -> None:
    trace = job(tmp_path, lambda *_: 2 * MS)
    odd = [row for row in trace.rows["ranges", PROCESS] if row["name"] == "step"][ODD]
    trace.add("samples", device_id=0, start_ns=odd["start_ns"] + 5, end_ns=odd["start_ns"] + 6, counter_group=0)
    found = rows(trace)
    assert [row["step"] for row in found if row["sampled"]] == [ODD + 1]
    assert found[0]["explanation"].startswith("counters were sampled in it, and in few others; ")


def test_each_process_has_its_farthest_steps_first_and_its_own_median(tmp_path: Path) -> None:
    trace = job(tmp_path, lambda *_: 2 * MS)
    for number in range(4):
        trace.range("epoch", 100 * number, 100 * number + (50 if number == 2 else 40), process=OTHER)
    found = rows(trace, rows=2)
    assert [(row["process"], row["step"], row["rank"]) for row in found] == [(PROCESS, ODD + 1, 0), (OTHER, 3, 1)]
    assert [row["median_ns"] for row in found] == [10 * MS + 10_000, 40]


# --- the report ---------------------------------------------------------------------------------------


def test_the_page_tells_spread_and_causes(tmp_path: Path) -> None:
    found = rows(job(tmp_path, _waiting))
    assert [[cell.text.replace("\u202f", " ") for cell in row] for row in steps.step_grid(found).rows] == [
        [PROCESS, "9", "10.0 ms", "0.1 %", "1", "1 communication"]
    ]
    assert [[cell.text.replace("\u202f", " ") for cell in row] for row in steps.outlier_grid(found).rows] == [
        ["5", PROCESS, "12.0 ms", "+20.0 %", f"communication: {steps.CAUSES['communication']}"]
    ]
    (summary,) = steps.summaries(found)
    assert (summary["outliers"], summary["causes"], summary["steps"]) == (1, {"communication": 1}, COUNT)
    assert steps.step_grid([]).rows == ()
    text = queries.query("steps").sql
    assert {cause for cause in steps.CAUSES if f"'{cause}'" not in text} == set()


@pytest.mark.parametrize("seed", range(3))
def test_which_steps_and_ranges_a_pause_or_a_sample_touches(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace = Trace(tmp_path)
    spans = [(10 * n * MS, 10 * n * MS + chance.choice([0, 10 * MS])) for n in range(40)]
    for start, end in spans:
        trace.range("step", start, end)
    ends = [(start, start + chance.choice([0, 10, 30])) for start in (10 * chance.randrange(40) for _ in range(6))]
    pauses = [(start * MS, end * MS) for start, end in ends]
    for start, end in pauses:
        trace.pause(start, end)
    samples = [(start, start + 10 * MS) for start in (10 * MS * chance.randrange(40) for _ in range(9))]
    for start, end in samples:
        trace.add("samples", device_id=0, start_ns=T0 + start, end_ns=T0 + end, counter_group=0)
    found = {row["start_ns"] - T0: (row["paused"], row["sampled"]) for row in rows(trace, range_name="step")}

    def touches(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
        return any(start < span[1] and end > span[0] for start, end in others)

    assert found == {span[0]: (touches(span, pauses), touches(span, samples)) for span in spans}
    assert {paused for paused, _ in found.values()} == {True, False}
    with na.open(tmp_path) as run:
        assert run.query("ranges_summary")["ranges_paused"].tolist() == [sum(p for p, _ in found.values())]
