"""The report of a sampled run: cost of recording, throttling, quality of the estimates, drift, what is empty."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from trace import PROCESS, Trace
from typing import Any

import pytest
from PIL import Image
from simulator import SM_COUNT, Job, simulate
from test_report import Page, made, page, summary, table

import nanalyze.analysis as na
from nanalyze.analysis.report import activity, clocks, cost, figures, palette, sampling
from nanalyze.analysis.report.figures import Look
from nanalyze.rundir.sampled import BY_COLUMN

S = 10**9
MS = 10**6
GROUP = ("sm_cycles_active", "inst", "dram_read_bytes", "sm_cycles_elapsed")


def build(run_dir: Path) -> None:
    """25 s of a job that drifts, with twelve pauses and ten seconds at the power limit."""
    simulated = simulate(Job(classes=4, seconds=25, drift=0.5, noise=0.01, mean_us=(300.0, 600.0)), seed=2)
    simulated.values["sm_cycles_elapsed"] = (simulated.sample_end - simulated.sample_start) * 1.5 * SM_COUNT
    object.__setattr__(simulated.job, "groups", (GROUP,))
    simulated.values = {name: simulated.values[name] for name in GROUP}
    trace = Trace(run_dir)
    trace.process_row(
        settings=json.dumps({"pause_pct": 2.0, "exact": None}), layers="timeline,ranges,samples,device_state"
    )
    spans = [(2 * second * S + S // 2, 2 * second * S + S // 2 + 100 * MS) for second in range(12)]
    for start, end in spans:
        trace.pause(start, end, complete_ns=end + MS)
    now = 0
    while now < 25 * S:
        length = 5 * MS if any(start <= now < end for start, end in spans) else 5_100_000
        trace.range("step", now, now + length)
        now += length + 1000
    for second in range(26):
        reasons = 4 if 8 <= second < 18 else 0
        trace.state(second * S, sm_clock_hz=(1_500 if reasons else 1_980) * 10**6, throttle_reasons=reasons)
    trace.measure(1001, [{"inst": simulated.truth("inst", 1) * 400_000, "duration_ns": 400_000.0}] * 3)
    simulated.write(run_dir, clock=False, extra=trace)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("sampled") / "run"
    build(run_dir)
    pixel = io.BytesIO()
    Image.new("RGB", (1, 1)).save(pixel, "PNG")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "render", lambda draw, look: pixel.getvalue())
        return made(run_dir)


def test_the_slowdown_and_its_interval_are_told(directory: Path) -> None:
    (row,) = summary(directory)["costs"]
    assert row["slowdown_pct"] == pytest.approx(2.0, abs=1e-6)
    assert (row["low_pct"], row["high_pct"]) == (pytest.approx(2.0, abs=1e-6), pytest.approx(2.0, abs=1e-6))
    assert (row["mean_on_ns"], row["mean_off_ns"]) == (5_100_000, 5_000_000)
    assert (row["pauses"], row["pairs"], row["reason"]) == (12, 12, None)
    assert row["paused_ns"] == 1_200 * MS
    assert row["cpu_share"] == 1e-6  # 1 ms of the 1,000 s that a Trace lasts
    found = page(directory)
    assert found.rows["cost"][1][:4] == [f"{PROCESS}range “step”", "+2.00 %", "+2.00 % to +2.00 %", "5.10 ms"]
    assert (
        "Recording changed the length of a step by +2.00 % (95 % interval: +2.00 % to +2.00 %)." in found.text["answer"]
    )
    assert "switched itself off 12 times, 0.1 % of the time, and missed what was launched" in found.text["answer"]


def test_pauses_are_no_part_of_the_utilisation(directory: Path) -> None:
    (device,) = summary(directory)["utilisation"]
    assert device["paused_ns"] == 12 * 101 * MS
    assert device["busy_share"] == pytest.approx(device["busy_ns"] / (device["active_ns"] - device["paused_ns"]))


def test_throttling_is_counted_by_reason(directory: Path) -> None:
    rows = summary(directory)["throttling"]
    assert [(row["reason"], row["is_throttled"], row["duration_ns"], row["times"]) for row in rows] == [
        ("SW power cap", True, 10 * S, 1),
        ("low clock", False, 10 * S, 1),
    ]
    assert [row["share"] for row in rows] == [pytest.approx(10 / 26)] * 2
    found = page(directory)
    assert "was held back by SW power cap (the power limit was reached) for 38.5 % of the time" in found.text["answer"]
    cells = [row[1:] for row in found.rows["utilisation"] if "SW power cap" in row[1]]
    assert cells == [["SW power capthe power limit was reached", "10.0 s", "38.5 %", "once", "1.50 GHz"]]


def test_the_quality_of_the_estimates_is_shown(directory: Path) -> None:
    rows = {row["counter"]: row for row in summary(directory)["sampling"]["quality"]}
    assert set(rows) == set(GROUP)
    assert rows["inst"]["explained"] > 0.9
    assert {row["clock_method"] for row in rows.values()} == {"sampled"}
    found = page(directory)
    shown = {row[0]: row[1:] for row in found.rows["sampling"]}
    own = shown["inst" + BY_COLUMN["inst"].meaning]
    assert own[0] == f"{100 * rows['inst']['explained']:.1f} %"
    assert own[1].endswith("instructions/s")
    assert own[2:] == [f"{rows['inst']['samples']:,}", f"{rows['inst']['samples_dropped']:,}", "5", "0"]
    assert "percentages of a peak: the SM cycles that were sampled." in found.text["sampling"]


def test_exact_counters_stand_beside_the_estimates(directory: Path) -> None:
    (row,) = summary(directory)["sampling"]["against_exact"]
    assert (row["counter"], row["kernel_classes"]) == ("inst", 1)
    assert row["weighted_difference_pct"] == pytest.approx(row["median_difference_pct"])
    assert len(table(directory, "sampled_against_exact")) == 1


def test_kernels_that_hardly_count_do_not_outweigh_the_others() -> None:
    rows = [
        {"counter": "c", "unit": "%", "time_share": share, "exact": exact, "sampled": sampled, "is_inside": True,
         "difference_pct": 100 * sampled / exact - 100}
        for share, exact, sampled in ((0.5, 80.0, 76.0), (0.3, 40.0, 44.0), (0.2, 0.01, 1.0))
    ]  # fmt: skip
    (row,) = sampling.against_exact(rows)
    assert row["median_difference_pct"] == pytest.approx(5)
    assert row["weighted_difference_pct"] == pytest.approx(100 * (2 + 1.2 + 0.198) / (40 + 12 + 0.002))


def test_drift_is_shown(directory: Path) -> None:
    rows = summary(directory)["sampling"]["drift"]
    assert {row["counter"] for row in rows} == {"sm_cycles_active", "inst", "dram_read_bytes"}
    assert all(15 < row["change_pct"] < 25 and row["errors"] > 4 for row in rows)  # 1.125 to 1.375 times the rate
    assert "Drift over the run" in page(directory).text["sampling"]


def test_an_estimate_is_shown_with_its_interval(tmp_path: Path) -> None:
    simulated = simulate(Job(classes=3, seconds=4, groups=(ALL,)), seed=1)
    simulated.write(tmp_path / "run")
    found = page(made(tmp_path / "run"))
    cells = next(row for row in found.rows["kernels"] if row[0] == "1")
    assert all(re.search(r"%.*( to .* %|±)", cell) for cell in cells[5:7])


ALL = (
    "inst", "issue_active_cycles", "pipe_tensor_busy_ns", "pipe_alu_busy_ns", "pipe_fma_busy_ns", "dram_busy_ns",
    "l2_slices_busy_ns", "l1_data_busy_ns", "l1_request_busy_ns",
    "l1_texture_busy_ns", "inst_adu",
)  # fmt: skip


# --- what is not there -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Page:
    trace = Trace(tmp_path_factory.mktemp("bare") / "run")
    trace.device()
    trace.kernel(trace.kernel_class("k"), 0, 100)
    trace.write()
    return page(made(trace.run_dir))


def test_an_empty_section_says_why_in_one_line(bare: Page) -> None:
    assert bare.text["sampling"].split("\n")[1].startswith("No counter was sampled.")
    assert "The slowdown was not measured: it was recorded without pauses." in bare.text["cost"]
    assert "Clocks and throttling were not read" in bare.text["utilisation"]
    assert "switched itself off" not in bare.text["answer"]


def test_an_import_has_no_cost(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run", source="nsys")
    trace.process_row(layers="imported")
    trace.kernel(trace.kernel_class("k"), 0, 100)
    trace.write()
    directory = made(tmp_path / "run")
    assert summary(directory)["costs"] == []
    assert "Not measured: the run was imported" in page(directory).text["cost"]


def test_clocks_that_were_never_low_are_said_to_be_so(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device()
    trace.kernel(trace.kernel_class("k"), 0, 100)
    trace.state(0, sm_clock_hz=1_990_000_000)
    trace.write()
    found = page(made(tmp_path / "run"))
    assert (
        "No reading showed a reason to lower the clocks, nor one below 90 % of the highest."
        in found.text["utilisation"]
    )


# --- parts -----------------------------------------------------------------------------------------


def _cost(**changes: Any) -> dict[str, Any]:
    row = {
        "process": "p", "range_name": "step", "pauses": 9, "steps_on": 30, "steps_off": 30, "mean_on_ns": 1e6,
        "mean_off_ns": 1e6, "slowdown_pct": 0.5, "low_pct": -0.1, "high_pct": 1.2, "reason": None, "cpu_ns": 10**9,
        "cpu_share": 0.02, "paused_ns": S, "paused_share": 0.01,
    }  # fmt: skip
    return {**row, **changes}


def test_several_processes_are_summed_up_by_their_median() -> None:
    rows = [_cost(slowdown_pct=x, low_pct=x - 1, high_pct=x + 1) for x in (3.0, 0.1, 0.5)]
    lines = cost.sentences(rows)
    assert lines[0].replace("\u202f", " ") == (
        "Recording changed the length of a step by +0.50 %, median of 3 processes (their 95 % intervals reach from "
        "−0.90 % to +4.00 %)."
    )
    assert "27 times" in lines[1]


def test_what_was_not_measured_keeps_its_reason_beside_it() -> None:
    unknown = _cost(slowdown_pct=None, low_pct=None, high_pct=None, reason="too few of the pauses")
    (line,) = cost.sentences([unknown])
    assert line.startswith("To measure its own effect, the recorder switched itself off 9 times, 1.0")
    grid = cost.cost_grid([_cost(), unknown])
    assert [row[1].text for row in grid.rows] == ["+0.50\u202f%", "–"]
    assert grid.rows[1][0].below == "range “step”: too few of the pauses"
    assert grid.rows[0][7].text == "2\u202f%"


@pytest.mark.parametrize(
    ("unit", "value", "shown"),
    [
        ("ns", 2.5e8, "25.0 % busy"),
        ("bytes", 2e12, "2.00 TB/s"),
        ("cycles", 3e9, "3.00 G cycles/s"),
        (None, 5, "5.00 /s"),
    ],
)
def test_rates_have_units(unit: str | None, value: float, shown: str) -> None:
    assert sampling._rate(value, unit).replace("\u202f", " ") == shown


def test_strips_are_drawn_where_the_device_was_held_back() -> None:
    rows = [
        {"device": "d", "is_throttled": True, "reason": "SW power cap", "start_ns": 2 * S, "end_ns": 4 * S},
        {"device": "d", "is_throttled": False, "reason": clocks.LOW_CLOCK, "start_ns": 3 * S, "end_ns": 5 * S},
        {"device": "d", "is_throttled": False, "reason": "GPU idle", "start_ns": 7 * S, "end_ns": 8 * S},
        {"device": "other", "is_throttled": True, "reason": "SW power cap", "start_ns": 0, "end_ns": S},
    ]
    piece = {"device": "d", "copy_ns": 0, "sm_clock_hz": None, "busy_share": 0.5, "paused_ns": 0}
    pieces = [{**piece, "start_ns": n * S, "end_ns": (n + 1) * S} for n in range(1, 9)]
    pieces[3] |= {"paused_ns": S, "busy_share": None}
    (line,) = activity.timelines(pieces, [{"device": "d", "label": "GPU"}], rows)
    assert (line.throttled, line.low_clock) == ([(1.0, 3.0)], [(2.0, 4.0)])
    assert (line.busy[3], line.copying[3]) == (None, None)
    png = figures.render(lambda look: figures.utilisation([line], look), Look(palette.LIGHT))
    image = Image.open(io.BytesIO(png)).convert("RGB")
    colour = tuple(int(palette.VERMILLION[i : i + 2], 16) for i in (1, 3, 5))
    columns = [x for x in range(image.width) if any(image.getpixel((x, y)) == colour for y in range(60, image.height))]
    assert 0.2 < len(columns) / image.width < 0.3  # two of eight seconds


def test_throttling_takes_views_of_several_processes_as_one_device(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    for process in (PROCESS, "node0-1-101"):
        trace.device(process)
    for second in range(4):
        trace.state(second * S, sm_clock_hz=2 * 10**9, throttle_reasons=8 | 64 if second in (1, 2) else 0)
        trace.state(second * S + S // 2, sm_clock_hz=2 * 10**9, throttle_reasons=8 if second == 2 else 0,
                    process="node0-1-101")  # fmt: skip
    trace.state(20 * S, sm_clock_hz=2 * 10**9, throttle_reasons=1024)
    trace.state(30 * S, sm_clock_hz=10**9, throttle_reasons=None)
    trace.write()
    with na.open(tmp_path) as run:
        frame = run.sql("SELECT reason, start_ns - 1700000000000000000 AS s, end_ns - start_ns AS n, readings "
                        "FROM throttling ORDER BY start_ns, reason")  # fmt: skip
    assert frame.to_numpy().tolist() == [
        ["HW slowdown", S, S // 2, 1],
        ["HW thermal slowdown", S, S // 2, 1],
        ["HW slowdown", 2 * S, S, 2],
        ["HW thermal slowdown", 2 * S, S // 2, 1],
        ["unknown to nanalyze", 20 * S, 5 * S, 1],
        ["low clock", 30 * S, S, 1],
    ]


@pytest.mark.parametrize("bit", range(9))
def test_every_bit_of_nvml_has_a_name_and_a_meaning(tmp_path: Path, bit: int) -> None:
    trace = Trace(tmp_path)
    trace.device()
    trace.state(0, sm_clock_hz=2 * 10**9, throttle_reasons=1 << bit)
    trace.write()
    with na.open(tmp_path) as run:
        (row,) = run.throttling().to_dict("records")
    assert row["reason"] == list(clocks.MEANINGS)[bit]
    assert row["is_throttled"] == (bit not in (0, 1, 8))
