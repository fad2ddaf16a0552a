"""Nsight Compute's report files: with NVIDIA's library on real ones, with a stand-in on small ones."""

from __future__ import annotations

import importlib.util
import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ncu_files import COMPUTE, DURATION, MEMORY, REAL_TRACES, en, needs_real_traces
from ncu_files import Kernel as Printed
from ncu_files import details as print_details

import nanalyze.analysis as na
from nanalyze.importers import ncu_metrics, ncu_rep, registry
from nanalyze.importers.options import ImportFailed, Options

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("ncu_report") is None, reason="needs the package ncu-report (the extra ncu)"
)
REPORTS = sorted((REAL_TRACES / "ncu-rep").glob("*.ncu-rep"))

START = ncu_rep.MAGIC + (2).to_bytes(4, "little") + b"\x08\x07"

# Reads its "report" as JSON from the only source of the file; `crash`, `hang`, `bomb` and so on do what they say.
STAND_IN = """
    import json, os, sys, time

    class Metric:
        def __init__(self, told): self.told = told
        def has_value(self): return self.told[0] is not None
        def value(self): return float(self.told[0]) if self.told[0] in ("nan", "inf") else self.told[0]
        def unit(self): return self.told[1]

    class Action:
        NameBase_FUNCTION, NameBase_DEMANGLED, NameBase_MANGLED = 0, 1, 2
        def __init__(self, told): self.told = told
        def name(self, base): return self.told["names"][base]
        def workload_type(self): return self.told.get("workload", 0)
        def metric_names(self): return list(self.told["metrics"])
        def metric_by_name(self, name): return Metric(self.told["metrics"][name])
        def rule_results_as_dicts(self):
            return [{"rule_identifier": name, "rule_message": {"message": text}} for name, text in self.told["rules"]]

    class Range:
        def __init__(self, actions): self.actions = actions
        def num_actions(self): return len(self.actions)
        def action_by_idx(self, i):
            told = self.actions[i]
            if told == "crash": os.abort()
            if told == "hang": time.sleep(600)
            if told == "bomb": self.held = bytes(12 * 2**30); told = self.actions[0]
            if told == "fail": raise RuntimeError("no such block")
            if told == "noise": print("something the library prints"); told = self.actions[0]
            return Action(told)

    class Report:
        def __init__(self, ranges): self.ranges = [Range(actions) for actions in ranges]
        def num_ranges(self): return len(self.ranges)
        def range_by_idx(self, i): return self.ranges[i]

    def load_report(path):
        text = open(path, "rb").read().split(b"JSON", 1)[1].decode("utf-8", "replace")
        return Report(json.JSONDecoder().raw_decode(text)[0])
"""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def block(sources: list[bytes], results: list[bytes]) -> bytes:
    payload = b"".join(len(entry).to_bytes(4, "little") + entry for entry in (*sources, *results))
    session = b"\x1a" + varint(130) + b"s" * 130  # a message, as reports have one here
    header = b"\x08" + varint(len(sources)) + b"\x10" + varint(len(results)) + session + b"\x28" + varint(len(payload))
    return len(header).to_bytes(4, "little") + header + payload


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "ncu_report.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))


def action(compute: float = 25.0, memory: float = 67.0, duration: float = 526_272.0, **more: Any) -> dict[str, Any]:
    metrics = {
        COMPUTE: [compute, "%"],
        MEMORY: [memory, "%"],
        DURATION: [duration, "ns"],
        "launch__grid_dim_x": [8, ""], "launch__grid_dim_y": [2, ""], "launch__grid_dim_z": [1, ""],
        "launch__block_dim_x": [256, "block"], "launch__block_dim_y": [1, "block"], "launch__block_dim_z": [1, "block"],
        "launch__context_id": [1, ""], "launch__stream_id": [7, ""], "launch__device_id": [2, ""],
        "launch__registers_per_thread": [40, "register/thread"],
        "device__attribute_display_name": ["NVIDIA H100 PCIe", ""],
        "device__attribute_compute_capability_major": [9, ""], "device__attribute_compute_capability_minor": [0, ""],
        "device__attribute_multiprocessor_count": [114, ""], "device__attribute_warp_size": [32, ""],
        **more.pop("metrics", {}),
    }  # fmt: skip
    return {"names": ["f", "f(int)", "_Z1fi"], "metrics": metrics, "rules": [], **more}


def write(path: Path, *ranges: list[Any]) -> Path:
    told = b"JSON" + json.dumps(ranges).encode()
    path.write_bytes(START + block([told], [b"result"] * sum(map(len, ranges))))
    return path


def query(run_dir: Path, sql: str) -> list[tuple]:
    with na.open(run_dir) as run:
        rows = run.sql(sql).astype(object).itertuples(index=False)
        return [tuple(None if pd.isna(value) else value for value in row) for row in rows]


# --- small files ------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_in")
def test_launches_of_all_ranges(tmp_path: Path) -> None:
    more = {
        "dram__bytes_read.sum": [2.5, "Mbyte"],
        "vendor__new.sum": ["nan", ""],
        "launch__func_cache_config": ["CachePreferNone", ""],
        "empty__x.sum": [None, "byte"],
        "breakdown:sm__throughput": ["a,b", ""],
        "group:memory__chart": ["a,b", ""],
    }
    path = write(tmp_path / "a.ncu-rep", [action(), action(metrics=more)], [action(duration=1000.0)])
    done: list[tuple[int, int]] = []
    summary = registry.import_files([path], tmp_path / "run", progress=lambda *at: done.append(at))
    assert (summary.kernels, summary.kernel_ns) == (3, 2 * 526_272 + 1000)
    assert summary.exact == 3 * 18 + 4
    assert summary.read["lists of metric names"] == 2
    assert done[-1] == (path.stat().st_size,) * 2
    assert query(
        tmp_path / "run",
        "SELECT correlation_id, duration_ns, start_ns IS NULL, context_id, stream_id, l.device_id, name, name_mangled, "
        "grid_x, grid_y, block_x, registers_per_thread FROM kernels AS l JOIN kernel_classes USING (kernel_class_id) "
        "ORDER BY correlation_id",
    ) == [
        (id_, duration, True, 1, 7, 2, "f(int)", "_Z1fi", 8, 2, 256, 40)
        for id_, duration in ((0, 526_272), (1, 526_272), (2, 1000))
    ]
    found = query(tmp_path / "run", "SELECT metric, value FROM exact WHERE correlation_id = 1 AND value IS NOT NULL")
    assert dict(found)["dram__bytes_read.sum"] == 2_500_000.0
    assert query(
        tmp_path / "run", "SELECT metric FROM exact WHERE value IS NULL AND correlation_id = 1 ORDER BY 1"
    ) == [
        ("device__attribute_display_name",),
        ("empty__x.sum",),
        ("launch__func_cache_config",),
        ("vendor__new.sum",),
    ]
    assert query(tmp_path / "run", "SELECT device_id, name, cc_major, sm_count FROM devices") == [
        (2, "NVIDIA H100 PCIe", 9, 114)
    ]


@pytest.mark.usefixtures("stand_in")
def test_graphs_are_kept_apart_and_ranges_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ncu-rep", [action(), action(workload=3), action(workload=1)])
    summary = registry.import_files([path], tmp_path / "run")
    assert (summary.kernels, summary.read["graph launches"]) == (1, 1)
    assert summary.refused == {"results of a range, which are no launch's": 1}
    assert query(tmp_path / "run", "SELECT DISTINCT scope, correlation_id, graph_id FROM exact ORDER BY 1") == [
        ("graph", 1, 1),
        ("kernel", 0, None),
    ]


@pytest.mark.usefixtures("stand_in")
def test_a_kernel_without_a_name_is_counted(tmp_path: Path) -> None:
    summary = registry.import_files([write(tmp_path / "a.ncu-rep", [action(names=[None] * 3)])], tmp_path / "run")
    assert (summary.kernels, summary.refused) == (1, {"kernels without a name": 1})
    assert query(tmp_path / "run", "SELECT name, name_mangled FROM kernel_classes") == [("(no name)", "")]


@pytest.mark.usefixtures("stand_in")
def test_only_the_wanted_device(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ncu-rep", [action(), action(metrics={"launch__device_id": [5, ""]})])
    summary = registry.import_files([path], tmp_path / "run", Options(device="5"))
    assert (summary.kernels, summary.read["launches of other devices"]) == (1, 1)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([action(), "crash"], "NVIDIA's library broke off on it (signal 6)"),
        ([action(), "fail"], "NVIDIA's library cannot read it: RuntimeError: no such block"),
        ([action(), "hang"], "gave no launch in 1 s"),
        ([action(), "bomb"], "NVIDIA's library cannot read it: MemoryError"),
        ([], "holds no whole launch"),
    ],
)
def test_a_file_that_takes_the_library_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actions: list[Any], reason: str
) -> None:
    monkeypatch.setattr(ncu_rep, "SILENCE_S", 1.0 if "hang" in actions else 60.0)
    path = write(tmp_path / "a.ncu-rep", actions)
    started = time.monotonic()
    with pytest.raises(ImportFailed) as caught:
        registry.import_files([path], tmp_path / "run")
    assert reason in str(caught.value)
    assert time.monotonic() - started < 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ncu-rep", "site"]


@pytest.mark.usefixtures("stand_in")
def test_what_the_library_prints_is_no_launch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ncu-rep", [action(), "noise"])
    assert registry.import_files([path], tmp_path / "run").kernels == 2


def test_without_the_package_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu_rep, "PACKAGE", "ncu_report_that_is_not_there")
    path = write(tmp_path / "a.ncu-rep", [action()])
    with pytest.raises(ImportFailed, match=r"pip install nanalyze\[ncu\]") as caught:
        registry.import_files([path], tmp_path / "run")
    assert "--csv --page raw" in str(caught.value)
    assert not (tmp_path / "run").exists()


# --- verdicts ---------------------------------------------------------------------------------

MESSAGES = {
    "memory": "Memory is more heavily utilized than Compute: Look at the Memory Workload Analysis section.",
    "compute": "Compute is more heavily utilized than Memory: Look at the Compute Workload Analysis section.",
    "balanced": "Compute and Memory are well-balanced: To reduce runtime, both must be reduced.",
    "latency": "This kernel exhibits low compute throughput and memory bandwidth utilization relative to the peak.",
    "high": "The kernel is utilizing greater than 80.0% of the available compute or memory performance of the device.",
}


def said(compute: float, memory: float) -> str:
    """Nsight Compute's rule, from its SpeedOfLight.py."""
    if compute < 80 and memory < 80:
        if compute < 60 and memory < 60:
            return "latency"
        if abs(compute - memory) >= 10:
            return "compute" if compute > memory else "memory"
        return "balanced"
    return "high"


GRID = [
    (float(c), float(m)) for c in (0.02, 59.99, 60, 69.5, 70, 79.99, 80, 95) for m in (1.2, 59.99, 60, 70, 79.5, 80, 95)
]


def assert_verdicts_agree(run_dir: Path, rules: dict[str, tuple[str, float, float]]) -> None:
    """`rules`: by kernel, what the file's rule says, and its two percentages."""
    found = dict(query(run_dir, "SELECT kernel, bound FROM verdicts"))
    expected = {}
    for kernel, (bound, compute, memory) in rules.items():
        expected[kernel] = ("memory" if memory > compute else "compute") if bound == "high" else bound
    assert found == expected


@pytest.mark.parametrize("duration", [1_500.0, 250_000.0])
@pytest.mark.usefixtures("stand_in")
def test_verdicts_of_reports_equal_the_rule(tmp_path: Path, duration: float) -> None:
    rules, actions = {}, []
    for i, (compute, memory) in enumerate(GRID):
        bound = said(compute, memory)
        rules[f"k{i}"] = (bound, compute, memory)
        told = action(compute, memory, duration, names=[f"k{i}"] * 3)
        actions.append({**told, "rules": [["SOLBottleneck", MESSAGES[bound]], ["Other", MESSAGES["memory"]]]})
    summary = registry.import_files([write(tmp_path / "a.ncu-rep", actions)], tmp_path / "run")
    assert summary.read["speed-of-light verdicts in the file"] == len(GRID)
    assert not summary.refused
    assert_verdicts_agree(tmp_path / "run", rules)


@pytest.mark.parametrize("duration_us", [1.5, 250.0])
def test_verdicts_of_details_pages_equal_the_rule(tmp_path: Path, duration_us: float) -> None:
    section = "GPU Speed Of Light Throughput"
    rules, kernels = {}, []
    for i, (compute, memory) in enumerate(GRID):
        bound = said(compute, memory)
        rules[f"k{i}"] = (bound, compute, memory)
        rows = [
            (section, "Compute (SM) Throughput", "%", en(compute)),
            (section, "Memory Throughput", "%", en(memory)),
            (section, "Duration", "us", en(duration_us)),
        ]
        kernels.append(Printed(i, f"k{i}", rows, [("SOLBottleneck", MESSAGES[bound])]))
    path = tmp_path / "a.csv"
    path.write_text("\n".join(print_details(kernels)))
    summary = registry.import_files([path], tmp_path / "run")
    assert summary.read["speed-of-light verdicts in the file"] == len(GRID)
    assert not summary.refused
    assert_verdicts_agree(tmp_path / "run", rules)


# --- the blocks of a file ---------------------------------------------------------------------


REPORT = START + block([], []) + block([b"source" * 9], [b"one" * 20, b"two" * 20]) + block([], [b"three" * 20])


def ends_of_results() -> list[int]:
    return [REPORT.index(word) + len(word) for word in (b"one" * 20, b"two" * 20, b"three" * 20)]


def test_a_whole_file_counts_all_results(tmp_path: Path) -> None:
    path = tmp_path / "a.ncu-rep"
    path.write_bytes(REPORT)
    assert ncu_rep.results(path) == (3, None)


def test_every_cut_is_noticed_and_only_whole_results_count(tmp_path: Path) -> None:
    path = tmp_path / "a.ncu-rep"
    edges = {len(REPORT) - len(block([], [b"three" * 20])), 10 + len(block([], [])), 10}
    for length in range(10, len(REPORT)):
        path.write_bytes(REPORT[:length])
        whole = sum(end <= length for end in ends_of_results())
        assert ncu_rep.results(path) == (whole, None if length in edges else length), length


def test_what_does_not_look_like_blocks_counts_as_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.ncu-rep"
    path.write_bytes(
        ncu_rep.MAGIC + (2).to_bytes(4, "little") + b"\x08\x07" + (3).to_bytes(4, "little") + b"\xff\xff\xff"
    )
    assert ncu_rep.results(path) == (0, None)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), keep=st.integers(0, len(REPORT)))
def test_any_bytes_are_followed_to_an_end(tmp_path: Path, data: bytes, keep: int) -> None:
    path = tmp_path / "a.ncu-rep"
    path.write_bytes(REPORT[:keep] + data)
    whole, cut_at = ncu_rep.results(path)
    assert 0 <= whole <= path.stat().st_size
    assert cut_at is None or cut_at == path.stat().st_size


# --- real files -------------------------------------------------------------------------------

REAL = {
    "h100_rmsnorm": (3, 1_579_712),
    "short_launches": (4, 6_144),
    "t4_mlp": (1, 52_576),
    "triton_silu_duration_only": (1, 141_920),
}


def actions_of(path: Path) -> list[Any]:
    ncu_report = importlib.import_module("ncu_report")
    report = ncu_report.load_report(str(path))
    return [
        one.action_by_idx(i) for one in map(report.range_by_idx, range(report.num_ranges())) for i in range(len(one))
    ]


@needs_real_traces
@needs_library
@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_real_reports_equal_the_library(path: Path, tmp_path: Path) -> None:
    summary = registry.import_files([path], tmp_path / "run")
    actions = actions_of(path)
    assert (summary.kernels, summary.kernel_ns) == REAL[path.stem]
    assert not summary.refused
    expected = {}
    for id_, one in enumerate(actions):
        for name in one.metric_names():
            value = one[name].value() if one[name].has_value() else None
            if not name.startswith(("group:", "breakdown:")):
                expected[id_, name] = float(value) if isinstance(value, int | float) else None
    rows = query(
        tmp_path / "run",
        "SELECT correlation_id, metric, value FROM exact "
        "WHERE metric NOT IN (SELECT DISTINCT counter FROM counter_metrics)",
    )
    found = {(int(id_), metric): value for id_, metric, value in rows}
    assert {key for key, value in found.items() if value is None} == {k for k, v in expected.items() if v is None}
    assert found == expected
    times = query(tmp_path / "run", "SELECT duration_ns FROM kernels ORDER BY correlation_id")
    assert [int(ns) for (ns,) in times] == [int(one[DURATION].value()) for one in actions]


@needs_real_traces
@needs_library
@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_real_verdicts_equal_the_rule_of_the_report(path: Path, tmp_path: Path) -> None:
    registry.import_files([path], tmp_path / "run")
    rules: dict[str, tuple[str, float, float]] = {}
    for one in actions_of(path):
        for rule in one.rule_results_as_dicts():
            if rule["rule_identifier"] == "SOLBottleneck":
                bound = ncu_metrics.rule_says(rule["rule_message"]["message"])
                assert bound is not None
                rules[one.name(one.NameBase_DEMANGLED)] = (bound, one[COMPUTE].value(), one[MEMORY].value())
    if path.stem == "triton_silu_duration_only":
        assert not rules
        assert query(tmp_path / "run", "SELECT bound, missing FROM verdicts") == [
            ("undetermined", "compute_pct, memory_pct")
        ]
    else:
        assert rules
        assert_verdicts_agree(tmp_path / "run", rules)


@needs_real_traces
@needs_library
def test_real_report_gives_bytes_and_flops(tmp_path: Path) -> None:
    registry.import_files([REAL_TRACES / "ncu-rep" / "t4_mlp.ncu-rep"], tmp_path / "run")
    assert query(
        tmp_path / "run", "SELECT level_or_pipe, dram_bytes, l2_bytes, round(fp32_flops), waves FROM verdicts"
    ) == [("DRAM", 9_612_288.0 + 4_189_344.0, 12_058_016.0, 1_000_000.0, 24.80625)]  # adds two 1000 x 1000 matrices


@needs_real_traces
@needs_library
@pytest.mark.parametrize(("share", "launches"), [(0.3, 0), (0.5, 1), (0.7, 2), (0.9999, 2)])
def test_a_real_report_that_is_cut(tmp_path: Path, share: float, launches: int) -> None:
    whole = (REAL_TRACES / "ncu-rep" / "h100_rmsnorm.ncu-rep").read_bytes()
    path = tmp_path / "cut.ncu-rep"
    path.write_bytes(whole[: int(len(whole) * share)])
    if not launches:
        with pytest.raises(ImportFailed, match="holds no whole launch"):
            registry.import_files([path], tmp_path / "run")
        return
    summary = registry.import_files([path], tmp_path / "run")
    assert summary.kernels == launches
    assert summary.refused == {"launches that reach beyond the end of the file": 1}
    assert "cut short at byte" in summary.notes[0]
    assert query(tmp_path / "run", "SELECT bound FROM verdicts") == [("memory",)]


@needs_real_traces
@needs_library
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_real_reports_never_take_the_importer_down(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = bytearray((REAL_TRACES / "ncu-rep" / "short_launches.ncu-rep").read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.integers(4, len(base) - 1))
        base[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.ncu-rep").write_bytes(base)
    try:
        summary = registry.import_files([folder / "a.ncu-rep"], folder / "run")
    except ImportFailed:
        assert sorted(path.name for path in folder.iterdir()) == ["a.ncu-rep"]
        return
    assert summary.kernels <= 4
    with na.open(folder / "run") as run:
        assert len(run.verdicts()) <= summary.kernels
