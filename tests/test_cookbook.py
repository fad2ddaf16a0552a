"""Every query of docs/sql.md, on the trace of the query tests and on the sample run.

After a change that is meant to alter an output: `python tests/test_cookbook.py` writes those in the
document anew; read the difference before committing it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from trace import Trace

import pandas as pd
import pytest
import sqlglot
import test_queries
from simulator import Job, simulate

import nanalyze.analysis as na
from nanalyze.commands import _output

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "sql.md"
SAMPLE = ROOT / "examples" / "h200-sample"
RECIPE = re.compile(r"^### (?P<title>[^\n]+)\n(?P<body>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """A question, its query, the sentences on how to read the answer, and the answer for the sample."""

    title: str
    sql: str
    reading: str
    shown: str


def recipes() -> list[Recipe]:
    found = []
    for match in RECIPE.finditer(DOCUMENT.read_text(encoding="utf-8")):
        blocks = BLOCK.findall(match["body"])
        sql = [text for language, text in blocks if language == "sql"]
        shown = [text for language, text in blocks if language == "text"]
        assert len(sql) == 1, match["title"]
        assert len(shown) <= 1, match["title"]
        found.append(Recipe(match["title"], sql[0], BLOCK.sub("", match["body"]).strip(), "".join(shown)))
    return found


def answer(run: na.Run, sql: str) -> str:
    sink = io.BytesIO()
    _output.write(run.batches(sql), "table", sink, None)
    return sink.getvalue().decode()


def write_outputs() -> None:
    """Put the sample's answers under the sentences of each recipe."""
    with na.open(SAMPLE) as run:

        def answered(match: re.Match[str]) -> str:
            body = re.sub(r"\n```text\n.*?^```\n", "", match[0], flags=re.MULTILINE | re.DOTALL).rstrip("\n")
            sql = dict(BLOCK.findall(body + "\n"))["sql"]
            end = "\n" if match.end() < len(match.string) else ""
            return f"{body}\n\n```text\n{answer(run, sql)}```\n{end}"

        DOCUMENT.write_text(RECIPE.sub(answered, DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


RECIPES = {recipe.title: recipe for recipe in recipes()}


@pytest.fixture(scope="module")
def sample() -> Iterator[na.Run]:
    with na.open(SAMPLE) as run:
        yield run


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[na.Run]:
    """The trace of the query tests."""
    run_dir = tmp_path_factory.mktemp("cookbook") / "run"
    test_queries.build(run_dir)
    with na.open(run_dir) as run:
        yield run


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[na.Run]:
    """Two steps of 100 and 80 us with two memory-bound kernels each, copies beside and between them, a drift."""
    made = Trace(tmp_path_factory.mktemp("cookbook") / "steps")
    made.device()
    init = made.kernel_class("init")
    first = made.kernel_class("first", grid=(200, 1, 1), block=(256, 1, 1), registers=255)
    second = made.kernel_class("second", grid=(132 * 64, 1, 1), block=(1024, 1, 1))
    drifting = made.kernel_class("drifting")
    made.range("step", 0, 100_000)
    made.range("step", 100_000, 180_000)
    made.kernel(init, 1_000, 30_000)
    for kernel, start, duration in ((first, 40, 10), (second, 50, 10), (first, 110, 20), (second, 130, 10)):
        made.kernel(kernel, 1000 * start, 1000 * duration)
    for i in range(10):
        made.kernel(drifting, 200_000 + 1000 * i, 100 + 10 * i)
    busy = {"compute_pct": 10.0, "memory_pct": 90.0, "dram_pct": 90.0, "dram_write_bytes": 1e6, "sm_clock_hz": 1e9}
    made.measure(first, [{**busy, "duration_ns": 15_000.0, "dram_read_bytes": 2e6, "l2_hit_pct": 40.0}])
    made.measure(second, [{**busy, "duration_ns": 10_000.0, "dram_read_bytes": 1e6}])
    made.copy("HtoD", 45_000, 10_000, 1000, source="pageable", destination="device", is_async=True, stream_id=9)
    made.copy("HtoD", 58_000, 4_000, 1000, source="pinned", destination="device", is_async=True, stream_id=9)
    made.copy("DtoH", 90_000, 4_000, 8, source="device", destination="pinned", is_async=False)
    made.state(0, power_mw=400_000)
    made.state(1_000_000_000, throttle_reasons=4, sm_clock_hz=1_200_000_000)
    made.write()
    with na.open(made.run_dir) as run:
        yield run


# --- the document ------------------------------------------------------------------------------


def test_the_document_answers_many_questions_and_says_how_to_read_each() -> None:
    assert len(RECIPES) == len(recipes()) >= 25
    for recipe in RECIPES.values():
        assert recipe.title.endswith("?")
        assert recipe.reading.endswith(".")
        assert len(recipe.reading.split()) >= 10, recipe.title
        assert sqlglot.parse_one(recipe.sql, read="duckdb").args.get("order") is not None, recipe.title


def test_its_links_lead_to_its_sections() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    sections = re.findall(r"^## ([^\n]+)", text, re.MULTILINE)
    assert re.findall(r"^- \[([^]]+)\]\(#([^)]+)\)", text, re.MULTILINE) == [
        (section, section.lower().replace(" ", "-")) for section in sections
    ]


@pytest.mark.parametrize("title", RECIPES)
def test_the_output_shown_is_that_of_the_sample(sample: na.Run, title: str) -> None:
    recipe = RECIPES[title]
    assert answer(sample, recipe.sql) == recipe.shown, f"write it with `python {Path(__file__).name}`"


# --- values ------------------------------------------------------------------------------------

# May be negative: differences, and launches noted by another clock.
SIGNED = {
    "drift_pct",
    "more_ms",
    "host_over_median_ms",
    "kernel_over_median_ms",
    "median_wait_us",
    "difference_pct",
    "slowdown_pct",
    "low_pct",
    "high_pct",
}
# May exceed 100: a count that is wrong, which is what the column is to show.
UNBOUNDED = {"of_roof_pct", "plus_minus_pct"}
# How often something was seen: a row for what never was would be an error of the query.
COUNTS = ("launches", "copies", "gaps", "ranges", "shapes", "times", "readings", "entered", "classes")
MAY_BE_ZERO = ("What did the slowest step do that others did not?", "How do nested ranges divide the time?")


@pytest.mark.parametrize("title", RECIPES)
def test_values_are_possible_on_every_run(sample: na.Run, trace: na.Run, steps: na.Run, title: str) -> None:
    frames = [run.sql(RECIPES[title].sql) for run in (sample, trace, steps)]
    assert len({tuple(frame.columns) for frame in frames}) == 1
    for frame in frames:
        for name in frame.columns:
            values = pd.to_numeric(frame[name], errors="coerce").dropna().astype(float)
            if name in SIGNED or values.empty:
                continue
            assert (values >= 0).all(), name
            if name.endswith("_pct") or name == "pct":
                assert name in UNBOUNDED or (values <= 100.01).all(), name
            if name in COUNTS and title not in MAY_BE_ZERO:
                assert (values > 0).all(), name


def test_every_query_answers_something_on_one_of_the_runs(sample: na.Run, trace: na.Run, steps: na.Run) -> None:
    empty = [
        title for title, recipe in RECIPES.items()
        if all(run.sql(recipe.sql).empty for run in (sample, trace, steps))
    ]  # fmt: skip
    assert empty == []


def rows(run: na.Run, title: str, *columns: str) -> list[tuple[object, ...]]:
    """These columns of the answer, NULL as None."""
    table = run.arrow(RECIPES[title].sql).select(list(columns))
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


# What `test_queries.build` holds: of gemm four launches of 10 us, of stream two, of tiny two of 2 us, of wrong two
# of 1 us and an AllReduce of 20 us; one of each with counters has no place on the timeline.
ON_TRACE: list[tuple[str, tuple[str, ...], list[tuple[object, ...]]]] = [
    (
        "Which kernels take 90 % of the time?", ("launches", "total_ms", "pct", "so_far_pct"),
        [(4, 0.04, 46.5, 46.5), (1, 0.02, 23.3, 69.8), (2, 0.02, 23.3, 93.0)],
    ),
    (
        "What bounds that time?", ("bound", "level_or_pipe", "classes", "launches", "pct"),
        [("compute", "tensor", 1, 4, 46.5), ("memory", "DRAM", 2, 4, 25.6), ("communication", None, 1, 1, 23.3),
         ("launch", None, 1, 2, 4.7)],
    ),
    (
        "How do the durations of a kernel spread: p50, p90, p99?", ("launches", "p50_us", "longest_us"),
        [(3, 10.0, 10.0), (1, 20.0, 20.0), (1, 10.0, 10.0), (2, 2.0, 2.0), (1, 1.0, 1.0)],
    ),
    (
        "Which launches of a kernel were the slowest, and when?", ("process", "stream_id", "us", "over_median"),
        [("node0-0-100", 7, 10.0, 1.0), ("node0-0-100", 8, 10.0, 1.0), ("node0-1-101", 7, 10.0, 1.0)],
    ),
    (
        "How is the time divided among processes, devices and streams?", ("rank", "stream_id", "launches", "kernel_ms"),
        [(0, 7, 9, 0.066), (0, 8, 1, 0.01), (1, 7, 1, 0.01)],
    ),
    (
        "How much of the time is communication?", ("communicates", "launches", "pct"),
        [(False, 10, 76.74), (True, 1, 23.26)],
    ),
    (
        "How busy was each device?", ("span_ms", "busy_ms", "busy_pct"),
        [(0.071, 0.045, 63.4), (0.01, 0.01, 100.0)],
    ),
    (
        "After which kernel does the GPU wait?", ("kernel", "gaps", "gap_ms", "median_us", "longest_us"),
        [("tiny", 2, 0.022, 11.0, 20.0), ("stream<float>", 1, 0.004, 4.0, 4.0)],
    ),
    (
        "Where are the longest gaps, and what stood on either side?", ("gap_us", "host_was_late", "before"),
        [(20.0, True, "tiny"), (4.0, False, "stream<float>"), (2.0, True, "tiny")],
    ),
    (
        "How many kernels run side by side?", ("running", "ms"),
        [(0, 0.026), (1, 0.045), (2, 0.01)],
    ),
    (
        "Which kernels run inside a range?", ("launches", "kernel_ms"),
        [(1, 0.01), (1, 0.01), (1, 0.002)],
    ),
    (
        "How do nested ranges divide the time?", ("path", "launches", "kernel_ms"),
        [("step > backward", 3, 0.031), ("step > forward", 3, 0.022), ("step", 1, 0.002),
         ("step > left open", 0, None)],
    ),
    (
        "Which rate did the ranges reach that declare their work?", ("name", "tflop_per_s", "gb_per_s"),
        [("backward", 129.03, 32.3), ("forward", 363.64, None)],
    ),
    (
        "What is copied, in which direction and in which sizes?", ("kind", "bytes_from", "bytes", "gb_per_s"),
        [("HtoD", 65536, 100000, 20.0), ("HtoD", 262144, 300000, 60.0)],
    ),
    (
        "Which DRAM bandwidth does each kernel reach?", ("kernel", "mb_a_launch", "gb_per_s", "dram_pct"),
        [("wrong", 40.0, 40000.0, 92.0), ("stream<float>", 40.0, 4000.0, 92.0), ("gemm", 2.0, 200.0, None)],
    ),
    (
        # stream: 1e7 operations in 10 us are 1 TOP/s; 0.25 OP/byte of 4.8 TB/s allow 1.2, of which that is 83 %.
        "What is the arithmetic intensity of each kernel?", ("kernel", "op_per_byte", "top_per_s", "of_roof_pct"),
        [("gemm", 5.0, 1.0, 4.2), ("stream<float>", 0.25, 1.0, 83.3), ("wrong", 0.25, 10.0, 833.3)],
    ),
    (
        # A reading of 1.5 GHz, then one of 1.2 GHz; the other process has none.
        "At which clock did each kernel run?", ("kernel", "launches", "mean_mhz", "measured_mhz"),
        [("gemm", 3, 1350.0, 1000.0), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(", 1, 1200.0, None),
         ("stream<float>", 1, 1500.0, 1000.0), ("tiny", 2, 1500.0, None), ("wrong", 1, 1200.0, 1000.0)],
    ),
    (
        "How much energy did each device use?", ("process", "readings", "mean_w", "joules"),
        [("node0-0-100", 2, 500.0, 0.025)],
    ),
    (
        "What was lost?", ("source", "subject", "count"),
        [("damage", "copies/process=node0-0-100", None), ("event", "timeline", 12), ("event", "timeline", None)],
    ),
    (
        "Which kernels have no counters yet, and how much of the time are they?", ("launches", "pct"),
        [(1, 23.26), (2, 4.65)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("title", "columns", "expected"), ON_TRACE, ids=[title for title, _, _ in ON_TRACE])
def test_values_on_the_trace(
    trace: na.Run, title: str, columns: tuple[str, ...], expected: list[tuple[object, ...]]
) -> None:
    assert rows(trace, title, *columns) == expected


ON_STEPS: list[tuple[str, tuple[str, ...], list[tuple[object, ...]]]] = [
    (
        "Does a kernel get slower as the job runs?", ("kernel", "launches", "first_us", "last_us", "drift_pct"),
        [("drifting", 10, 0.1, 0.19, 90.0)],
    ),
    (
        "Which step was the slowest, and why?", ("number", "host_ms", "kernel_ms", "launches", "host_over_median_ms"),
        [(1, 0.1, 0.05, 3, 0.01), (2, 0.08, 0.03, 2, -0.01)],
    ),
    (
        "What did the slowest step do that others did not?", ("kernel", "launches", "launches_elsewhere", "more_ms"),
        [("init", 1, 0.0, 0.03), ("first", 1, 1.0, -0.01), ("second", 1, 1.0, 0.0)],
    ),
    ("Which kernels run only in the first step?", ("kernel", "launches", "us"), [("init", 1, 30.0)]),
    (
        # Of 10 us all, of 4 us the first two lie beside kernels.
        "Do copies run beside kernels?", ("kind", "copies", "ms", "beside_kernels_ms", "beside_pct"),
        [("HtoD", 2, 0.014, 0.012, 85.7), ("DtoH", 1, 0.004, 0.0, 0.0)],
    ),
    (
        "Which copies block the host?", ("kind", "source", "is_async", "copies"),
        [("HtoD", "pageable", True, 1), ("DtoH", "device", False, 1)],
    ),
    (
        "Which kernels hold too few warps because of registers?", ("kernel", "registers", "threads", "theoretical_pct"),
        [("first", 255, 256, 12.5)],
    ),
    (
        # 200 blocks, one an SM: 1.52 waves take as long as two.
        "Which grids are too small, or leave a thin last wave?", ("kernel", "blocks", "waves"),
        [("init", 1, 0.0), ("first", 200, 1.52), ("drifting", 1, 0.0)],
    ),
    (
        "Which memory-bound neighbours would gain from fusion?",
        ("first", "second", "times", "mb_at_most", "ms_at_most"),
        [("first", "second", 2, 2.0, 0.02), ("second", "first", 1, 2.0, 0.01)],
    ),
    ("Which kernels miss the L2 cache?", ("kernel", "l2_hit_pct", "dram_mb"), [("first", 40.0, 3.0)]),
    (
        "When was the device throttled, and why?", ("reason", "is_throttled", "seconds", "lowest_mhz"),
        [("low clock", False, 2.0, 1200), ("SW power cap", True, 1.0, 1200)],
    ),
    ("How much energy did each device use?", ("mean_w", "joules"), [(450.0, 400.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("title", "columns", "expected"), ON_STEPS, ids=[title for title, _, _ in ON_STEPS])
def test_values_on_two_steps(
    steps: na.Run, title: str, columns: tuple[str, ...], expected: list[tuple[object, ...]]
) -> None:
    assert rows(steps, title, *columns) == expected


def test_sampled_against_exact_where_there_are_both(tmp_path: Path) -> None:
    simulated = simulate(Job(classes=4, seconds=4, noise=0.01, mean_us=(390.0, 410.0)), 2)
    measured = Trace(tmp_path / "run")
    measured.measure(1001, [{"inst": 3 * simulated.truth("inst", 1) * 400_000, "duration_ns": 400_000.0}] * 3)
    simulated.write(tmp_path / "run", extra=measured)
    with na.open(tmp_path / "run") as run:
        ((counter, classes, disagree, difference_pct),) = rows(
            run, "Where do sampled and exact counters disagree?",
            "counter", "classes", "disagree", "median_difference_pct",
        )  # fmt: skip
    assert (counter, classes, disagree) == ("inst", 1, 1)
    assert difference_pct == pytest.approx(66.7, abs=2)  # the exact values were written three times too high


if __name__ == "__main__":
    write_outputs()
