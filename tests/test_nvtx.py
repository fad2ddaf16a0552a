"""NVTX ranges: from CUPTI's marker records to rows, and the variable that makes NVTX call CUPTI."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_records
import numpy as np
import pytest
from fake_gpu import CUPTI_PATH, FakeGpu, read_table
from fake_structs import CuptiCode

import nanalyze.analysis as na
from nanalyze import recorder
from nanalyze.recorder import activity, nvtx
from nanalyze.recorder.nvtx import INJECTION, OURS, NvtxRanges

MARK, START, END = 1, 2, 4
PROCESS, THREAD = 1, 2


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (INJECTION, OURS, nvtx.CUPTI):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the test does
        monkeypatch.delenv(name)
    yield
    recorder.stop()


class Markers:
    """Marker records in order, decoded and taken in."""

    def __init__(self) -> None:
        self.names = fake_records.Names()
        self.ranges = NvtxRanges(itertools.count(1))
        self._records: list[bytes] = []

    def add(self, flags: int, marker: int, time_ns: int, name: bytes | None = None, **fields: Any) -> Markers:
        about = {"objectKind": THREAD, "threadId": 7, "name": 0 if name is None else self.names.pointer(name)}
        about |= {"flags": flags, "id": marker, "timestamp": time_ns, **fields}
        self._records.append(fake_records.record(fake_records.MARKER, 130001, **about))
        return self

    def rows(self, *, also_open: bool = False) -> list[dict[str, Any]]:
        data = np.frombuffer(b"".join(self._records), dtype=np.uint64).view(np.uint8)
        self._records = []
        decoder = activity.Decoder(activity.record_sizes(130001))
        for records in decoder.decode(data).records.values():
            self.ranges.take_records(records)
        assert decoder.lost_bytes == 0
        return self.ranges.take(also_open=also_open)


def shape(rows: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """By name: times, the parent's name, depth."""
    names = {row["range_id"]: row["name"] for row in rows}
    assert len(names) == len(rows)
    return {row["name"]: (row["start_ns"], row["end_ns"], names.get(row["parent_id"]), row["depth"]) for row in rows}


# --- pairing -------------------------------------------------------------------------------------


def test_a_start_and_an_end_are_a_range() -> None:
    domain = fake_records.Names()
    markers = Markers().add(START, 5, 100, b"step", domain=domain.pointer(b"NCCL")).add(END, 5, 250)
    assert markers.rows() == [
        {
            "range_id": 1,
            "parent_id": None,
            "depth": 0,
            "name": "step",
            "source": "nvtx",
            "thread_id": 7,
            "start_ns": 100,
            "end_ns": 250,
            "flops": None,
            "bytes": None,
            "attributes": '{"domain": "NCCL"}',
        }
    ]
    assert (markers.rows(also_open=True), markers.ranges.odd) == ([], 0)


def test_ranges_nest_by_thread() -> None:
    markers = Markers()
    markers.add(START, 1, 10, b"outer").add(START, 2, 20, b"other thread", threadId=8)
    markers.add(START, 3, 30, b"inner").add(END, 3, 40).add(START, 4, 50, b"second").add(END, 4, 60)
    markers.add(END, 1, 70).add(END, 2, 80).add(START, 5, 90, b"next").add(END, 5, 95)
    assert shape(markers.rows()) == {
        "outer": (10, 70, None, 0),
        "other thread": (20, 80, None, 0),
        "inner": (30, 40, "outer", 1),
        "second": (50, 60, "outer", 1),
        "next": (90, 95, None, 0),
    }


def test_domains_may_overlap_in_a_thread() -> None:
    """Each has a stack of its own, so the inner one may outlive the one around it."""
    markers = Markers().add(START, 1, 10, b"a").add(START, 2, 20, b"b").add(START, 3, 30, b"c")
    markers.add(END, 2, 40).add(END, 3, 50).add(START, 4, 60, b"d").add(END, 4, 70).add(END, 1, 80)
    found = shape(markers.rows())
    assert {name: row[2:] for name, row in found.items()} == {
        "a": (None, 0),
        "b": ("a", 1),
        "c": ("b", 2),
        "d": ("a", 1),
    }


def test_ranges_that_may_change_threads_do_not_nest() -> None:
    markers = Markers().add(START, 1, 10, b"push")
    markers.add(START, 2, 20, b"start", objectKind=PROCESS).add(START, 3, 30, b"inner")
    markers.add(END, 3, 40).add(END, 1, 50).add(END, 2, 60, objectKind=PROCESS, threadId=99)
    assert shape(markers.rows()) == {
        "inner": (30, 40, "push", 1),
        "push": (10, 50, None, 0),
        "start": (20, 60, None, 0),
    }


def test_an_end_may_come_in_a_buffer_before_its_start() -> None:
    markers = Markers().add(END, 9, 500, objectKind=PROCESS)
    assert markers.rows() == []
    assert shape(markers.add(START, 9, 400, b"across", objectKind=PROCESS).rows()) == {"across": (400, 500, None, 0)}
    assert markers.ranges.odd == 0


def test_what_was_opened_before_the_recording_is_no_range_and_is_counted() -> None:
    markers = Markers().add(END, 9, 500).add(MARK, 3, 510, b"a mark")
    assert markers.rows(also_open=True) == []
    assert markers.ranges.odd == 1


def test_what_is_never_closed_has_no_end() -> None:
    markers = Markers().add(START, 1, 10, b"open").add(START, 2, 20, b"closed").add(END, 2, 30)
    assert list(shape(markers.rows())) == ["closed"]
    assert shape(markers.rows(also_open=True)) == {"open": (10, None, None, 0)}
    assert markers.rows(also_open=True) == []


def test_records_without_a_time() -> None:
    markers = Markers().add(START, 1, 0, b"lost").add(START, 2, 20, b"no end").add(END, 2, 0)
    assert shape(markers.rows()) == {"no end": (20, None, None, 0)}
    assert markers.ranges.odd == 1


def test_a_job_that_only_pushes_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "MOST_OPEN", 3)
    markers = Markers()
    for number in range(10):
        markers.add(START, number + 1, 10 + number, b"%d" % number)
    assert [(row["name"], row["end_ns"]) for row in markers.rows()] == [(str(number), None) for number in range(7)]
    opened, depth = markers.ranges._innermost[7], 0
    while opened is not None:  # the chain of parents is cut where they are written
        opened, depth = opened.parent, depth + 1
    assert depth <= 4
    for number in reversed(range(10)):
        markers.add(END, number + 1, 100 + number)
    assert [row["name"] for row in markers.rows()] == ["9", "8", "7"]
    assert markers.ranges._innermost == {}


def test_ends_that_never_find_a_start_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "MOST_EARLY_ENDS", 3)
    markers = Markers()
    for number in range(10):
        markers.add(END, number + 1, 10)
    markers.rows()
    assert (len(markers.ranges._early_ends), markers.ranges.odd) == (3, 7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"x" * 10_000, "x" * 10_000),
        (b"\xff\xfe bad", "\\xff\\xfe bad"),
        ("Schritt \u2603".encode(), "Schritt \u2603"),
        (b"a\n'; DROP TABLE ranges; --\x1b[31m", "a\n'; DROP TABLE ranges; --\x1b[31m"),
        (b"y" * 200_000, "y" * nvtx.NAME_BYTES),
        (b"", ""),
        (None, ""),
    ],
)
def test_names_are_the_jobs_and_may_be_anything(name: bytes | None, text: str) -> None:
    (row,) = Markers().add(START, 1, 10, name).add(END, 1, 20).rows()
    assert row["name"] == text


def test_threads_without_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "MOST_THREADS", 3)
    markers = Markers()
    markers.ranges._threads = {number: number for number in range(10, 14)}
    markers.add(START, 1, 10, b"a", threadId=12).add(END, 1, 20)
    (row,) = markers.rows()
    assert row["thread_id"] == 12  # as CUPTI names it
    assert len(markers.ranges._threads) == threading.active_count()


def test_threads_get_their_native_ids() -> None:
    seen: list[int] = []
    done = threading.Event()
    worker = threading.Thread(target=lambda: (seen.append(threading.get_native_id()), done.wait(10)))
    worker.start()
    while not seen:
        time.sleep(0.001)
    markers = Markers()
    for number, ident in enumerate((threading.get_ident(), worker.ident or 0, 0xABCDEF)):
        markers.add(START, number + 1, 10, b"r", threadId=ident & 0xFFFFFFFF).add(END, number + 1, 20)
    rows = markers.rows()
    done.set()
    worker.join()
    assert [row["thread_id"] for row in rows] == [threading.get_native_id(), seen[0], 0xABCDEF]


# --- in a recording ------------------------------------------------------------------------------


def test_kernels_belong_to_the_range_they_were_launched_in(gpu: FakeGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        assert fake_records.MARKER in gpu.cupti.enabled
        gpu.launch("before")
        outer = gpu.open_range(b"outer")
        with recorder.annotate("python"):
            gpu.launch("a")
            inner = gpu.open_range(b"inner", domain=b"model")
            gpu.launch("b")
            gpu.close_range(inner)
        gpu.launch("c")
        gpu.close_range(outer)
        left = gpu.open_range(b"left open")
        assert left
        gpu.launch("d")
    assert gpu.cupti.enabled == set()
    with na.open(tmp_path / "run") as run:
        rows = run.arrow(
            "SELECT c.name, r.name AS range, r.source FROM kernels k JOIN kernel_classes c USING (kernel_class_id) "
            "LEFT JOIN ranges r ON r.range_id = k.range_id ORDER BY k.correlation_id"
        ).to_pylist()
    assert [list(row.values()) for row in rows] == [
        ["before", None, None],
        ["a", "python", "annotate"],
        ["b", "inner", "nvtx"],
        ["c", "outer", "nvtx"],
        ["d", "left open", "nvtx"],
    ]
    ranges = {row["name"]: row for row in read_table(tmp_path / "run", "ranges")}
    assert len({row["range_id"] for row in ranges.values()}) == 4
    assert ranges["inner"]["parent_id"] == ranges["outer"]["range_id"]
    assert ranges["inner"]["attributes"] == '{"domain": "model"}'
    assert ranges["left open"]["end_ns"] is None
    assert {row["thread_id"] for row in ranges.values()} == {threading.get_native_id()}


@pytest.mark.parametrize("settings", [{"nvtx": False}, {"layers": ("timeline",)}, {"layers": ("ranges",)}])
def test_without_nvtx_nothing_is_asked_for(gpu: FakeGpu, tmp_path: Path, settings: dict[str, Any]) -> None:
    with recorder.record(tmp_path / "run", **settings):
        assert fake_records.MARKER not in gpu.cupti.enabled
        assert INJECTION not in os.environ


def test_markers_that_cupti_refuses_leave_the_rest_alone(gpu: FakeGpu, tmp_path: Path, capsys: Any) -> None:
    original = gpu.cupti._cuptiActivityEnable

    def enable(kind: int) -> None:
        if kind == fake_records.MARKER:
            raise CuptiCode(27)
        original(kind)

    gpu.cupti._cuptiActivityEnable = enable  # type: ignore[method-assign]
    gpu.cupti._export("cuptiActivityEnable")
    with recorder.record(tmp_path / "run"):
        gpu.launch("k")
        with recorder.annotate("mine"):
            pass
    assert "NVTX ranges are not recorded: cuptiActivityEnable failed" in capsys.readouterr().err
    assert len(read_table(tmp_path / "run", "kernels")) == 1
    assert [row["name"] for row in read_table(tmp_path / "run", "ranges")] == ["mine"]


# --- the variable --------------------------------------------------------------------------------


def test_a_recording_points_nvtx_to_its_cupti_and_takes_that_back(gpu: FakeGpu, tmp_path: Path) -> None:
    with recorder.record(tmp_path / "run"):
        assert os.environ[INJECTION] == os.environ[OURS] == (nvtx._our_library() or CUPTI_PATH)
        assert os.environ[nvtx.CUPTI] == CUPTI_PATH  # to which our library hands the calls on
    assert not {INJECTION, OURS, nvtx.CUPTI} & set(os.environ)


def test_without_a_compiled_library_nvtx_calls_cupti_itself(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvtx, "_our_library", lambda: None)
    with recorder.record(tmp_path / "run"):
        assert os.environ[INJECTION] == os.environ[OURS] == CUPTI_PATH


def test_the_jobs_own_choice_stays_and_is_said(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(INJECTION, "/opt/nsys/libToolsInjection64.so")
    with recorder.record(tmp_path / "run"):
        assert fake_records.MARKER not in gpu.cupti.enabled
        assert os.environ[INJECTION] == "/opt/nsys/libToolsInjection64.so"
        assert OURS not in os.environ
    assert os.environ[INJECTION] == "/opt/nsys/libToolsInjection64.so"
    text = "NVTX ranges are not recorded: NVTX_INJECTION64_PATH is already set, to /opt/nsys/libToolsInjection64.so"
    assert text in capsys.readouterr().err
    assert [text in row["message"] for row in read_table(tmp_path / "run", "events")] == [True]


def test_the_job_may_have_chosen_the_same_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libcupti.so.13"
    library.touch()
    (tmp_path / "link.so").symlink_to(library)
    monkeypatch.setenv(INJECTION, str(tmp_path / "link.so"))
    assert nvtx.inject(str(library)) is None
    assert os.environ[INJECTION] == str(tmp_path / "link.so")
    nvtx.withdraw()
    assert os.environ[INJECTION] == str(tmp_path / "link.so")


def test_a_later_recording_may_use_another_library() -> None:
    assert nvtx.inject("/a/libcupti.so.13") is None
    assert nvtx.inject("/b/libcupti.so.13") is None
    assert os.environ[INJECTION] == os.environ[OURS] == (nvtx._our_library() or "/b/libcupti.so.13")
    assert os.environ[nvtx.CUPTI] == "/b/libcupti.so.13"


def test_markers_are_off_in_a_forked_child(gpu: FakeGpu, tmp_path: Path) -> None:
    """It would inherit CUPTI's locks as they stood, and an NVTX call in it could wait for ever."""
    with recorder.record(tmp_path / "run"):
        child = os.fork()
        if child == 0:
            os._exit(int(fake_records.MARKER in gpu.cupti.enabled))
        assert os.waitpid(child, 0)[1] == 0
        assert fake_records.MARKER in gpu.cupti.enabled
    before = gpu.cupti.calls["cuptiActivityEnable"]
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert gpu.cupti.calls["cuptiActivityEnable"] == before
    assert gpu.cupti.enabled == set()
