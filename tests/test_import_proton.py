"""The Proton importer: every value against what was put into the profile, or an independent reading."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nanalyze.analysis as na
from nanalyze.importers import proton, registry
from nanalyze.importers.options import ImportFailed, Limits, Options
from nanalyze.importers.sink import ImportSummary

REPOSITORY = Path(__file__).resolve().parent.parent
REAL_TRACES = Path(os.environ.get("NANALYZE_REAL_TRACES") or REPOSITORY.parent / "shared" / "real-traces") / "proton"
A100 = {
    "CUDA": {
        "0": {"arch": "80", "bus_width": 5120, "clock_rate": 1410000, "memory_clock_rate": 1215000, "num_sms": 108}
    }
}

Node = dict[str, Any]


def node(name: str, *children: Node, **metrics: Any) -> Node:
    named = {key.replace("_ns", " (ns)") if key == "time_ns" else key: value for key, value in metrics.items()}
    return {"children": list(children), "frame": {"name": name, "type": "function"}, "metrics": named}


def kernel(name: str, count: Any, time_ns: Any, device: Any = "0", **metrics: Any) -> Node:
    return node(name, count=count, time_ns=time_ns, device_id=device, device_type="CUDA", **metrics)


def profile(path: Path, *children: Node, devices: Any = A100) -> Path:
    path.write_text(json.dumps([node("ROOT", *children), devices]))
    return path


def imported(path: Path, **options: Any) -> ImportSummary:
    return registry.import_files([path], path.parent / "run", Options(**options), force=True)


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with na.open(path.parent / "run") as run:
        assert run.damage_count == 0
        return [tuple(row.values()) for row in run.arrow(query).to_pylist()]


def failure(path: Path, **options: Any) -> str:
    with pytest.raises(ImportFailed) as caught:
        imported(path, **options)
    assert not (path.parent / "run").exists()
    return str(caught.value).removeprefix(f"{path}: ")


def test_launches_share_the_time_of_their_node_to_the_nanosecond(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.hatchet", node("step", kernel("_Z4gemmi", 3, 100), kernel("relu", 1, 7)))
    summary = imported(path)
    assert (summary.kernels, summary.kernel_ns, summary.source) == (4, 107, "proton")
    query = (
        "SELECT name, name_mangled, start_ns, duration_ns, queued_ns, correlation_id"
        " FROM kernels JOIN kernel_classes USING (kernel_class_id) ORDER BY queued_ns"
    )
    assert rows(path, query) == [
        ("gemm(int)", "_Z4gemmi", None, 34, 0, 1),
        ("gemm(int)", "_Z4gemmi", None, 33, 34, 2),
        ("gemm(int)", "_Z4gemmi", None, 33, 67, 3),
        ("relu", "relu", None, 7, 100, 4),
    ]


def test_scopes_are_ranges_as_long_as_the_kernels_in_them(tmp_path: Path) -> None:
    path = profile(
        tmp_path / "p.hatchet",
        node("forward", kernel("a", 2, 60), node("layer", kernel("b", 1, 40), flops16=1e9, bytes=5e6, note=3)),
        node("backward", kernel("a", 1, 30)),
    )
    assert imported(path).read == {"kernels": 4, "scopes": 2, "scopes with flops or bytes": 1}
    query = "SELECT name, depth, parent_id, start_ns, end_ns, flops, bytes, attributes FROM ranges ORDER BY range_id"
    assert rows(path, query) == [
        ("forward", 0, None, 0, 100, None, None, None),
        ("layer", 1, 1, 60, 100, 1e9, 5e6, '{"flops16": 1000000000.0, "note": 3}'),
        ("backward", 0, None, 100, 130, None, None, None),
    ]
    joined = "kernels JOIN ranges AS r USING (range_id)"
    query = f"SELECT r.name, count(*) AS n, sum(duration_ns) AS ns FROM {joined} GROUP BY 1 ORDER BY 1"
    assert rows(path, query) == [("backward", 1, 30), ("forward", 2, 60), ("layer", 1, 40)]


@pytest.mark.parametrize(
    "given_to",
    ["kernel", "scope", "root"],
)
def test_flops_and_bytes_are_found_wherever_they_stand(tmp_path: Path, given_to: str) -> None:
    work = {"flops8": 1e9, "flops16": 2e9, "bytes": 64}
    leaf = kernel("k", 1, 10, **(work if given_to == "kernel" else {}))
    scope = node("s", leaf, **(work if given_to == "scope" else {}))
    path = tmp_path / "p.hatchet"
    path.write_text(json.dumps([node("ROOT", scope, **(work if given_to == "root" else {})), {}]))
    imported(path)
    name = {"kernel": "k", "scope": "s", "root": "ROOT"}[given_to]
    assert rows(path, "SELECT name, flops, bytes, end_ns - start_ns AS ns FROM ranges WHERE flops IS NOT NULL") == [
        (name, 3e9, 64.0, 10)
    ]


def test_the_schema_of_2023_reads_the_same(tmp_path: Path) -> None:
    old = {"Count": 2, "Time (ns)": 2048, "DeviceId": 0, "flops8": 1e9}
    leaf = {"DeviceId": "CUDA", "children": [], "frame": {"name": "foo"}, "metrics": old}
    root = {"children": [leaf], "frame": {"name": "ROOT"}, "metrics": {"Count": 0, "Time (ns)": 0, "flops32": 0}}
    path = tmp_path / "p.json"
    path.write_text(" " + json.dumps([root, {"CUDA": {"0": {"arch": 86, "bus_width": 128}}}]))
    summary = imported(path)
    assert (summary.kernels, summary.kernel_ns) == (2, 2048)
    assert rows(path, "SELECT name, flops FROM ranges") == [("foo", 1e9)]


@pytest.mark.parametrize(
    ("metric", "value", "ns"), [("time (us)", 1.5, 1500), ("time (s)", 2, 2 * 10**9), ("Time (ms)", 3, 3 * 10**6)]
)
def test_times_in_other_units(tmp_path: Path, metric: str, value: float, ns: int) -> None:
    path = profile(tmp_path / "p.hatchet", node("k", **{"count": 1, metric: value}))
    assert imported(path).kernel_ns == ns


def test_devices_come_from_the_profile_with_the_peaks_of_their_architecture(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.hatchet", kernel("k", 1, 10))
    imported(path)
    peaks = "sm_clock_max_hz, dram_peak_bytes_per_s, fp32_flops_per_sm_cycle"
    query = f"SELECT device_id, cc_major, cc_minor, sm_count, {peaks} FROM devices"
    assert rows(path, query) == [(0, 8, 0, 108, 1_410_000_000, 2 * 1_215_000_000 * 5120 / 8, 128.0)]


def test_a_gpu_of_another_maker_gets_no_peaks(tmp_path: Path) -> None:
    path = profile(
        tmp_path / "p.hatchet",
        node("k", count=1, time_ns=5, device_id="1", device_type="HIP"),
        devices={"HIP": {"1": {"arch": "gfx942", "num_sms": 304}}},
    )
    assert any(note.startswith("device 1:") for note in imported(path).notes)
    assert rows(path, "SELECT * FROM devices") == []


def test_only_the_device_that_was_asked_for(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.hatchet", kernel("a", 1, 10), kernel("a", 2, 30, device="1"))
    assert failure(path, device="7") == "has no kernels on device 7: it has some on 0, 1. Choose one with --device."
    summary = imported(path, device="1")
    assert (summary.kernels, summary.kernel_ns) == (2, 30)
    assert summary.refused == {"launches on another device than the one asked for": 1}


def test_odd_values_are_counted(tmp_path: Path) -> None:
    path = profile(
        tmp_path / "p.hatchet",
        kernel("negative", 2, -5),
        kernel("huge", 1, 10**400),
        kernel("no time", 1, None),
        node("no count", time_ns=9),
        node("", time_ns=3, count=1),
        {"frame": None, "children": "none", "metrics": [1]},
        *[5, None, "text"],  # type: ignore[list-item]
    )
    summary = imported(path)
    assert (summary.kernels, summary.kernel_ns) == (6, 12)
    assert summary.refused == {
        "kernels: total times that are negative or beyond 146 years": 2,
        "kernels without a time": 4,
        "kernels without a name": 1,
        "children that are no nodes": 3,
    }


def test_one_number_cannot_fill_the_disk(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.hatchet", kernel("a", 1001, 10))
    limits = Limits(launches=1000)
    assert failure(path, limits=limits).startswith("stands for more than 1,000 launches")


def test_more_launches_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proton, "CHUNK_ROWS", 10)
    path = profile(tmp_path / "p.hatchet", kernel("a", 25, 100), kernel("b", 3, 3))
    assert imported(path).kernel_ns == 103
    assert rows(path, "SELECT count(DISTINCT correlation_id) AS n, count(DISTINCT queued_ns) AS q FROM kernels") == [
        (28, 28)
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"frame": {"name": "ROOT"}, "children": [], "metrics": {}}, {}]', "has no kernel with a count and a time"),
        ('[{"frame": {"name": "ROOT"}, "children": [', "is not valid JSON at byte 42"),
        ('[{"frame": {"name": "k"}, "metrics": {"normalized_cycles": 5}, "children": []}]', "holds cycles measured"),
        ('[{"a": {"frame": 1, "metrics": 2}}]', "has no node with a frame"),
        ('[{"frame": 1, "children": ' + "[" * 100_000, "nests too deep"),
    ],
)
def test_profiles_without_kernels_say_why(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "p.hatchet"
    path.write_text(content)
    assert failure(path).startswith(reason)


def test_a_hundred_levels_are_refused_and_ninety_are_not(tmp_path: Path) -> None:
    def nested(levels: int) -> Node:
        inner = kernel("k", 1, 5)
        for level in range(levels):
            inner = node(f"level {level}", inner)
        return inner

    assert imported(profile(tmp_path / "p.hatchet", nested(90))).kernels == 1
    (tmp_path / "deep").mkdir()
    assert failure(profile(tmp_path / "deep" / "p.hatchet", nested(100))).startswith("nests deeper than 99 levels")


def everything(path: Path) -> list[list[tuple[Any, ...]]]:
    """What the run holds that does not depend on when it was imported."""
    tables = ("kernels", "kernel_classes", "ranges", "devices", "verdicts")
    return [rows(path, f"SELECT * FROM {table} ORDER BY ALL") for table in tables]


TREE = node(
    "ROOT",
    node("s", kernel("a", 2, 31), kernel("k" * 40, 300, 70_000_000_000, flops16=2.5e9), flops=5.0, bytes=2**40),
    kernel("b", 1, 3),
    **{"count": 0, "time (ns)": 0},
)


@pytest.mark.parametrize("name", ["p.hatchet_msgpack", "profile.bin"])
def test_messagepack_reads_the_same_as_json(tmp_path: Path, name: str) -> None:
    (tmp_path / "json").mkdir()
    told = (tmp_path / "json" / name).with_suffix(".hatchet")
    told.write_text(json.dumps([TREE, A100]))
    path = tmp_path / name
    # Proton writes the frame of a node first, then its metrics, then its children.
    path.write_bytes(msgspec.msgpack.encode([proton_order(TREE), A100]))
    assert imported(path).kernel_ns == imported(told).kernel_ns == 31 + 70_000_000_000 + 3
    assert everything(path) == everything(told)
    assert rows(path, "SELECT flops, bytes FROM ranges WHERE name = 's'") == [(5.0, float(2**40))]


def proton_order(tree: Node) -> Node:
    children = [proton_order(child) for child in tree["children"]]
    return {"frame": tree["frame"], "metrics": tree["metrics"], "children": children}


def test_a_messagepack_suffix_on_json_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.hatchet_msgpack"
    path.write_text(json.dumps([TREE, A100]))
    assert imported(path).kernels == 303


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (msgspec.msgpack.encode([TREE, A100])[:-9], "is not valid MessagePack: Input data was truncated"),
        (b"\x92\x83\xa5frame\xa2\xff\xff", "is not valid MessagePack: "),  # words of msgspec, which differ
        (b"\xdd\xff\xff\xff\xff" * 20, "is not valid MessagePack: Input data was truncated"),
        (b"\x91" * 100_000, "nests too deep"),
        (b"\x81\xa5frame\x01", "is no list of nodes"),
    ],
)
def test_damaged_messagepack_is_refused_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "p.hatchet_msgpack"
    path.write_bytes(content)
    assert failure(path).startswith(reason)


def test_keys_and_values_that_json_cannot_hold(tmp_path: Path) -> None:
    metrics = {5: 1, None: 2, "count": 1, "time (ns)": 9, "flops": float("nan"), "x": float("inf"), "y": b"z", "w": 4}
    path = tmp_path / "p.hatchet_msgpack"
    leaf = {"frame": {"name": "k"}, "metrics": {"count": 1, "time (ns)": 1}, "children": []}
    path.write_bytes(msgspec.msgpack.encode([{"frame": {"name": "R"}, "metrics": {}, "children": [
        {"frame": {"name": "s"}, "metrics": metrics, "children": [leaf]}]}, {1: {2: 3}}]))  # fmt: skip
    summary = imported(path)
    assert (summary.kernels, summary.kernel_ns) == (2, 10)
    assert summary.refused == {"flops or bytes that are no finite number": 1}
    assert rows(path, "SELECT name, flops, attributes FROM ranges") == [("s", None, '{"w": 4}')]


def test_values_of_tensors_are_lists(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.hatchet", node("s", kernel("k", 1, 5), loss=[1.5, 2], flops=[1.0, 2.0]))
    assert imported(path).refused == {"flops or bytes that are no finite number": 1}
    assert rows(path, "SELECT flops, attributes FROM ranges") == [(None, '{"loss": [1.5, 2.0]}')]


def test_a_profile_too_large_for_memory_is_refused_unread(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.hatchet", kernel("k", 1, 5))
    assert failure(path, limits=Limits(text_bytes=100)).startswith("is larger than 100 bytes. Write it in phases")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_and_cut_profiles_end_in_one_line_or_a_run(tmp_path: Path, data: st.DataObject) -> None:
    tree = [node("ROOT", node("s", kernel("a", 2, 31), flops=5.0), kernel("b", 1, 3)), A100]
    content = bytearray(data.draw(st.sampled_from([json.dumps(tree).encode(), msgspec.msgpack.encode(tree)])))
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(1, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / data.draw(st.sampled_from(["p.hatchet", "p.hatchet_msgpack"]))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        summary = imported(path, kind="proton", limits=Limits(launches=100_000))
    except ImportFailed:
        return
    files = (tmp_path / "run" / "kernels").rglob("*.parquet")
    assert sum(pq.ParquetFile(file).metadata.num_rows for file in files) == summary.kernels


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([1]))
METRICS = st.dictionaries(
    st.sampled_from(
        ["count", "Count", "time (ns)", "time (s)", "device_id", "DeviceId", "flops", "flops64", "bytes", "x"]
    ),
    SCALARS,
)
NODES = st.recursive(
    st.one_of(SCALARS, st.fixed_dictionaries({"frame": SCALARS, "metrics": st.one_of(METRICS, SCALARS)})),
    lambda inner: st.fixed_dictionaries(
        {
            "frame": st.fixed_dictionaries({"name": SCALARS}),
            "metrics": METRICS,
            "children": st.one_of(st.lists(inner, max_size=4), SCALARS),
        }
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NODES, st.one_of(SCALARS, st.dictionaries(st.sampled_from(["CUDA", "HIP"]), SCALARS)))
def test_any_tree_is_read_or_refused(tmp_path: Path, tree: Any, devices: Any) -> None:
    path = tmp_path / "p.hatchet"
    path.write_text(json.dumps([{"frame": {"name": "ROOT"}, "children": [tree, kernel("k", 1, 5)]}, devices]))
    try:
        assert imported(path, kind="proton", limits=Limits(launches=10_000)).kernels >= 1
    except ImportFailed as error:
        reason = error.reason
        assert reason.startswith("stands for more than")


def times(tree: Node) -> list[tuple[str, int, int]]:
    """(name, count, ns) of each kernel, read straight from the JSON."""
    metrics = {key.lower(): value for key, value in tree["metrics"].items()}
    found = [(tree["frame"]["name"], metrics["count"], metrics["time (ns)"])] if metrics.get("count") else []
    return found + [row for child in tree["children"] for row in times(child)]


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="NANALYZE_REAL_TRACES names no folder of traces")
def test_real_profiles_equal_an_independent_reading(tmp_path: Path) -> None:
    checked = 0
    for path in sorted(REAL_TRACES.iterdir()):
        wanted = times(json.loads(path.read_text())[0])
        if not wanted:
            with pytest.raises(ImportFailed, match="has no kernel"):
                registry.import_files([path], tmp_path / path.stem)
            continue
        summary = registry.import_files([path], tmp_path / path.stem)
        assert (summary.kernels, summary.kernel_ns) == (sum(n for _, n, _ in wanted), sum(ns for _, _, ns in wanted))
        with na.open(tmp_path / path.stem) as run:
            found = run.sql(
                "SELECT name_mangled, sum(duration_ns) AS ns FROM kernels"
                " JOIN kernel_classes USING (kernel_class_id) GROUP BY 1 ORDER BY 1"
            )
        total: dict[str, int] = {}
        for name, _, ns in wanted:
            total[name] = total.get(name, 0) + ns
        assert found.to_numpy().tolist() == [list(item) for item in sorted(total.items())]
        checked += 1
    assert checked
