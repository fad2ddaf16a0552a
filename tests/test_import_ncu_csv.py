"""Nsight Compute's --csv output: every launch and metric of the table, whatever stands around it."""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ncu_files import (
    COMPUTE,
    DETAILS,
    DURATION,
    MEMORY,
    REAL_TRACES,
    Kernel,
    Row,
    de,
    details,
    en,
    needs_real_traces,
    quote,
    raw,
    sol,
)

import nanalyze.analysis as na
from nanalyze.importers import ncu_csv, registry
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import ImportSummary

SOL = "GPU Speed Of Light Throughput"
MWA = "Memory Workload Analysis"
LAUNCH = "Launch Statistics"


class Import:
    """Imports text as a file and opens the run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0

    def __call__(self, lines: Sequence[str] | bytes, **options: str) -> ImportSummary:
        self.count += 1
        path = self.directory / f"trace{self.count}.csv"
        path.write_bytes(lines if isinstance(lines, bytes) else "\n".join((*lines, "")).encode())
        return registry.import_files([path], self.run_dir, Options(**options))

    @property
    def run_dir(self) -> Path:
        return self.directory / f"run{self.count}"

    def query(self, sql: str) -> list[tuple]:
        with na.open(self.run_dir) as run:
            rows = run.sql(sql).astype(object).itertuples(index=False)
            return [tuple(None if pd.isna(value) else value for value in row) for row in rows]

    def exact(self) -> dict[tuple[int, str], float | None]:
        rows = self.query("SELECT correlation_id, metric, value FROM exact ORDER BY ALL")
        return {(int(id_), metric): value for id_, metric, value in rows}

    def nothing_left(self) -> bool:
        return not self.run_dir.exists() and not [p for p in self.directory.iterdir() if p.name.startswith(".")]


@pytest.fixture
def load(tmp_path: Path) -> Import:
    return Import(tmp_path)


def metric_rows(*rows: tuple[str, str, str]) -> list[Row]:
    return [("Command line profiler metrics", *row) for row in rows]


DURATION_ROW = metric_rows((DURATION, "us", "9.92"))


# --- the details page -------------------------------------------------------------------------


def test_each_launch_with_its_metrics_in_base_units(load: Import) -> None:
    rows = metric_rows(
        (DURATION, "us", "1,205.07"),
        ("dram__bytes_read.sum", "Mbyte", "2.50"),
        ("dram__cycles_elapsed.avg.per_second", "Ghz", "1.59"),
        ("vendor__new_metric.sum", "", "17"),
    )
    summary = load(details([Kernel(0, "a", rows), Kernel(3, "a", rows), Kernel(4, "b", rows)]))
    assert (summary.kernels, summary.kernel_ns, summary.exact) == (3, 3 * 1_205_070, 12)
    assert summary.source == "ncu"
    assert load.exact()[3, DURATION] == 1_205_070.0
    assert load.exact()[4, "dram__bytes_read.sum"] == 2_500_000.0
    assert load.exact()[0, "dram__cycles_elapsed.avg.per_second"] == 1_590_000_000.0
    assert load.exact()[0, "vendor__new_metric.sum"] == 17.0
    assert load.query(
        "SELECT k.name, l.duration_ns, l.start_ns IS NULL, l.context_id, l.stream_id, l.device_id, l.correlation_id "
        "FROM kernels AS l JOIN kernel_classes AS k USING (kernel_class_id) ORDER BY correlation_id"
    ) == [
        ("a", 1_205_070, True, 1, 7, 0, 0),
        ("a", 1_205_070, True, 1, 7, 0, 3),
        ("b", 1_205_070, True, 1, 7, 0, 4),
    ]
    assert load.query("SELECT DISTINCT method FROM counters") == [("imported",)]
    assert load.query("SELECT host, pid FROM processes") == [("node0", 100)]


def test_labels_become_metrics_and_the_same_label_differs_by_section_and_unit(load: Import) -> None:
    rows = [
        (SOL, "Duration", "ns", "406240"),
        (SOL, "Memory Throughput", "%", "21.68"),
        (SOL, "Compute (SM) Throughput", "%", "23.59"),
        (SOL, "L1/TEX Cache Throughput", "%", "23.23"),
        (MWA, "Memory Throughput", "Gbyte/s", "1.50"),
        ("Occupancy", "Achieved Occupancy", "%", "15.53"),
        ("Some Section", "Unheard Of", "", "4"),
    ]
    load(details([Kernel(0, rows=rows)]))
    assert load.exact() == {
        (0, DURATION): 406_240.0,
        (0, MEMORY): 21.68,
        (0, COMPUTE): 23.59,
        (0, "l1tex__throughput.avg.pct_of_peak_sustained_active"): 23.23,
        (0, "dram__bytes.sum.per_second"): 1.5e9,
        (0, "dram_bytes"): 609_360.0,  # in 406.24 us
        (0, "sm__warps_active.avg.pct_of_peak_sustained_active"): 15.53,
        (0, "Some Section: Unheard Of"): 4.0,
    }
    assert load.query("SELECT bound, compute_pct, memory_pct, occupancy_pct, l1_pct FROM verdicts") == [
        ("latency", 23.59, 21.68, 15.53, 23.23)
    ]


def test_labels_of_2019_and_2020(load: Import) -> None:
    sol_old = "GPU Speed Of Light"
    rows = [
        (sol_old, "Memory [%]", "%", "85.34"),
        (sol_old, "SM [%]", "%", "12.71"),
        (sol_old, "SOL FB", "%", "85.34"),
        (sol_old, "SOL TEX", "%", "16.39"),
        (sol_old, "SM Frequency", "cycle/nsecond", "1.21"),
        (sol_old, "Duration", "usecond", "358.08"),
        (MWA, "Memory Throughput", "Gbyte/second", "554.92"),
    ]
    columns = [name for name in DETAILS if name not in ("Block Size", "Grid Size", "Device", "CC")]
    columns.insert(5, "Kernel Time")
    kernel = Kernel(0, rows=rows, extra={"Kernel Time": "2020-May-29 12:02:46"})
    load(details([kernel], columns))
    assert load.exact()[0, "smsp__cycles_elapsed.avg.per_second"] == 1.21e9
    assert load.query("SELECT bound, memory_pct, compute_pct, dram_pct, total_ns FROM verdicts") == [
        ("memory", 85.34, 12.71, 85.34, 358_080)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_columns(load: Import, seed: int) -> None:
    kernels = [Kernel(i, f"k{i}", sol(70, 10)) for i in range(3)]
    load(details(kernels))
    expected = load.exact()
    columns = list(DETAILS)
    random.Random(seed).shuffle(columns)
    load(details(kernels, columns))
    assert load.exact() == expected
    load(raw(kernels))
    assert load.exact() == expected


def test_a_column_of_labels_and_names(load: Import) -> None:
    load(details([Kernel(0, rows=[(SOL, f"Duration ({DURATION})", "us", "3.50")])]))
    assert load.exact() == {(0, DURATION): 3500.0}


def test_output_of_the_program_before_between_after_and_in_the_lines(load: Import) -> None:
    lines = details([Kernel(i, f"k{i}", sol(70, 10, 5_000)) for i in range(3)])
    expected_lines = len(lines) - 1
    lines[0] = "no end of line: " + lines[0]
    mixed = ["==PROF== Connected to process 100", "x" * 5000, 'loss,"1,5",accuracy', '"unbalanced', ""]
    for i, line in enumerate(lines):
        mixed.append(line if i != 4 else f"step 3 done{line}")
        mixed += [f"step {i}, loss 0,5", "1,2,3", '"0","looks like a row"', '"a quote']
    summary = load([*mixed, "==PROF== Disconnected from process 100", "bye"])
    assert (summary.kernels, summary.exact, summary.read["rows"]) == (3, 9, expected_lines)
    assert load.query("SELECT name FROM kernel_classes ORDER BY name") == [("k0",), ("k1",), ("k2",)]
    assert summary.kernel_ns == 15_000


def test_rule_rows_are_longer_and_metric_rows_shorter(load: Import) -> None:
    rule = (
        "SOLBottleneck",
        "Memory is more heavily utilized than Compute: Look at the Memory Workload Analysis section.",
    )
    lines = details([Kernel(0, rows=sol(25.4, 67.1), rules=[rule, ("Other", "with, commas and\nline breaks")])])
    short = [line.removesuffix(',"","",""') + "," if line.endswith(',"","",""') else line for line in lines]
    assert short != lines
    summary = load(short)
    assert summary.exact == 3
    assert summary.read["rule results"] == 2
    assert summary.read["speed-of-light verdicts in the file"] == 1
    assert not summary.refused
    assert load.query("SELECT bound FROM verdicts") == [("memory",)]


def test_a_verdict_of_the_file_that_its_rounded_numbers_do_not_give_is_told(load: Import) -> None:
    rule = ("SOLBottleneck", "Memory is more heavily utilized than Compute: Look at ...")
    summary = load(details([Kernel(0, rows=sol(10, 80.00), rules=[rule])]))  # 79.996, and so not above 80
    assert summary.refused == {
        "speed-of-light verdicts that the percentages in the file, as rounded, do not give": 1,
    }


def test_values_that_are_missing_are_null(load: Import) -> None:
    told = {"a__x.sum": "n/a", "b__x.sum": "nan", "c__x.sum": "", "d__x.sum": "(!) n/a", "e__x.sum": "SIMT"}
    rows = metric_rows(*((name, "", text) for name, text in told.items())) + DURATION_ROW
    summary = load(details([Kernel(0, rows=rows)]))
    assert load.exact() == {**{(0, name): None for name in told}, (0, DURATION): 9920.0}
    assert summary.read["metrics without a number"] == 5
    assert not summary.refused


def test_a_launch_without_a_duration_has_none(load: Import) -> None:
    summary = load(details([Kernel(0, rows=metric_rows(("dram__bytes.sum", "byte", "823,404,288")))]))
    assert (summary.kernels, summary.kernel_ns) == (1, 0)
    assert load.query("SELECT duration_ns IS NULL FROM kernels") == [(True,)]


def test_metrics_that_repeat_are_stored_once_the_one_with_more_digits(load: Import) -> None:
    rows = [
        (LAUNCH, "Registers Per Thread", "register/thread", "32"),
        (LAUNCH, "Static Shared Memory Per Block", "Kbyte/block", "1.02"),
        *metric_rows(("launch__shared_mem_per_block_static", "byte/block", "1,024"), (DURATION, "ns", "7.00")),
        ("GPU and Memory Workload Distribution", "Average SM Active Cycles", "cycle", "10.00"),
        (SOL, "SM Active Cycles", "cycle", "10.00"),
    ]
    summary = load(details([Kernel(0, rows=rows)]))
    assert load.exact()[0, "launch__shared_mem_per_block_static"] == 1024.0
    assert summary.exact == 4
    assert summary.read["values that repeat another"] == 1
    assert load.query("SELECT registers_per_thread, static_shared_bytes FROM kernel_classes") == [(32, 1024)]


def test_sizes_that_were_rounded_are_no_part_of_the_class(load: Import) -> None:
    rows = [(LAUNCH, "Dynamic Shared Memory Per Block", "Kbyte/block", "205.70"), *DURATION_ROW]
    summary = load(details([Kernel(0, rows=rows)]))
    assert load.query("SELECT dynamic_shared_bytes IS NULL FROM kernel_classes") == [(True,)]
    assert load.exact()[0, "launch__shared_mem_per_block_dynamic"] == 205_700.0
    assert sum(n for why, n in summary.refused.items() if why.startswith("shared memory sizes")) == 1


def test_rows_of_a_launch_may_stand_apart(load: Import) -> None:
    lines = details([Kernel(i, f"k{i}", sol(70, 10, 5_000)) for i in range(4)])
    body = lines[1:]
    random.Random(1).shuffle(body)
    summary = load([lines[0], *body])
    assert (summary.kernels, summary.exact, summary.kernel_ns) == (4, 12, 20_000)


def test_several_tables_in_one_file(load: Import) -> None:
    first = details([Kernel(0, "a", sol(70, 10))])
    again = raw([Kernel(0, "b", sol(70, 10)), Kernel(1, "b", sol(70, 10))])
    other = details([Kernel(0, "c", sol(70, 10), pid="200")])
    summary = load([*first, "some output", *again, *other])
    assert (summary.kernels, summary.processes, summary.read["tables"]) == (4, 3, 3)
    assert load.query("SELECT pid, count(*) FROM processes GROUP BY pid ORDER BY pid") == [(100, 2), (200, 1)]


def test_several_files_and_only_one_device(load: Import, tmp_path: Path) -> None:
    paths = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.csv"
        kernels = [Kernel(i, name, sol(70, 10, 1_000), device=str(i)) for i in range(2)]
        path.write_text("\n".join(details(kernels)))
        paths.append(path)
    done: list[tuple[int, int]] = []
    both = registry.import_files(paths, tmp_path / "both", progress=lambda *at: done.append(at))
    assert (both.kernels, both.processes) == (4, 2)
    assert done[-1][0] == done[-1][1]
    one = registry.import_files(paths, tmp_path / "one-device", Options(device="1"))
    assert (one.kernels, one.read["rows of other devices"]) == (2, 6)
    with pytest.raises(ImportFailed, match="name devices by number only"):
        registry.import_files(paths, tmp_path / "none", Options(device="GPU-00"))


def test_a_wanted_device_that_is_not_there(load: Import) -> None:
    with pytest.raises(ImportFailed, match=r"holds no GPU kernels.*rows of other devices"):
        load(details([Kernel(0, rows=DURATION_ROW)]), device="5")
    assert load.nothing_left()


# --- the raw page -----------------------------------------------------------------------------


def test_the_raw_page_tells_shape_device_and_units(load: Import) -> None:
    facts = {
        "launch__grid_dim_x": "148", "launch__grid_dim_y": "2", "launch__grid_dim_z": "1",
        "launch__cluster_dim_x": "2", "launch__cluster_dim_y": "1", "launch__cluster_dim_z": "1",
        "launch__registers_per_thread": "40", "launch__shared_mem_per_block_static": "0",
        "launch__shared_mem_per_block_dynamic": "8,704",
        "device__attribute_display_name": "NVIDIA B200",
        "device__attribute_compute_capability_major": "10", "device__attribute_compute_capability_minor": "0",
        "device__attribute_multiprocessor_count": "148", "device__attribute_warp_size": "32",
        "device__attribute_max_threads_per_multiprocessor": "2,048",
        "device__attribute_max_mem_frequency_khz": "3,996,000",
        "device__attribute_global_memory_bus_width": "7,680",
        "device__attribute_max_gpu_frequency_khz": "1,965,000",
        "device__attribute_total_memory": "191,503,138,816",
        "profiler__replayer_passes": "11",
    }  # fmt: skip
    rows = [("", name, "", text) for name, text in facts.items()] + [("", DURATION, "us", "9.92")]
    summary = load(raw([Kernel(i, "decode", rows, grid="") for i in range(3)]))
    assert (summary.kernels, summary.kernel_ns, summary.exact) == (3, 29_760, 3 * 21)
    assert load.query(
        "SELECT grid_x, grid_y, grid_z, block_x, cluster_x, registers_per_thread, dynamic_shared_bytes "
        "FROM kernel_classes"
    ) == [(148, 2, 1, 256, 2, 40, 8704)]
    assert load.query(
        "SELECT name, cc_major, cc_minor, sm_count, threads_per_sm_max, memory_bytes, sm_clock_max_hz, "
        "memory_clock_max_hz, dram_peak_bytes_per_s FROM devices"
    ) == [("NVIDIA B200", 10, 0, 148, 2048, 191_503_138_816, 1_965_000_000, 3_996_000_000, 7.67232e12)]
    assert load.query("SELECT DISTINCT passes FROM exact") == [(11,)]


def test_units_in_the_column_titles(load: Import) -> None:
    lines = [quote(["ID", "Kernel Name", f"{DURATION} [us]", f"{COMPUTE} [%]"]), quote(["0", "k", "2.50", "71.20"])]
    load(lines)
    assert load.exact() == {(0, DURATION): 2500.0, (0, COMPUTE): 71.2}


def test_without_units_only_what_no_tool_scales_is_read(load: Import) -> None:
    summary = load(raw([Kernel(0, rows=sol(71.25, 10))], units=False))
    assert load.exact() == {(0, DURATION): None, (0, COMPUTE): 71.25, (0, MEMORY): 10.0}
    assert summary.refused == {"values without their unit (no column or row of units)": 1}


def test_units_that_are_not_known_are_no_reason_to_guess(load: Import) -> None:
    rows = [
        *metric_rows(("dram__bytes.sum", "furlong", "5"), (DURATION, "fortnight", "2"), ("x__y.sum", "widget", "7")),
        *metric_rows(("lts__t_bytes.sum", "GB", "1.5"), ("l1tex__t_bytes.sum", "KiB", "2")),
    ]
    summary = load(details([Kernel(0, rows=rows)]))
    values = {metric: value for (_, metric), value in load.exact().items()}
    assert values == {
        "dram__bytes.sum": None,
        DURATION: None,
        "x__y.sum": 7.0,
        "lts__t_bytes.sum": 1.5e9,
        "l1tex__t_bytes.sum": 2048.0,
    }
    assert summary.refused == {"bytes, times and frequencies in units that are not known": 2}
    assert summary.read["values in units that are not known, taken as they are"] == 1


def test_a_row_without_a_kernel_name_is_no_launch(load: Import) -> None:
    summary = load(raw([Kernel(0, "k", sol(70, 10)), Kernel(1, "", sol(70, 10))]))
    assert summary.kernels == 1
    assert summary.refused == {"rows that are cut short or damaged": 1}


def test_ranges_of_nvtx_are_no_metrics(load: Import) -> None:
    kernel = Kernel(0, rows=sol(71, 10), extra={"thread Domain:Push/Pop_Range:PL_Type": "<default domain>:step 3"})
    load(raw([kernel], (*kernel.cells(),)))
    assert set(load.exact()) == {(0, DURATION), (0, COMPUTE), (0, MEMORY)}


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [en, de])
def test_both_ways_to_write_numbers(load: Import, number: Callable[[float], str]) -> None:
    rows = [*sol(71.25, 10.5, 1_234_560, number), *metric_rows(("x__y.sum", "inst", number(12_345)))]
    load(details([Kernel(0, rows=rows)]))
    assert load.exact() == {
        (0, COMPUTE): 71.25,
        (0, MEMORY): 10.5,
        (0, DURATION): 1_234_560.0,
        (0, "x__y.sum"): 12_345.0,
    }


def test_in_doubt_the_file_is_refused_and_the_locale_settles_it(load: Import) -> None:
    lines = details([Kernel(0, rows=metric_rows((DURATION, "us", "1,234")))])
    with pytest.raises(ImportFailed, match=r"'1,234' may be 1234 or 1\.234.*--locale"):
        load(lines)
    assert load.nothing_left()
    load(lines, locale="en")
    assert load.exact() == {(0, DURATION): 1_234_000.0}
    load(lines, locale="de")
    assert load.exact() == {(0, DURATION): 1234.0}


def test_the_grid_tells_how_thousands_are_written(load: Import) -> None:
    rows = [*metric_rows((DURATION, "us", "1.234")), (LAUNCH, "Grid Size", "", "4.096")]
    load(details([Kernel(0, rows=rows, grid="(64, 64, 1)")]))
    assert load.exact()[0, DURATION] == 1_234_000.0


def test_two_formats_in_one_file_are_refused(load: Import) -> None:
    rows = metric_rows((DURATION, "us", "1,234.50"), ("a__b.sum", "", "1.234,50"))
    with pytest.raises(ImportFailed, match="two ways"):
        load(details([Kernel(0, rows=rows)]))
    summary = load(details([Kernel(0, rows=rows)]), locale="en")
    assert load.exact() == {(0, DURATION): 1_234_500.0, (0, "a__b.sum"): None}
    assert summary.refused == {"values that are no numbers as the file writes them (en)": 1}


# --- encodings and dialects -------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_what_shells_make_of_it(load: Import, encoding: str) -> None:
    text = "\r\n".join(["==PROF== é", *details([Kernel(0, "größe<ø>", sol(71.25, 10))]), ""])
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    summary = load(mark + text.encode(encoding))
    assert summary.kernels == 1
    assert load.query("SELECT name, compute_pct FROM verdicts JOIN kernel_classes USING (kernel_class_id)") == [
        ("größe<ø>", 71.25)
    ]


@pytest.mark.parametrize("delimiter", [";", "\t"])
@pytest.mark.parametrize("quoted", [True, False])
def test_delimiters_of_spreadsheets(load: Import, delimiter: str, quoted: bool) -> None:
    def plain(cells: Sequence[str], delimiter: str) -> str:
        return delimiter.join(cells)

    kernels = [Kernel(i, "f<int, 4>(a)", sol(71.25, 10)) for i in range(2)]
    summary = load(details(kernels, DETAILS, delimiter, quote if quoted else plain))
    assert (summary.kernels, summary.exact) == (2, 6)


def test_names_that_are_no_text_keep_their_bytes_apart(load: Import) -> None:
    lines = "\n".join(details([Kernel(0, "kAAAA", sol(71, 10)), Kernel(1, "kBBBB", sol(71, 10))])).encode()
    load(lines.replace(b"AAAA", b"\xff\xfe").replace(b"BBBB", b"\xff\xff"))
    assert load.query("SELECT name_mangled FROM kernel_classes ORDER BY ALL") == [("k\\xff\\xfe",), ("k\\xff\\xff",)]


# --- files without launches -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["==PROF== Connected to process 1", "==ERROR== The application returned an error code (1)."],
            "holds no table, only messages: ==ERROR== The application returned an error code",
        ),
        (["==PROF== Connected to process 1", "==WARNING== No kernels were profiled."], "No kernels were profiled"),
        (["==PROF== Connected to process 1", "done"], "holds no table of Nsight Compute"),
        (details([]), "has a table without rows"),
        (
            [quote([*DETAILS[:-1], "Minimum", "Maximum", "Average"]), quote(["0", *["x"] * 16])],
            "summary over launches",
        ),
    ],
)
def test_without_launches_it_fails_with_the_reason(load: Import, lines: list[str], reason: str) -> None:
    with pytest.raises(ImportFailed, match=r"trace1\.csv") as caught:
        load(lines)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert load.nothing_left()


def test_detection_goes_by_content(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("\n".join(["output " * 100] * 2000 + details([Kernel(0, rows=DURATION_ROW)])))
    assert ncu_csv.detect(log, log.read_bytes()[: registry.HEAD_BYTES])
    other = tmp_path / "other.csv"
    other.write_text('"ID","Name","Value"\n"0","a","1"\n')
    assert not ncu_csv.detect(other, other.read_bytes())


# --- damage -----------------------------------------------------------------------------------


def test_a_row_that_is_cut_is_left_out_and_counted(load: Import) -> None:
    text = "\n".join(details([Kernel(i, "k", sol(71.25, 10)) for i in range(2)]))
    summary = load(text[:-2].encode())  # within the last value
    assert summary.exact == 5
    assert summary.refused == {"rows that are cut short or damaged": 1}
    assert load.query("SELECT count(*), count(duration_ns) FROM kernels") == [(2, 1)]


def test_a_quote_that_never_closes_costs_one_row(load: Import) -> None:
    lines = details([Kernel(i, f"k{i}", sol(71.25, 10)) for i in range(4)])
    lines[4] = lines[4].replace('"k1"', '"k1')
    summary = load(lines)
    assert (summary.exact, summary.refused["rows that are cut short or damaged"]) == (11, 1)


def test_labels_of_any_length_take_no_time(load: Import) -> None:
    """Searching a metric's name in them would take the square of their length."""
    started = time.monotonic()
    rows = [*sol(71.25, 10), ("Mine", "a" * 130_000, "", "5"), ("Mine", "a__" + "." * 130_000, "", "6")]
    assert load(details([Kernel(0, "k", rows)])).exact == 5
    columns = "x" + " [x" * 40_000
    assert load(raw([Kernel(0, "k", [*sol(71.25, 10), ("", columns, "", "5")])])).exact == 4
    assert time.monotonic() - started < 20


def test_a_line_longer_than_any_table_has(load: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanalyze.importers.ncu_table.LINE_BYTES", 4096)
    lines = details([Kernel(0, "k", sol(71.25, 10))])
    assert load([*lines[:2], "x" * 100_000, *lines[2:]]).exact == 3


BASE = "\n".join(
    ["==PROF== Connected", *details([Kernel(i, "k<1, 2>(a)", sol(71.25, 10)) for i in range(3)]), "out", ""]
).encode()
RAW = "\n".join(["out", *raw([Kernel(i, "k", sol(71.25, 10)) for i in range(3)]), ""]).encode()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mutated_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = bytearray(data.draw(st.sampled_from([BASE, RAW])))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(base) - 1))
        base[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=12))
    load = Import(tmp_path_factory.mktemp("fuzz"))
    try:
        summary = load(bytes(base[: data.draw(st.integers(1, len(base)))]) + b"\n")
    except ImportFailed as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert "\n" not in refused
        assert load.nothing_left()
        return
    exact = load.exact()
    assert summary.exact == len(exact) or summary.processes > 1
    assert all(value is None or value == value for value in exact.values())


@settings(max_examples=12, deadline=None)
@given(text=st.lists(st.text(alphabet='",;\t0123456789.=ID abcé\n', max_size=60), max_size=20))
def test_any_output_around_the_table_changes_nothing(tmp_path_factory: pytest.TempPathFactory, text: list[str]) -> None:
    load = Import(tmp_path_factory.mktemp("noise"))
    lines = details([Kernel(0, "k", sol(71.25, 10))])
    summary = load(["==PROF== x", *text, lines[0], lines[1], lines[2], lines[3]])
    assert {key: value for key, value in load.exact().items() if "__" in key[1]} == {
        (0, COMPUTE): 71.25,
        (0, MEMORY): 10.0,
        (0, DURATION): 10_000.0,
    }
    assert summary.kernels == 1


# --- real files -------------------------------------------------------------------------------


def independent(path: Path) -> tuple[set[str], dict[tuple[str, str], str]]:
    """Launch ids and duration texts by (id, unit), by the csv module alone.

    Without a duration it is the cycles of the SMs over their clock, as Nsight Compute defines that clock.
    """
    ids: set[str] = set()
    durations: dict[tuple[str, str], str] = {}
    cycles: dict[str, float] = {}
    header: list[str] = []
    for row in csv.reader(path.read_text(errors="replace").splitlines()):
        if "Kernel Name" in row:
            header = row
        elif header and len(row) > 8 and row[0].isdigit():
            ids.add(row[0])
            cells = dict(zip(header, row, strict=False))
            if cells.get("Metric Name") in (DURATION, "Duration"):
                durations[row[0], cells["Metric Unit"]] = cells["Metric Value"]
            elif cells.get("Metric Name") == "sm__cycles_elapsed.avg":
                cycles[row[0]] = float(cells["Metric Value"].replace(",", ""))
            elif cells.get("Metric Name") == "sm__cycles_elapsed.avg.per_second":
                clock = float(cells["Metric Value"].replace(",", ""))
                durations[row[0], "ns"] = f"{cycles[row[0]] / clock * 1e9:.3f}"
            elif DURATION in cells:
                durations[row[0], "ns"] = cells[DURATION]
    return ids, durations


REAL = {
    "v100_roofline_gemm.csv": (11, 165),
    "a100_roofline_gemm.csv": (11, 66),
    "b200_raw_flashinfer_b1_ctx4k.csv": (16, 16 * 464),
    "b200_superbench_mixed_stdout.csv": (1, 49),
    "gb10_na_metric.csv": (3, 4),
}


@needs_real_traces
@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str, load: Import) -> None:
    path = REAL_TRACES / "ncu-csv" / name
    summary = load(path.read_bytes())
    ids, durations = independent(path)
    launches, metrics = REAL[name]
    assert summary.kernels == launches == len(ids)
    assert summary.read["metrics"] == metrics
    factor = {"ns": 1, "us": 1000}
    expected = {int(id_): round(float(text.replace(",", "")) * factor[unit]) for (id_, unit), text in durations.items()}
    found = load.query("SELECT correlation_id, duration_ns FROM kernels WHERE duration_ns IS NOT NULL")
    assert {int(id_): int(ns) for id_, ns in found} == expected
    assert summary.kernel_ns == sum(expected.values())
    assert not summary.refused


@needs_real_traces
def test_real_roofline_counts(load: Import) -> None:
    load((REAL_TRACES / "ncu-csv" / "v100_roofline_gemm.csv").read_bytes())
    assert load.exact()[10, "dram__bytes.sum"] == 25_174_959_968.0
    assert load.exact()[10, "sm__cycles_elapsed.avg.per_second"] == 1_236_080_147.79
    found = load.query(
        "SELECT launches, total_ns, mean_ns, dram_bytes, l2_bytes, fp32_flops FROM verdicts ORDER BY dram_bytes DESC"
    )
    assert found[1] == (1, 181_378_208, 181_378_208.0, 25_174_959_968.0, 267_257_596_064.0, 419_430_400.0)
    assert load.query("SELECT DISTINCT counter FROM counters WHERE counter LIKE 'dram%'") == [("dram_bytes",)]


@needs_real_traces
def test_real_file_of_errors_fails(load: Import) -> None:
    with pytest.raises(ImportFailed, match=r"The application returned an error code \(1\)"):
        load((REAL_TRACES / "ncu-csv" / "b200_app_error_only.csv").read_bytes())
    assert load.nothing_left()


@needs_real_traces
def test_real_missing_value_is_null(load: Import) -> None:
    load((REAL_TRACES / "ncu-csv" / "gb10_na_metric.csv").read_bytes())
    assert load.exact()[0, "dram__throughput.avg.pct_of_peak_sustained_elapsed"] is None
    assert load.exact()[2, DURATION] == 1_205_000.0
