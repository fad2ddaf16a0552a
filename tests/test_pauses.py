"""Pauses: which ranges are steps, when the recorder pauses, and that everything is off, then on again."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_records
import numpy as np
import pytest
from fake_gpu import FakeGpu, final_process, read_table

from nanalyze import analysis, recorder
from nanalyze.recorder import account, identity, pauses, session, settings
from nanalyze.recorder.cupti import CuptiError
from nanalyze.recorder.pauses import Pauses, Steps
from nanalyze.rundir.errors import RecorderError

S = 10**9
MS = 10**6
KINDS = {fake_records.KERNEL, fake_records.MEMCPY, fake_records.MEMSET}


def rows(name: str, length_ns: int | None, count: int, depth: int = 0) -> list[dict[str, Any]]:
    end = None if length_ns is None else length_ns
    return [{"name": name, "depth": depth, "start_ns": 0, "end_ns": end}] * count


# --- steps -----------------------------------------------------------------------------------------


def test_the_range_that_repeats_and_covers_most_time_is_the_step() -> None:
    steps = Steps()
    steps.learn(rows("epoch", 100 * S, 5))  # too long for a pause
    steps.learn(rows("once", 2 * S, 2))  # repeats too seldom
    steps.learn(rows("open", None, 50))
    steps.learn(rows("loss", 1 * MS, 50, depth=1))
    assert steps.length_s == pytest.approx(0.001)
    steps.learn(rows("step", 30 * MS, 50))
    assert steps.length_s == pytest.approx(0.03)


def test_levels_of_one_name_are_apart() -> None:
    steps = Steps()
    steps.learn(rows("block", 40 * MS, 2, depth=0) + rows("block", 10 * MS, 4, depth=1))
    assert steps.length_s == pytest.approx(0.01)


def test_a_step_that_grows_longer_is_followed() -> None:
    steps = Steps()
    steps.learn(rows("step", 10 * MS, 5000))
    steps.learn(rows("step", 20 * MS, 4000))
    assert steps.length_s == pytest.approx(0.02, rel=0.05)


# --- the schedule, on a fake clock -----------------------------------------------------------------


class World:
    """A clock that only waiting moves, and layers that note when they were switched."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.is_stopped = False
        self.said: list[tuple[str, float]] = []
        self.refused: set[str] = set()
        self.devices_seen = {0}
        self.is_aside = False
        self.listener: Any = None
        patch.setattr(pauses, "time", SimpleNamespace(monotonic=lambda: self.now, time_ns=lambda: int(self.now * S)))

    def note(self, what: str) -> None:
        self.said.append((what, self.now))
        if what in self.refused:
            raise CuptiError(what, 9)

    def pause(self) -> None:
        self.note("pause")
        self.now += 0.001

    def resume(self) -> None:
        self.note("resume")

    def hold(self, patience_s: float) -> None:
        self.note("hold")
        self.now += 0.05

    def release(self) -> None:
        self.note("release")

    # -- in place of threading.Event

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.is_stopped

    def is_set(self) -> bool:
        return self.is_stopped


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def made(world: World, pct: float = 1.0, seed: int = 0) -> Pauses:
    return Pauses(pct, world, world, seed=seed)  # type: ignore[arg-type]


def test_a_job_that_names_each_step_anew_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "MOST_NAMES", 8)
    steps = Steps()
    for number in range(1000):
        steps.learn(rows("part", 500 * MS, 1) if number % 100 == 0 else rows(f"step {number}", 10 * MS, 1))
    assert len(steps._names) <= 9
    assert steps.length_s == pytest.approx(0.5)


def test_a_job_without_steps_is_never_paused(world: World) -> None:
    own = made(world)
    assert own.next_at == float("inf")
    own.learn(rows("epoch", 100 * S, 10) + rows("step", 30 * MS, 2))
    assert own.next_at == float("inf")
    own.learn(rows("step", 30 * MS, 1))
    assert world.now < own.next_at < world.now + 60


@pytest.mark.parametrize("pct", [0.5, 1, 5, 20])
@pytest.mark.parametrize("step_ms", [1, 30, 2000])
def test_the_pauses_take_the_share_that_was_asked_for(world: World, pct: float, step_ms: int) -> None:
    own = made(world, pct)
    own.learn(rows("step", step_ms * MS, 20))
    first, off = world.now, 0.0
    for _ in range(300):
        world.now = max(world.now, own.next_at)
        started = world.now
        own.take(world)  # type: ignore[arg-type]
        off += world.now - started
        own.rows()
    assert 100 * off / (world.now - first) == pytest.approx(pct, rel=0.15)


@pytest.mark.parametrize(("step_ms", "shortest", "longest"), [(1, 0.075, 0.125), (30, 0.22, 0.38), (2400, 7.5, 12.5)])
def test_a_pause_holds_several_steps_and_is_bounded(
    world: World, step_ms: int, shortest: float, longest: float
) -> None:
    own = made(world, 10)
    own.learn(rows("step", step_ms * MS, 20))
    for _ in range(50):
        own.take(world)  # type: ignore[arg-type]
    got = [(row["end_ns"] - row["off_ns"]) / S for row in own.rows(last=True)]
    assert shortest <= min(got) < max(got) <= longest
    assert max(got) / min(got) > 1.3  # no fixed rhythm


def test_moments_are_random(world: World) -> None:
    own = made(world, 10)
    own.learn(rows("step", 30 * MS, 20))
    rests = []
    for _ in range(50):
        own.take(world)  # type: ignore[arg-type]
        rests.append(own.next_at - world.now)
    assert max(rests) / min(rests) > 2


def test_all_layers_are_off_in_the_pause_and_on_after_it(world: World) -> None:
    own = made(world)
    own.learn(rows("step", 30 * MS, 20))
    own.take(world)  # type: ignore[arg-type]
    assert [what for what, _ in world.said] == ["hold", "pause", "resume", "release"]
    (row,) = own.rows(last=True)
    assert row["start_ns"] == 1000 * S
    assert row["off_ns"] == pytest.approx(1000 * S + 51 * MS, abs=1000)
    assert row["end_ns"] == pytest.approx(int(world.said[2][1] * S), abs=1000)
    assert row["complete_ns"] is None


@pytest.mark.parametrize("refused", ["pause", "resume", "hold"])
def test_what_fails_leaves_the_rest_on(world: World, refused: str) -> None:
    own = made(world)
    world.refused = {refused}
    with pytest.raises(CuptiError):
        own.take(world)  # type: ignore[arg-type]
    assert [what for what, _ in world.said][-2:] == ["resume", "release"]
    assert len(own.rows(last=True)) == (1 if refused == "resume" else 0)


def test_the_end_of_the_recording_ends_a_pause_and_leaves_it_off(world: World) -> None:
    own = made(world)
    world.is_stopped = True
    own.take(world)  # type: ignore[arg-type]
    assert [what for what, _ in world.said] == ["hold", "pause", "release"]
    assert len(own.rows(last=True)) == 1


def test_there_is_no_pause_while_another_client_has_cupti(world: World) -> None:
    own = made(world)
    own.learn(rows("step", 30 * MS, 20))
    world.is_aside = True
    own.take(world)  # type: ignore[arg-type]
    assert (world.said, own.rows(last=True)) == ([], [])
    assert world.now < own.next_at < world.now + 60


def kernels(*launches: tuple[int, int | None, int]) -> dict[str, Any]:
    """Columns of kernels from (start, queued, device)."""
    start, queued, device = zip(*launches, strict=True)
    return {
        "start_ns": np.ma.array(start, dtype=np.int64),
        "queued_ns": np.ma.array([q or 0 for q in queued], dtype=np.int64, mask=[q is None for q in queued]),
        "device_id": np.array(device, dtype=np.int32),
    }


def test_a_pause_is_complete_when_each_device_has_begun_a_later_launch(world: World) -> None:
    own = made(world)
    world.devices_seen = {0, 1}
    own.take(world)  # type: ignore[arg-type]
    resumed = int(world.now * S)
    world.listener(kernels((resumed + 5, resumed - 1, 0), (resumed - 1, resumed - 2, 1)))
    assert own.rows() == []  # both were launched before
    world.listener(kernels((resumed + 90, resumed + 2, 0), (resumed + 70, resumed + 3, 0)))
    assert own.rows() == []
    world.listener(kernels((resumed + 40, None, 1), (resumed + 95, resumed + 4, 0)))
    (row,) = own.rows()
    assert row["complete_ns"] == resumed + 70
    assert own.rows(last=True) == []


def test_a_device_that_stays_idle_is_not_waited_for_for_ever(world: World) -> None:
    own = made(world)
    world.devices_seen = {0, 1}
    own.take(world)  # type: ignore[arg-type]
    resumed = int(world.now * S)
    world.listener(kernels((resumed + 7, resumed + 2, 0)))
    assert own.rows() == []
    world.now += pauses.COMPLETE_PATIENCE_S + 0.1
    assert [row["complete_ns"] for row in own.rows()] == [resumed + 7]


def test_a_pause_before_the_first_records_waits_for_them(world: World) -> None:
    own = made(world)
    world.devices_seen = set()  # CUPTI hands its buffers over once a second
    own.take(world)  # type: ignore[arg-type]
    resumed = int(world.now * S)
    assert own.rows() == []
    world.devices_seen = {0}
    world.listener(kernels((resumed + 7, resumed + 2, 0)))
    assert [row["complete_ns"] for row in own.rows()] == [resumed + 7]


def test_pauses_that_follow_each_other_quickly_are_told_apart(world: World) -> None:
    own = made(world)
    own.take(world)  # type: ignore[arg-type]
    first = int(world.now * S)
    world.now += 1
    own.take(world)  # type: ignore[arg-type]
    second = int(world.now * S)
    world.listener(kernels((first + 10, first + 1, 0), (second + 20, second + 1, 0)))
    assert [row["complete_ns"] for row in own.rows()] == [first + 10, second + 20]


# --- whole recordings ------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    for name in (*identity._RANK, *identity._LOCAL_RANK, *identity._WORLD_SIZE, *identity._JOB):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "TICK_S", 0.05)
    before = set(threading.enumerate())
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    yield gpu
    recorder.stop()
    gpu.close()
    assert {thread.name for thread in threading.enumerate() if thread not in before} <= {"fake-cupti"}


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def train(gpu: FakeGpu, seconds: float) -> list[tuple[int, int]]:
    """Steps of a few ms; (correlation id, time of the launch) of each step's kernel."""
    launched = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with recorder.annotate("step"):
            launched.append((gpu.launch("gemm"), time.time_ns()))
            time.sleep(0.004)
    return launched


def test_launches_in_a_pause_are_missing_and_all_others_are_there(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.1, pause_pct=40, samples=recorder.Samples(window_s=0.02, overhead_pct=100)):
        launched = train(gpu, 2.5)
    assert capsys.readouterr().err == ""
    spans = [(row["start_ns"], row["off_ns"], row["end_ns"]) for row in read_table(run_dir, "pauses")]
    assert len(spans) >= 3
    assert all(start <= off < end for start, off, end in spans)
    assert all(before[2] <= after[0] for before, after in itertools.pairwise(spans))
    got = {row["correlation_id"] for row in read_table(run_dir, "kernels")}
    inside = {c for c, at in launched if any(off < at - MS and at < end for _, off, end in spans)}
    outside = {c for c, at in launched if not any(start - 3 * MS < at < end + 20 * MS for start, _, end in spans)}
    assert len(inside) > 20
    assert inside & got == set()
    assert outside <= got
    steps = read_table(run_dir, "ranges")
    assert len(steps) == len(launched)  # ranges go on
    samples = read_table(run_dir, "samples")
    assert len(samples) > 100
    assert not any(off < row["start_ns"] and row["end_ns"] < end for row in samples for _, off, end in spans)
    assert gpu.cupti.calls["cuptiActivityEnableLatencyTimestamps"] <= 1  # never switched with the pauses
    with analysis.open(run_dir) as run:
        (cost,) = run.overhead().to_dict("records")
        assert (cost["range_name"], cost["pauses"]) == ("step", len(spans))
        assert len(run.damage()) == 0
    assert final_process(run_dir)["records_lost"] == 0


def test_pauses_are_written_while_the_job_runs(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.1, pause_pct=40):
        deadline = time.monotonic() + 10
        while not read_table(run_dir, "pauses"):
            train(gpu, 0.1)
            assert time.monotonic() < deadline
        (row, *_) = read_table(run_dir, "pauses")
    assert row["end_ns"] < row["complete_ns"] < row["end_ns"] + S


@pytest.mark.parametrize(
    "settings",
    [
        {"pause_pct": 0},
        {"pause_pct": 40, "exact": recorder.Exact(kernels="nothing")},
        {"pause_pct": 40, "layers": ("timeline",)},
        {"pause_pct": 40, "layers": ("ranges",)},
    ],
)
def test_no_pause_where_it_would_tell_nothing(gpu: FakeGpu, tmp_path: Path, settings: dict[str, Any]) -> None:
    with recorder.record(tmp_path / "run", flush_s=0.05, **settings) as rec:
        train(gpu, 0.4)
        assert rec._pauses is None
    assert not (tmp_path / "run" / "pauses").exists()


def test_stop_in_the_middle_of_a_pause_is_quick_and_writes_it(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "SHORTEST_S", 30.0)
    monkeypatch.setattr(pauses, "LONGEST_S", 60.0)
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.05, pause_pct=50) as rec:
        train(gpu, 0.2)
        until(lambda: rec._pauses is not None and rec._pauses.next_at < float("inf"))
        rec._pauses.next_at = 0.0
        rec._wake.set()
        until(lambda: KINDS.isdisjoint(gpu.cupti.enabled))
        before = time.monotonic()
    assert time.monotonic() - before < 5
    (row,) = read_table(run_dir, "pauses")
    assert row["complete_ns"] is None
    assert final_process(run_dir)["ending"] == "stop"


def test_a_pause_that_fails_is_said_once_and_the_job_goes_on(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, flush_s=0.05, pause_pct=40) as rec:
        gpu.cupti.fail("cuptiActivityDisable", 9)
        launched = train(gpu, 0.3)
        while rec._pauses is not None and not rec._pauses._is_over:
            launched += train(gpu, 0.1)
        gpu.cupti.heal()
        launched += train(gpu, 0.5)
        assert rec._pauses is not None
        assert rec._pauses.next_at == float("inf")
    (line,) = capsys.readouterr().err.splitlines()
    assert "a pause failed, so launches may be missing from here on: cuptiActivityDisable failed" in line
    assert len(read_table(run_dir, "kernels")) == len(launched)
    assert not (run_dir / "pauses").exists()


# --- the budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overhead_pct", "cores", "budget"),
    [(1.0, 1, 1.0), (1.0, 3, 3.0), (1.0, 128, 5.0), (0.01, 128, 1.28), (8.0, 1, 8.0), (8.0, 64, 8.0)],
)
def test_the_budget_is_of_all_cores_but_at_most_5_percent_of_one(
    monkeypatch: pytest.MonkeyPatch, overhead_pct: float, cores: int, budget: float
) -> None:
    monkeypatch.setattr(settings, "usable_cores", lambda: cores)
    assert settings.Settings(overhead_pct=overhead_pct).cpu_budget_pct == pytest.approx(budget)


@pytest.mark.parametrize(("used_s", "left"), [(0.0, 1.8), (0.5, 1.3), (1.9, 0.45), (5.0, 0.45)])
def test_sampling_gets_what_the_timeline_leaves_but_never_nothing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_s: float, left: float
) -> None:
    monkeypatch.setattr(settings, "usable_cores", lambda: 1)
    with recorder.record(tmp_path / "run", overhead_pct=2) as rec:
        monkeypatch.setattr(session.time, "time_ns", lambda: rec._started_ns + 100 * S)
        rec._cpu_ns = int(used_s * S)
        assert rec._left_for_samples_pct() == pytest.approx(left, abs=0.02)


def test_a_budget_that_was_not_kept_is_noted(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "BUDGET_NOTED_AFTER_S", 0.0)
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, overhead_pct=0.001):
        gpu.launch()
    (note,) = [row for row in read_table(run_dir, "events") if row["kind"] == "note"]
    assert (note["layer"], "that overhead_pct=0.001 allows" in note["message"]) == ("recorder", True)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"overhead_pct": 0}, "overhead_pct=0: must be above 0 and at most 100"),
        ({"overhead_pct": True}, "overhead_pct=True: must be above 0"),
        ({"overhead_pct": float("nan")}, "overhead_pct=nan: must be above 0"),
        ({"pause_pct": -1}, "pause_pct=-1: must be from 0 (never) to 50"),
        ({"pause_pct": 51}, "pause_pct=51: must be from 0"),
        ({"pause_pct": "1"}, "pause_pct='1': must be from 0"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(RecorderError) as caught:
        recorder.record(tmp_path / "run", **settings)
    assert text in str(caught.value)
