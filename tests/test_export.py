"""Exports read back: trace events against the format's rules and the run, tables against the views."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from trace import T0, Trace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import nanalyze.analysis as na
from nanalyze import commands, exporters
from nanalyze.exporters import chrome, tables
from nanalyze.exporters.lanes import MOST_LANES, Lanes
from nanalyze.exporters.verdict_track import IDLE_NS, VerdictTrack
from nanalyze.rundir.errors import NanalyzeError

HOSTILE = '</script>"\'\\\x00\x1b[2J\n\u2028,=HYPERLINK("x")\U0001f600'

Event = dict[str, Any]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = Trace(tmp_path_factory.mktemp("export") / "run")
    trace.device()
    gemm = trace.kernel_class("gemm", (132, 1, 1), (256, 1, 1), kernel_class_id=2**62 + 1)
    hostile = trace.kernel_class(HOSTILE)
    trace.kernel(gemm, 1_001, 500, queued_ns=101, correlation_id=2**53 + 1, graph_id=3, graph_node_id=2**60)
    trace.kernel(gemm, 1_400, 300, correlation_id=2)  # overlaps the one before it
    trace.kernel(hostile, 2_000, 1, stream_id=9)
    trace.kernel(gemm)  # under the exact profiler: no times
    trace.measure(gemm, [{"compute_pct": 90.0, "memory_pct": 20.0}])
    trace.range("outer", 0, 5_000, thread_id=5)
    trace.range("inner", 100, 3_000, thread_id=5, attributes='{"layer": 3}', flops=float("inf"))
    trace.range("crossing", 2_500, 6_000, thread_id=5)
    trace.range("never closed", 5_500, None, thread_id=5)
    trace.add("copies", start_ns=T0 + 700, duration_ns=200, kind="HtoD", bytes=4096, source="pinned",
              destination="device", device_id=0, context_id=1, stream_id=9, correlation_id=4)  # fmt: skip
    trace.add("samples", device_id=0, start_ns=T0 + 1_000, end_ns=T0 + 2_000, counter_group=0,
              **{"dram__bytes.sum": 12.5, "sm__cycles.sum": None})  # fmt: skip
    trace.add("device_state", time_ns=T0 + 10, device_id=0, sm_clock_hz=1_980_000_000, power_mw=None)
    trace.write()
    return trace.run_dir


@pytest.fixture
def run(run_dir: Path) -> Any:
    with na.open(run_dir) as opened:
        yield opened


def events_of(path: Path) -> list[Event]:
    """The events of a trace, after a check of everything the format demands."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = json.loads(raw.decode("ascii"), parse_float=Decimal, parse_constant=pytest.fail)
    assert content["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = content["traceEvents"]
    check(events)
    return events


def check(events: list[Event]) -> None:
    """Chrome's rules: known phases, numbers where numbers belong, tracks named once, slices that nest."""
    named: set[tuple[Any, ...]] = set()
    open_: dict[tuple[int, int], list[tuple[Decimal, Decimal]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "B", "C")
        assert isinstance(event["name"], str)
        assert all(type(event[key]) is int and 0 <= event[key] < 2**31 for key in ("pid", "tid"))
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        assert_exact_numbers(event["args"])
        key = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert (key, event["name"]) not in named
            named.add((key, event["name"]))
            continue
        assert ((event["pid"], 0), "process_name") in named
        if event["ph"] == "C":
            assert all(isinstance(value, int | Decimal) for value in event["args"].values())
            continue
        assert (key, "thread_name") in named
        start = Decimal(event["ts"])
        end = start + Decimal(event["dur"]) if event["ph"] == "X" else Decimal("inf")
        stack = open_[key]
        while stack and stack[-1][1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1][1], "slices of one track cross"
        stack.append((start, end))


def assert_exact_numbers(value: Any) -> None:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            assert_exact_numbers(part)
    assert not isinstance(value, int) or abs(value) < 2**53


def tracks(events: list[Event], kind: str) -> dict[Any, str]:
    return {
        (e["pid"], e["tid"]) if kind == "thread_name" else e["pid"]: e["args"]["name"]
        for e in events
        if e["name"] == kind
    }


# --- trace events ------------------------------------------------------------------------------------


def test_kernels_stand_on_their_streams_with_their_verdicts(run: na.Run, tmp_path: Path) -> None:
    done = exporters.export(run, "chrome", tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    kernels = [e for e in events if e["ph"] == "X" and e["cat"].startswith("kernel,")]
    threads, processes = tracks(events, "thread_name"), tracks(events, "process_name")
    told = [(e["name"], e["ts"], e["dur"], e["cat"], threads[e["pid"], e["tid"]]) for e in kernels]
    assert told == [
        ("gemm", Decimal("1.001"), Decimal("0.500"), "kernel,compute", "stream 7"),
        ("gemm", Decimal("1.400"), Decimal("0.300"), "kernel,compute", "stream 7, overlapping (2)"),
        (HOSTILE, Decimal("2.000"), Decimal("0.001"), "kernel,launch", "stream 9"),
    ]
    assert {processes[e["pid"]] for e in kernels} == {"GPU 0 NVIDIA H200 (node0-0-100)"}
    assert done.left_out == {"kernels without times": 2}
    assert done.rows["kernels"] == 3


def test_a_kernels_arguments(run: na.Run, tmp_path: Path) -> None:
    exporters.export(run, "chrome", tmp_path / "trace.json")
    first = next(e for e in events_of(tmp_path / "trace.json") if e.get("cat") == "kernel,compute")
    verdict = run.sql("SELECT * FROM verdicts WHERE bound = 'compute'").iloc[0]
    assert first["args"] == {
        "kernel_class_id": str(2**62 + 1),
        "bound": "compute",
        "compute_pct": 90,
        "memory_pct": 20,
        "method": "exact",
        "reason": verdict["reason"],
        "grid": [132, 1, 1],
        "block": [256, 1, 1],
        "registers_per_thread": 32,
        "static_shared_bytes": 0,
        "dynamic_shared_bytes": 0,
        "correlation_id": str(2**53 + 1),
        "queued_us_before": Decimal("0.9"),
        "graph_id": "3",
        "graph_node_id": str(2**60),
        "range": "inner",
    }
    assert first["cname"] == chrome.COLOURS["compute"]


def test_ranges_nest_by_thread_and_crossing_ones_get_a_track(run: na.Run, tmp_path: Path) -> None:
    exporters.export(run, "chrome", tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    threads = tracks(events, "thread_name")
    ranges = [e for e in events if e.get("cat") == "range"]
    assert [(e["ph"], e["name"], threads[e["pid"], e["tid"]]) for e in ranges] == [
        ("X", "outer", "thread 5"),
        ("X", "inner", "thread 5"),
        ("X", "crossing", "thread 5, overlapping (2)"),
        ("B", "never closed", "thread 5"),
    ]
    assert ranges[1]["args"] == {"source": "annotate", "attributes": '{"layer": 3}'}  # infinite FLOP are none


def test_copies_and_counter_tracks(run: na.Run, tmp_path: Path) -> None:
    exporters.export(run, "chrome", tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    (copy,) = (e for e in events if e.get("cat") == "copy")
    assert (copy["name"], copy["ts"], copy["dur"]) == ("HtoD", Decimal("0.700"), Decimal("0.200"))
    assert copy["args"]["bytes_per_s"] == Decimal("20480000000.0")
    counters = [(e["name"], e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C"]
    assert counters == [
        ("dram__bytes.sum", Decimal("1.000"), Decimal("12.5")),
        ("sm_clock_hz", Decimal("0.010"), 1_980_000_000),
    ]


def test_verdicts_are_tracks_beside_the_streams(run: na.Run, tmp_path: Path) -> None:
    done = exporters.export(run, "chrome", tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    threads = tracks(events, "thread_name")
    stretches = [e for e in events if e.get("cat") == "verdict"]
    told = [(e["name"], e["ts"], e["dur"], threads[e["pid"], e["tid"]], e["args"]) for e in stretches]
    assert told == [
        # Two kernels of 500 and 300 ns, 101 ns of them at once.
        (
            *("compute", Decimal("1.001"), Decimal("0.699"), "stream 7, verdicts"),
            {"kernels": 2, "busy_us": Decimal("0.8")},
        ),
        (
            *("launch", Decimal("2.000"), Decimal("0.001"), "stream 9, verdicts"),
            {"kernels": 1, "busy_us": Decimal("0.001")},
        ),
    ]
    assert done.rows["verdict stretches"] == 2
    assert stretches[0]["cname"] == chrome.COLOURS["compute"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 500_000), st.integers(0, 300_000)), max_size=40))
def test_stretches_follow_each_other_and_hold_every_kernel(kernels: list[tuple[str, int, int]]) -> None:
    track, made = VerdictTrack(), []
    kernels.sort(key=lambda kernel: kernel[1])
    for bound, start, duration in kernels:
        made.append(track.add(bound, start, start + duration))
    made.append(track.finish())
    stretches = [stretch for stretch in made if stretch is not None]
    for before, after in pairwise(stretches):
        assert before.start <= before.end <= after.start
        assert before.bound != after.bound or after.start - before.end > IDLE_NS
    for bound in "ab":
        mine = [duration for name, _, duration in kernels if name == bound]
        assert sum(s.kernels for s in stretches if s.bound == bound) == len(mine)
        assert sum(s.busy_ns for s in stretches if s.bound == bound) == sum(mine)
    if kernels:
        assert stretches[0].start == kernels[0][1]
        assert stretches[-1].end == max(start + duration for _, start, duration in kernels)
    assert track.finish() is None


def test_what_perfetto_takes_for_something_else(run: na.Run, tmp_path: Path) -> None:
    """It names threads by their number alone, and takes one that equals its process for the main thread."""
    exporters.export(run, "chrome", tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    threads = list(tracks(events, "thread_name"))
    assert len({tid for _, tid in threads}) == len(threads)
    assert not {tid for _, tid in threads} & {pid for pid, _ in threads}
    text = (tmp_path / "trace.json").read_text(encoding="ascii")
    # Numbers as it reads them digit by digit: no exponents, three decimals at most.
    for number in re.findall(r'"(?:ts|dur)": ([^,}]+)', text):
        assert re.fullmatch(r"\d+(\.\d{3})?", number), number
    # A category's comma separates two; a counter's track is called by its name and the key of its value.
    assert {e["cat"].split(",")[0] for e in events if "cat" in e} == {
        *("kernel", "copy", "verdict", "range", "sample", "device state")
    }


def test_times_count_from_the_first_instant(run: na.Run, tmp_path: Path) -> None:
    exporters.export(run, "chrome", tmp_path / "trace.json.gz")
    content = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert content["baseTimeNanoseconds"] == str(T0)
    assert content["otherData"]["run_id"] == run.info["run_id"]


def test_a_launch_whose_class_is_lost_is_still_drawn(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.kernel(2**62, 5, 5)
    trace.write()
    with na.open(trace.run_dir) as run:
        exporters.export(run, "chrome", tmp_path / "trace.json")
    kernel, verdict = (e for e in events_of(tmp_path / "trace.json") if e["ph"] == "X")
    assert verdict["name"] == "undetermined"
    assert (kernel["name"], kernel["args"]["kernel_class_id"]) == (f"class {2**62}", str(2**62))


def test_every_rank_has_its_own_tracks_in_order(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run", process="b-1-2")
    class_id = trace.kernel_class("k")
    for process in ("b-1-2", "a-0-1"):
        trace.device(process)
        trace.kernel(class_id, 10, 5, process=process)
        trace.range("r", 0, 50, process=process)
    trace.write()
    with na.open(trace.run_dir) as run:
        exporters.export(run, "chrome", tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    names = tracks(events, "process_name")
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(names.values()) == [
        "GPU 0 NVIDIA H200 (a-0-1)",
        "GPU 0 NVIDIA H200 (b-1-2)",
        "host (a-0-1)",
        "host (b-1-2)",
    ]
    assert len(set(order.values())) == 4
    assert len({e["pid"] for e in events if e["ph"] == "X"}) == 4


def test_a_run_without_times_says_so(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.kernel(trace.kernel_class("k"))
    trace.write()
    with na.open(trace.run_dir) as run, pytest.raises(NanalyzeError, match="nothing in it has a time"):
        exporters.export(run, "chrome", tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=60), st.booleans())
def test_lanes_never_hold_crossing_slices(slices: list[tuple[int, int]], nested: bool) -> None:
    lanes = Lanes(nested)
    placed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, duration in sorted(slices, key=lambda s: (s[0], -s[1])):
        lane = lanes.place(start, start + duration)
        assert lane is not None  # 60 slices never fill the lanes
        placed[lane].append((start, start + duration))
    for row in placed.values():
        for index, (start, end) in enumerate(row):
            for before, until in row[:index]:
                assert until <= start or (nested and before <= start and end <= until)


def test_more_overlaps_than_tracks_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    class_id = trace.kernel_class("k")
    for at in range(MOST_LANES + 3):
        trace.kernel(class_id, at, 1_000)  # all at once, on one stream
        trace.range("r", at, 2_000 + at)  # each crosses the ones before it
    trace.kernel(class_id, 5_000, 10)
    trace.range("r", 6_000, 7_000)
    trace.write()
    with na.open(trace.run_dir) as run:
        done = exporters.export(run, "chrome", tmp_path / "trace.json")
    events_of(tmp_path / "trace.json")  # checks that the slices of each track nest
    assert done.left_out == {
        f"kernels that overlap {MOST_LANES} others of their stream": 3,
        f"ranges that overlap {MOST_LANES} others of their thread": 3,
    }
    assert (done.rows["kernels"], done.rows["ranges"]) == (MOST_LANES + 1, MOST_LANES + 1)


@given(st.integers(-(2**62), 2**62))
def test_microseconds_are_exact(ns: int) -> None:
    assert Decimal(chrome._us(ns)) * 1000 == ns


# --- tables ------------------------------------------------------------------------------------------


def test_parquet_holds_every_public_view(run: na.Run, tmp_path: Path) -> None:
    done = exporters.export(run, "parquet", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{view}.parquet" for view in tables.public_views()}
    for view in tables.public_views():
        written = pq.read_table(tmp_path / "out" / f"{view}.parquet")
        expected = run.arrow(f"SELECT * FROM {view}")
        assert written.column_names == expected.column_names
        assert sorted(map(repr, written.to_pylist())) == sorted(map(repr, expected.cast(written.schema).to_pylist()))
        assert done.rows[view] == written.num_rows
    kernels = pq.read_table(tmp_path / "out" / "kernels.parquet")
    assert kernels.schema.field("start_ns").type == pa.int64()
    assert kernels["start_ns"].null_count == 2


def test_csv_keeps_missing_values_and_text_apart(run: na.Run, tmp_path: Path) -> None:
    exporters.export(run, "csv", tmp_path / "out", views=["kernels", "verdicts", "verdicts"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"kernels.csv", "verdicts.csv"}
    with open(tmp_path / "out" / "verdicts.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["kernel"] for row in rows} == {"gemm", HOSTILE}
    assert {row["kernel_class_id"] for row in rows} >= {str(2**62 + 1)}
    text = (tmp_path / "out" / "kernels.csv").read_text(encoding="utf-8")
    assert text.count("\n,,,,") == 2  # the launches without times: not "", not 0


@pytest.mark.parametrize("view", ["kernels", "kernel_classes", "ranges", "copies", "verdicts", "counters", "devices"])
def test_csv_read_back_with_the_types_of_the_view_is_the_view(run: na.Run, tmp_path: Path, view: str) -> None:
    exporters.export(run, "csv", tmp_path / "out", views=[view])
    expected = run.arrow(f"SELECT * FROM {view}")
    schema = pa.schema([tables._storable(field) for field in expected.schema])
    options = pa.csv.ConvertOptions(
        column_types=schema, strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""]
    )
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    written = pa.csv.read_csv(tmp_path / "out" / f"{view}.csv", parse_options=parsing, convert_options=options)
    assert written.schema.names == schema.names
    assert sorted(map(repr, written.to_pylist())) == sorted(map(repr, expected.cast(schema).to_pylist()))
    assert written.num_rows > 0


def test_an_unknown_view_is_refused(run: na.Run, tmp_path: Path) -> None:
    for view in ("nosuch", "_launches", "kernels; DROP TABLE x"):
        with pytest.raises(NanalyzeError, match="no such view"):
            exporters.export(run, "csv", tmp_path / "out", views=[view])
    with pytest.raises(NanalyzeError, match="xml: no such format"):
        exporters.export(run, "xml", tmp_path / "out")
    with pytest.raises(NanalyzeError, match="goes with --format parquet or csv"):
        exporters.export(run, "chrome", tmp_path / "out", views=["kernels"])
    assert not list(tmp_path.iterdir())


# --- what is there stays -----------------------------------------------------------------------------


def test_nothing_is_overwritten_unasked(run: na.Run, tmp_path: Path) -> None:
    file, folder = tmp_path / "trace.json", tmp_path / "out"
    file.write_text("mine")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "kernels.csv").write_text("old")
    with pytest.raises(NanalyzeError, match=r"exists\. Use --force"):
        exporters.export(run, "chrome", file)
    with pytest.raises(NanalyzeError, match="exists and is not empty"):
        exporters.export(run, "csv", folder)
    with pytest.raises(NanalyzeError, match="is a directory"):
        exporters.export(run, "chrome", folder, force=True)
    with pytest.raises(NanalyzeError, match="is a file"):
        exporters.export(run, "csv", file, force=True)
    assert file.read_text() == "mine"
    assert (folder / "kernels.csv").read_text() == "old"

    exporters.export(run, "chrome", file, force=True)
    exporters.export(run, "csv", folder, views=["kernels"], force=True)
    assert events_of(file)
    assert (folder / "kernels.csv").read_text() != "old"
    assert (folder / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "out"}


@pytest.mark.parametrize("format", exporters.FORMATS)
def test_a_full_disk_leaves_nothing(run: na.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chrome._Writer, "_flush", full)
    monkeypatch.setattr(tables, "_writer", full)
    output = tmp_path / "out"
    output_before = tmp_path / "out.before"
    with pytest.raises(NanalyzeError, match=r"out: cannot be written: No space left on device\."):
        exporters.export(run, format, output)
    assert not list(tmp_path.iterdir())
    output_before.write_text("mine")
    if format == "chrome":
        with pytest.raises(NanalyzeError):
            exporters.export(run, format, output_before, force=True)
        assert output_before.read_text() == "mine"


# --- the command -------------------------------------------------------------------------------------


def nanalyze(*arguments: object) -> Result:
    return CliRunner().invoke(commands.main, [str(argument) for argument in arguments])


def test_the_command_says_what_it_wrote_and_where(run_dir: Path, tmp_path: Path) -> None:
    result = nanalyze("export", run_dir, "-o", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "3 kernels, 2 verdict stretches, 1 copy, 4 ranges, 1 sample value, 1 device state value",
        "Left out: 2 kernels without times",
        f"Trace: {tmp_path / 't.json'}. Open it in https://ui.perfetto.dev (it stays on your machine).",
    ]
    result = nanalyze("export", run_dir, "--format", "csv", "--view", "ranges", "-o", tmp_path / "tables")
    assert result.stdout.splitlines() == ["ranges: 4 rows", f"Tables: {tmp_path / 'tables'}"]


def test_one_of_a_kind_is_named_in_the_singular(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    class_id = trace.kernel_class("k")
    trace.kernel(class_id, 10, 5)
    trace.kernel(class_id)
    trace.range("r", 0, 50)
    trace.write()
    result = nanalyze("export", trace.run_dir, "-o", tmp_path / "t.json")
    assert result.stdout.splitlines()[:2] == [
        "1 kernel, 1 verdict stretch, 1 range",
        "Left out: 1 kernel without times",
    ]
    result = nanalyze("export", trace.run_dir, "--format", "parquet", "--view", "verdicts", "-o", tmp_path / "tables")
    assert result.stdout.splitlines()[0] == "verdicts: 1 row"


def test_the_command_fails_with_one_line(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("mine")
    result = nanalyze("export", run_dir, "-o", tmp_path / "t.json")
    assert result.exit_code == 1
    assert result.stderr == f"nanalyze: error: {tmp_path / 't.json'}: exists. Use --force to overwrite it.\n"
    assert nanalyze("export", tmp_path / "none", "-o", tmp_path / "x").exit_code == 1
    assert nanalyze("export", run_dir).exit_code == 2


def test_progress_is_told_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(tmp_path / "run")
    class_id = trace.kernel_class("k")
    for n in range(5):
        trace.kernel(class_id, 10 * n, 5)
    trace.write()
    seen: list[tuple[str, int]] = []
    told: Callable[[str, int], None] = lambda what, done: seen.append((what, done))  # noqa: E731
    with na.open(trace.run_dir) as run:
        exporters.export(run, "parquet", tmp_path / "out", views=["kernels", "ranges"], progress=told)
    assert seen == [("kernels", 5)]
