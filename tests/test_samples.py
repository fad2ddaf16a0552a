"""The samples layer: groups that fit, windows that take turns, a budget that holds, failures that stay inside.

Apart from the whole recordings at the end nothing here takes time: host, GPU and waiting share one fake clock.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_pm
import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_cupti import CHIP, ERROR_CODES, METRICS_PER_PASS, PM_FUNCTIONS, FakeCupti, passes_of
from fake_gpu import (
    FakeGpu,
    final_process,
    read_table,
    shard_paths,
    shards_claimed,
    shards_on_disk,
)
from fake_pm import sampled_value
from fake_structs import INVALID_PARAMETER, OUT_OF_MEMORY

from nanalyze import analysis, recorder
from nanalyze.recorder import identity, pmsampling
from nanalyze.recorder import samples as module
from nanalyze.recorder.cupti import Cupti, CuptiError
from nanalyze.recorder.pmsampling import PM_SAMPLING, Drained
from nanalyze.recorder.rangeprofiler import MetricHost
from nanalyze.recorder.samples import Samples, SamplesLayer, fit_groups, group_of, rows_of
from nanalyze.recorder.writer import Writer
from nanalyze.rundir.errors import RecorderError
from nanalyze.rundir.sampled import BY_COLUMN, GROUPS, SampledCounter

CLOCK = "sm_cycles_elapsed"
CLOCK_METRIC = "sm__cycles_elapsed.sum"
TENSOR = BY_COLUMN["pipe_tensor_busy_ns"].raw[0]
INST = BY_COLUMN["inst"].raw[0]
STARTED_NS = 1_800_000_000_000_000_000
S = 10**9
INTERVAL_NS = 10_000_000
ONE_GROUP = [["inst"]]
THREE_GROUPS = [["inst", "pipe_tensor_busy_ns"], ["dram_read_bytes"], ["l1_sectors", "l1_sectors_hit"]]


@pytest.fixture
def fake() -> Iterator[FakeCupti]:
    fake = FakeCupti()
    yield fake
    assert fake.hosts == {}
    assert fake.pm_sessions == {}
    fake.close()


@pytest.fixture
def cupti(fake: FakeCupti) -> Cupti:
    return Cupti(fake.library, "fake")


@pytest.fixture
def host(cupti: Cupti) -> Iterator[MetricHost]:
    host = MetricHost(cupti, CHIP.decode(), profiler_type=PM_SAMPLING)
    yield host
    host.close()


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"interval_us": 4.9}, "Samples(interval_us=4.9): must be from 5 to 1,000,000 microseconds"),
        ({"interval_us": 1_000_001, "window_s": 10}, "must be from 5 to 1,000,000 microseconds"),
        ({"interval_us": math.nan}, "must be from 5 to 1,000,000 microseconds"),
        ({"window_s": 0}, "Samples(window_s=0): must be at least 4 intervals, 0.004 seconds"),
        ({"window_s": -1}, "Samples(window_s=-1): must be at least 4 intervals"),
        ({"window_s": math.nan}, "Samples(window_s=nan): must be at least 4 intervals"),
        ({"window_s": math.inf}, "Samples(window_s=inf): must be at least 4 intervals"),
        ({"interval_us": 1e6}, "Samples(window_s=1.0): must be at least 4 intervals, 4 seconds"),
        ({"overhead_pct": 0}, "Samples(overhead_pct=0): must be above 0 and at most 100"),
        ({"overhead_pct": 100.5}, "must be above 0 and at most 100"),
        ({"overhead_pct": math.nan}, "must be above 0 and at most 100"),
        ({"groups": [["inst", "smell"]]}, "Samples(groups=...): there is no sampled counter 'smell'"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RecorderError) as caught:
        Samples(**options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"interval_us": 5}, {"interval_us": 1e6, "window_s": 4}, {"overhead_pct": 100}])
def test_the_limits_themselves_are_allowed(options: dict[str, Any]) -> None:
    samples = Samples(**options)
    assert {name: getattr(samples, name) for name in options} == options


# --- groups -----------------------------------------------------------------------------------


def test_a_group_that_does_not_fit_is_split_from_its_end(host: MetricHost) -> None:
    columns = ["inst", "dram_read_bytes", "dram_write_bytes", "l2_bytes", "l2_sectors", "l1_sectors"]
    assert METRICS_PER_PASS == 5
    assert fit_groups(host, [columns]) == [
        {
            CLOCK: CLOCK_METRIC,
            "inst": INST,
            "dram_read_bytes": "dram__bytes_read.sum",
            "dram_write_bytes": "dram__bytes_write.sum",
            "l2_bytes": "lts__t_bytes.sum",
        },
        {CLOCK: CLOCK_METRIC, "l2_sectors": "lts__t_sectors.sum", "l1_sectors": "l1tex__t_sectors.sum"},
    ]


@pytest.mark.parametrize("per_pass", [2, 3, 5, 16])
def test_the_default_groups_all_fit_whatever_a_pass_holds(host: MetricHost, fake: FakeCupti, per_pass: int) -> None:
    fake.passes = lambda metrics: math.ceil(len(metrics) / per_pass)
    groups = fit_groups(host, GROUPS)
    assert all(next(iter(group)) == CLOCK and 2 <= len(group) <= per_pass for group in groups)
    counted = [column for group in groups for column in group if column != CLOCK]
    assert counted == [column for group in GROUPS for column in group if column != CLOCK]
    assert all(metric == BY_COLUMN[column].raw[0] for group in groups for column, metric in group.items())
    assert len(groups) == sum(math.ceil((len(group) - 1) / (per_pass - 1)) for group in GROUPS)


def test_the_clock_stands_first_in_every_group_and_once(host: MetricHost) -> None:
    groups = fit_groups(host, [["inst"], ["l1_sectors", CLOCK], [CLOCK, "l2_bytes"], [CLOCK]])
    assert [list(group) for group in groups] == [[CLOCK, "inst"], [CLOCK, "l1_sectors"], [CLOCK, "l2_bytes"]]


def test_a_chip_without_the_clock_counts_the_rest(host: MetricHost, fake: FakeCupti) -> None:
    fake.unsupported = {CLOCK_METRIC}
    groups = fit_groups(host, [[CLOCK, "inst", "l2_bytes"]])
    assert groups == [{"inst": INST, "l2_bytes": "lts__t_bytes.sum"}]


def test_what_the_chip_lacks_is_left_out(host: MetricHost, fake: FakeCupti) -> None:
    fake.unsupported = {"lts__t_bytes.sum", *BY_COLUMN["l1_sectors_hit"].raw, *BY_COLUMN["l1_sectors"].raw}
    groups = fit_groups(host, [["l2_bytes", "inst"], ["l1_sectors", "l1_sectors_hit"]])
    assert groups == [{CLOCK: CLOCK_METRIC, "inst": INST}]


@pytest.mark.parametrize("lacking", [0, 1, 2, 3])
def test_the_first_name_that_the_chip_knows_is_taken(host: MetricHost, fake: FakeCupti, lacking: int) -> None:
    raw = BY_COLUMN["inst"].raw
    fake.unsupported = set(raw[:lacking])
    assert fit_groups(host, [["inst"]]) == [{CLOCK: CLOCK_METRIC, "inst": raw[lacking]}]


def test_another_name_is_taken_where_the_first_does_not_fit_the_pass(host: MetricHost, fake: FakeCupti) -> None:
    fake.passes = lambda metrics: 2 if {CLOCK_METRIC, "sm__cycles_active.sum"} <= set(metrics) else passes_of(metrics)
    (group,) = fit_groups(host, [["inst", "sm_cycles_active"]])
    assert group["sm_cycles_active"] == "TPC.TriageCompute.sm__cycles_active.sum"


def test_a_counter_that_fits_no_pass_is_left_out(host: MetricHost, fake: FakeCupti) -> None:
    fake.passes = lambda metrics: 2 if "lts__t_bytes.sum" in metrics else passes_of(metrics)
    assert [list(group) for group in fit_groups(host, [["l2_bytes"], ["l2_bytes", "inst"]])] == [[CLOCK, "inst"]]


def test_two_columns_do_not_share_a_metric(host: MetricHost, monkeypatch: pytest.MonkeyPatch) -> None:
    inst, l2_bytes = INST, "lts__t_bytes.sum"
    shared = SampledCounter("l2_bytes", "bytes", "", (inst, l2_bytes))
    monkeypatch.setitem(module.BY_COLUMN, "l2_bytes", shared)
    assert fit_groups(host, [["inst", "l2_bytes"]]) == [{CLOCK: CLOCK_METRIC, "inst": inst, "l2_bytes": l2_bytes}]


def test_a_chip_with_nothing_has_no_groups(host: MetricHost, fake: FakeCupti) -> None:
    fake.passes = lambda metrics: 2
    assert fit_groups(host, GROUPS) == []
    fake.unsupported = {metric for counter in BY_COLUMN.values() for metric in counter.raw}
    fake.passes = passes_of
    assert fit_groups(host, GROUPS) == []


def test_other_errors_are_not_taken_for_a_missing_counter(host: MetricHost, fake: FakeCupti) -> None:
    fake.fail("cuptiProfilerHostGetConfigImage", INVALID_PARAMETER)
    with pytest.raises(CuptiError) as caught:
        fit_groups(host, ONE_GROUP)
    assert caught.value.function == "cuptiProfilerHostGetConfigImage"
    assert len(fake.hosts) == 1


# --- rows -------------------------------------------------------------------------------------


def drained(values: list[list[float]], length_ns: int = 1000) -> Drained:
    start = STARTED_NS + np.arange(len(values), dtype=np.int64) * length_ns
    return Drained(start, start + length_ns, np.array(values, dtype=float), overflowed=False)


def test_busy_times_are_percentages_of_the_samples_length() -> None:
    group = {"inst": "i", "pipe_tensor_busy_ns": "t"}
    rows = rows_of(drained([[5.0, 25.0], [7.0, 100.0], [0.0, 0.0]], length_ns=2_000), group, 3, 1)
    assert list(rows) == ["device_id", "start_ns", "end_ns", "counter_group", "inst", "pipe_tensor_busy_ns"]
    assert rows["inst"].tolist() == [5.0, 7.0, 0.0]
    assert rows["pipe_tensor_busy_ns"].tolist() == [500.0, 2000.0, 0.0]
    assert rows["start_ns"].tolist() == [STARTED_NS + n * 2_000 for n in range(3)]
    assert rows["end_ns"].tolist() == [STARTED_NS + n * 2_000 for n in range(1, 4)]
    assert (rows["counter_group"].tolist(), rows["device_id"].tolist()) == ([3] * 3, [1] * 3)


def test_what_was_not_counted_is_null_in_the_file(tmp_path: Path) -> None:
    said: list[str] = []
    writer = Writer(tmp_path, "host-0-1", said.append)
    writer.add(
        "samples", rows_of(drained([[1.0, math.nan], [math.inf, 50.0]]), {"inst": "a", "l2_slices_busy_ns": "b"}, 0, 0)
    )
    writer.add("samples", rows_of(drained([[3.0]]), {"l1_sectors": "c"}, 1, 0))
    writer.add("samples", rows_of(drained([[4.0, 10.0]]), {"inst": "a", "l2_slices_busy_ns": "b"}, 0, 1))
    writer.flush()
    assert said == []
    counters = ("inst", "l2_slices_busy_ns", "l1_sectors")
    rows = read_table(tmp_path, "samples")
    assert [tuple(row[name] for name in counters) for row in rows] == [
        (1.0, None, None),
        (None, 500.0, None),
        (None, None, 3.0),
        (4.0, 100.0, None),
    ]
    assert [(row["device_id"], row["counter_group"]) for row in rows] == [(0, 0), (0, 0), (0, 1), (1, 0)]
    (path,) = shard_paths(tmp_path, "samples")
    schema = pq.ParquetFile(path).schema_arrow
    assert {str(schema.field(name).type) for name in counters} == {"double"}
    assert str(schema.field("start_ns").type) == "int64"


# --- the layer on a fake clock ----------------------------------------------------------------


class World:
    """One clock for GPU and host, a layer that runs in the test's thread, and what it put and said.

    `at` maps seconds to what happens then; the layer is told to stop after `seconds`. Each sample
    evaluated costs `sample_cost_ns` of CPU, which also takes that long.
    """

    def __init__(self, fake: FakeCupti, patch: pytest.MonkeyPatch) -> None:
        self.fake = fake
        self.now_ns = STARTED_NS
        self.cpu_ns = 0
        self.sample_cost_ns = 0
        self.at: dict[float, Callable[[], object]] = {}
        self.devices = {0}
        self.rows: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.noted: list[str] = []
        self.waits: list[float] = []
        self.stop_at_s = 1.0
        fake.clock_ns = lambda: self.now_ns
        fake.script[CLOCK_METRIC] = self._evaluated
        clock = SimpleNamespace(monotonic=lambda: (self.now_ns - STARTED_NS) / 1e9, thread_time_ns=lambda: self.cpu_ns)
        patch.setattr(module, "time", clock)

    def run(self, seconds: float, **options: Any) -> SamplesLayer:
        self.stop_at_s = seconds
        settings = {"interval_us": INTERVAL_NS / 1000, "overhead_pct": 100, "groups": ONE_GROUP, **options}
        cupti = Cupti(self.fake.library, "fake")
        layer = SamplesLayer(
            cupti,
            Samples(**settings),
            lambda: set(self.devices),
            self._put,
            self.said.append,
            note=self.noted.append,
        )
        layer._stopping = self  # type: ignore[assignment]
        layer._run()
        return layer

    @property
    def elapsed_s(self) -> float:
        return (self.now_ns - STARTED_NS) / 1e9

    def _evaluated(self, start_ns: int, end_ns: int) -> float:
        self.cpu_ns += self.sample_cost_ns
        self.now_ns += self.sample_cost_ns
        return sampled_value(CLOCK_METRIC, start_ns, end_ns)

    def _put(self, rows: dict[str, Any]) -> None:
        assert len(rows["start_ns"]) > 0, "nothing is put where there is nothing"
        lists = {name: column.tolist() for name, column in rows.items()}
        self.rows += [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]

    # -- in place of threading.Event

    def is_set(self) -> bool:
        return self.elapsed_s >= self.stop_at_s

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        self.waits.append(seconds)
        self.now_ns += max(1, round(min(seconds, max(0.0, self.stop_at_s - self.elapsed_s)) * 1e9))
        for due in sorted(time_s for time_s in self.at if time_s <= self.elapsed_s):
            self.at.pop(due)()
        return self.is_set()


@pytest.fixture
def world(fake: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(fake, monkeypatch)


def test_every_sample_of_a_window_is_put_once(world: World) -> None:
    layer = world.run(1.0)
    expected = [STARTED_NS + n * INTERVAL_NS for n in range(1, 100)]
    assert [row["start_ns"] for row in world.rows] == expected
    assert [row["end_ns"] for row in world.rows] == [start + INTERVAL_NS for start in expected]
    assert [row["inst"] for row in world.rows] == [
        sampled_value(INST, start, start + INTERVAL_NS) for start in expected
    ]
    assert world.said == []
    assert layer.losses == {0: (100, 99)}
    assert layer.overflows == 0


def test_groups_take_turns(world: World) -> None:
    world.run(7.0, groups=THREE_GROUPS)
    verdicts, dram = [INST, TENSOR], ["dram__bytes_read.sum"]
    l1 = ["l1tex__t_sectors.sum", "l1tex__t_sectors_lookup_hit.sum"]
    assert [metrics for _, metrics in world.fake.pm_configs] == [
        [CLOCK_METRIC, *metrics] for metrics in (verdicts, dram, l1, verdicts, dram, verdicts, l1)
    ]
    windows = {round((row["start_ns"] - STARTED_NS) // S): row["counter_group"] for row in world.rows}
    assert windows == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 0, 6: 2}
    assert len(world.rows) == 7 * 99
    for row in world.rows:
        columns = [CLOCK, *THREE_GROUPS[row["counter_group"]]]
        assert list(row)[4:] == columns
        assert None not in row.values()


@pytest.mark.parametrize(
    ("groups", "turns"), [(1, [0, 0, 0]), (2, [0, 1, 0, 1, 0, 1]), (4, [0, 1, 2, 3, 0, 1, 0, 2, 0, 3, 0, 1])]
)
def test_the_first_group_has_every_other_turn_once_each_had_one(groups: int, turns: list[int]) -> None:
    assert [group_of(turn, groups) for turn in range(len(turns))] == turns


def test_the_metric_behind_each_column_is_told_once(fake: FakeCupti) -> None:
    notes: list[str] = []
    cupti, came = Cupti(fake.library, "fake"), threading.Event()
    options = Samples(groups=THREE_GROUPS[:2], window_s=0.05)
    layer = SamplesLayer(cupti, options, lambda: {0}, lambda _: came.set(), pytest.fail, note=notes.append)
    layer.start()
    assert came.wait(5)
    layer.stop()
    assert notes == [
        f"device 0, counter_group 0: {CLOCK} = {CLOCK_METRIC}, inst = {INST}, pipe_tensor_busy_ns = {TENSOR}",
        f"device 0, counter_group 1: {CLOCK} = {CLOCK_METRIC}, dram_read_bytes = dram__bytes_read.sum",
    ]


def test_busy_times_add_up_over_the_window(world: World, fake: FakeCupti) -> None:
    fake.script[TENSOR] = lambda start, end: 75.0 if start < STARTED_NS + S // 2 else 25.0
    world.run(1.0, groups=[["pipe_tensor_busy_ns"]])
    assert sum(row["pipe_tensor_busy_ns"] for row in world.rows) == 49 * 7_500_000 + 50 * 2_500_000


def test_the_window_has_the_length_that_was_asked_for(world: World) -> None:
    world.run(1.0, window_s=0.05, groups=THREE_GROUPS)
    assert len(world.fake.pm_configs) == 20
    assert max(world.waits) == pytest.approx(0.05)


def test_expected_and_received_tell_the_loss(world: World, fake: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_pm, "RECORD_BYTES", pmsampling.BUFFER_BYTES // 8)  # it takes 8 of 10 between drains
    layer = world.run(2.0, window_s=2.0)
    expected, received = layer.losses[0]
    assert expected == 200
    assert received == len(world.rows) == 200 - 1 - fake.pm_lost
    assert fake.pm_lost > 0
    assert layer.overflows == 20
    assert world.said == []


def test_counters_that_never_complete_are_a_visible_loss(world: World, fake: FakeCupti) -> None:
    fake.silent = {INST}
    layer = world.run(2.0, groups=[["inst"], ["l2_bytes"]])
    assert {row["counter_group"] for row in world.rows} == {1}
    assert layer.losses == {0: (200, 99)}


def test_a_window_ends_also_where_samples_come_faster_than_they_are_read(world: World, fake: FakeCupti) -> None:
    def racing_clock() -> int:
        world.now_ns += pmsampling.IMAGE_SAMPLES * 1_000_000
        return world.now_ns

    fake.clock_ns = racing_clock
    layer = world.run(5.0, interval_us=1000)
    assert world.said == []
    assert layer.losses[0][1] == len(world.rows) > 5000


# --- the budget -------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost_us", "budget"), [(150, 0.2), (150, 1.0), (1500, 1.0), (1500, 5.0), (5000, 20.0)])
def test_rests_keep_the_budget(world: World, cost_us: int, budget: float) -> None:
    world.sample_cost_ns = cost_us * 1000
    layer = world.run(60.0, overhead_pct=budget, groups=THREE_GROUPS)
    window_ns = 110 * world.sample_cost_ns  # what the last window cost, whose rest was cut short
    allowed = world.elapsed_s * 1e9 * budget / 100
    credit_ns = len(THREE_GROUPS) * window_ns  # the first window of each group is not paid for
    assert allowed * 0.9 - window_ns <= world.cpu_ns <= allowed + window_ns + credit_ns
    assert layer.cpu_ns == world.cpu_ns
    assert {row["counter_group"] for row in world.rows} == {0, 1, 2}


def test_the_time_before_the_first_window_is_counted_too(world: World, fake: FakeCupti) -> None:
    def dear_passes(metrics: list[str]) -> int:
        world.cpu_ns += 50_000_000
        return 2

    fake.passes = dear_passes
    assert world.run(1.0).cpu_ns == world.cpu_ns > 0


def test_cheap_counters_need_no_rest(world: World) -> None:
    world.sample_cost_ns = 50_000  # 0.5 % of a core
    world.run(20.0, overhead_pct=1.0)
    assert max(world.waits) == module.DRAIN_S
    assert len(world.rows) > 0.95 * 2000


def test_each_rest_follows_the_cost_of_its_own_window(world: World) -> None:
    world.sample_cost_ns = 1_000_000  # 10 % of a core, so a window every 10 s at 1 %
    world.run(30.0, overhead_pct=1.0)
    starts = [row["start_ns"] for row in world.rows]
    gaps = [after - before for before, after in pairwise(starts) if after - before > S]
    assert len(gaps) == 2
    assert all(8.9 * S < gap < 10 * S for gap in gaps)


# --- devices ----------------------------------------------------------------------------------


def test_nothing_is_touched_before_the_job_uses_a_device(world: World, fake: FakeCupti) -> None:
    world.devices = set()
    layer = world.run(3.0)
    assert set(fake.calls) <= {"cuptiGetVersion"}
    assert world.rows == []
    assert layer.losses == {}


def test_devices_are_sampled_from_when_they_appear(world: World, fake: FakeCupti) -> None:
    world.devices = set()
    fake.is_cuda_initialized = False

    def appear(device: int) -> None:
        fake.is_cuda_initialized = True
        world.devices.add(device)

    world.at = {0.9: lambda: appear(1), 3.5: lambda: appear(0)}
    layer = world.run(6.0)
    assert world.said == []
    first = {device: min(row["start_ns"] for row in world.rows if row["device_id"] == device) for device in (0, 1)}
    assert 0.9 * S < first[1] - STARTED_NS < 1.3 * S
    assert 3.5 * S < first[0] - STARTED_NS < 5 * S
    assert set(layer.losses) == {0, 1}
    assert {device for device, _ in fake.pm_configs} == {0, 1}


def test_a_refused_device_leaves_the_others_alone(world: World, fake: FakeCupti) -> None:
    fake.busy = {1}
    world.devices = {0, 1, 2}
    world.run(3.0)
    assert world.said == [
        "device 1 is not sampled for now: cuptiPmSamplingEnable failed: CUPTI_ERROR_HARDWARE_BUSY (26): "
        "another process (Nsight, DCGM) holds the counters: stop it, or wait"
    ]
    assert {device: sum(row["device_id"] == device for row in world.rows) for device in range(3)} == {
        0: 297,
        1: 0,
        2: 297,
    }
    assert fake.calls["cuptiPmSamplingEnable"] - len(fake.pm_configs) == 1  # it is not asked again


def test_counters_that_another_process_took_between_two_windows_come_back(world: World, fake: FakeCupti) -> None:
    world.at = {2.2: lambda: fake.busy.add(0), 6.0: fake.busy.clear}
    layer = world.run(14.0, groups=THREE_GROUPS[1:])
    assert len(world.said) == 1
    assert "HARDWARE_BUSY" in world.said[0]
    seconds = sorted({(row["start_ns"] - STARTED_NS) // S for row in world.rows})
    assert seconds[:2] == [0, 1]
    assert 3 not in seconds
    assert min(second for second in seconds if second > 3) in range(8, 10)  # tried again 5 s after it was lost
    expected, received = layer.losses[0]
    assert received == len(world.rows) > 0.9 * expected
    groups = [row["counter_group"] for row in world.rows]
    assert {0, 1} == set(groups)


def test_counters_that_never_come_are_asked_for_ever_less_often(world: World, fake: FakeCupti) -> None:
    fake.busy = {0}
    world.run(300.0)
    assert len(world.said) == 1
    assert world.rows == []
    assert fake.calls["cuptiPmSamplingEnable"] == 1 + 4 + 3  # after 5, 15, 35 and 75 s, then each minute


def test_another_holder_of_counters_that_nobody_asked_for_is_named_in_the_run_only(
    world: World, fake: FakeCupti
) -> None:
    fake.busy = {1}
    world.devices = {0, 1}
    world.run(3.0, by_default=True)
    assert world.said == []
    busy = "device 1 is not sampled for now: cuptiPmSamplingEnable failed: CUPTI_ERROR_HARDWARE_BUSY (26)"
    assert [note for note in world.noted if note.startswith(busy)]
    assert {row["device_id"] for row in world.rows} == {0}


@pytest.mark.parametrize(
    ("function", "at"),
    [
        ("cuptiPmSamplingSetConfig", 2),
        ("cuptiPmSamplingStart", 2),
        ("cuptiPmSamplingDecodeData", 8),
        ("cuptiPmSamplingStop", 2),
        ("cuptiPmSamplingSetConfig", 4),
    ],
)
def test_a_device_that_fails_later_leaves_the_others_alone(
    world: World, fake: FakeCupti, function: str, at: int
) -> None:
    fake.fail(function, 9, at=at, times=1)
    world.devices = {0, 1}
    layer = world.run(4.0)
    (line,) = world.said
    assert line == (
        f"device 1 is no longer sampled: {function} failed: CUPTI_ERROR_HARDWARE (9): check the GPU with nvidia-smi"
    )
    counts = [sum(row["device_id"] == device for row in world.rows) for device in (0, 1)]
    assert counts[0] == 4 * 99
    assert counts[1] <= 99
    assert layer.losses[0] == (400, 4 * 99)
    assert layer.losses[1][1] == counts[1]


def test_a_device_can_come_when_all_others_have_failed(world: World, fake: FakeCupti) -> None:
    fake.fail("cuptiPmSamplingStart", 9, times=1)
    world.at = {2.0: lambda: world.devices.add(1)}
    world.run(5.0)
    assert len(world.said) == 1
    assert {row["device_id"] for row in world.rows} == {1}


def test_a_chip_with_nothing_to_sample_says_so(world: World, fake: FakeCupti) -> None:
    fake.unsupported = {metric for counter in BY_COLUMN.values() for metric in counter.raw}
    world.run(2.0, groups=GROUPS)
    assert world.said == ["device 0 is not sampled: it offers none of the sampled counters in one pass"]
    assert fake.calls["cuptiPmSamplingEnable"] == 0


# --- the end ----------------------------------------------------------------------------------


def test_stop_in_the_middle_of_a_window_keeps_what_was_counted(world: World, fake: FakeCupti) -> None:
    layer = world.run(0.35)
    assert [row["start_ns"] for row in world.rows] == [STARTED_NS + n * INTERVAL_NS for n in range(1, 35)]
    assert layer.losses == {0: (35, 34)}
    assert fake.calls["cuptiPmSamplingDisable"] == 1


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError(), RecursionError("deep")])
def test_an_error_of_its_own_ends_the_layer_alone(world: World, error: Exception) -> None:
    def broken(rows: dict[str, Any]) -> None:
        raise error

    world._put = broken  # type: ignore[method-assign]
    world.devices = {0, 1}
    world.run(3.0)
    assert world.said == [f"sampling stopped, please report it: {type(error).__name__}: {error}"]


def test_an_error_while_looking_for_devices_ends_the_layer_alone(world: World) -> None:
    def fail() -> None:
        world.devices = None  # type: ignore[assignment]

    world.at = {1.5: fail}
    world.run(5.0)
    (line,) = world.said
    assert line.startswith("sampling stopped, please report it: TypeError: ")
    assert len(world.rows) == 2 * 99


# --- its thread -------------------------------------------------------------------------------


def threaded(fake: FakeCupti, put: Callable[[dict[str, Any]], None], said: list[str], **options: Any) -> SamplesLayer:
    settings = {"window_s": 0.02, "overhead_pct": 100, "groups": ONE_GROUP, **options}
    return SamplesLayer(Cupti(fake.library, "fake"), Samples(**settings), lambda: {0}, put, said.append)


def test_stop_ends_the_thread_also_in_the_middle_of_a_rest(fake: FakeCupti) -> None:
    said: list[str] = []
    got = threading.Event()
    layer = threaded(fake, lambda rows: got.set(), said, window_s=0.01, overhead_pct=0.001)
    layer.start()
    assert got.wait(5)
    until(lambda: fake.pm_session_of(0) is not None and not fake.pm_session_of(0).is_started)
    layer.stop()
    assert not layer._thread.is_alive()
    assert said == []
    assert fake.calls["cuptiPmSamplingStart"] == 1
    assert layer.cpu_ns > 0


def test_stop_does_not_wait_for_ever(fake: FakeCupti) -> None:
    release, entered, said = threading.Event(), threading.Event(), []

    def stuck(start_ns: int, end_ns: int) -> float:
        entered.set()
        release.wait(10)
        return 1.0

    fake.script[CLOCK_METRIC] = stuck
    layer = threaded(fake, lambda rows: None, said)
    layer.start()
    assert entered.wait(5)
    layer.stop(patience_s=0.05)
    assert said == ["sampling did not end within 0.05 s; the last samples are missing"]
    release.set()
    layer._thread.join(5)
    assert not layer._thread.is_alive()


# --- every function, every code ---------------------------------------------------------------

REACHED = (
    "cuptiProfilerInitialize",
    "cuptiDeviceGetChipName",
    "cuptiProfilerHostInitialize",
    "cuptiProfilerHostDeinitialize",
    "cuptiProfilerHostConfigAddMetrics",
    "cuptiProfilerHostGetConfigImageSize",
    "cuptiProfilerHostGetConfigImage",
    "cuptiProfilerHostGetNumOfPasses",
    "cuptiProfilerHostEvaluateToGpuValues",
    *(name for name in PM_FUNCTIONS if not name.endswith("Availability")),
)
NO_SUCH_METRIC = (1, 17)


@pytest.mark.parametrize("function", REACHED)
def test_every_error_is_said_once_and_ends_the_layer_alone(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    for code in sorted(ERROR_CODES):
        fake = FakeCupti()
        with monkeypatch.context() as patch:
            world = World(fake, patch)
            fake.fail(function, code)
            layer = world.run(0.2, window_s=0.04)
        assert fake.calls[function] > 0, "the test does not reach this function"
        check_what_was_said(function, code, world, layer)
        if function not in ("cuptiPmSamplingDisable", "cuptiProfilerHostDeinitialize"):
            assert fake.pm_sessions == {}
            assert fake.hosts == {}
        fake.close()


def check_what_was_said(function: str, code: int, world: World, layer: SamplesLayer) -> None:
    if (function, code) == ("cuptiPmSamplingDecodeData", OUT_OF_MEMORY):
        assert world.said == []
        assert layer.overflows > 0
        return
    (line,) = world.said
    if function == "cuptiProfilerHostConfigAddMetrics" and code in NO_SUCH_METRIC:
        assert line == "device 0 is not sampled: it offers none of the sampled counters in one pass"
        return
    assert line.startswith("device 0 is n")
    assert f": {function} failed: CUPTI_ERROR_{ERROR_CODES[code]} ({code})" in line


@pytest.mark.parametrize("function", REACHED)
def test_an_older_cupti_is_said_once(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    fake = FakeCupti()
    fake.remove(function)
    world = World(fake, monkeypatch)
    world.run(0.2, window_s=0.04)
    fake.close()
    text = f"{function} failed: CUPTI_ERROR_API_NOT_IMPLEMENTED (11): use a newer CUPTI"
    assert [text in line for line in world.said] == [True]


# --- whole recordings -------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    for name in (*identity._RANK, *identity._LOCAL_RANK, *identity._WORLD_SIZE, *identity._JOB):
        monkeypatch.delenv(name, raising=False)
    before = set(threading.enumerate())
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    yield gpu
    recorder.stop()
    gpu.close()
    assert {thread.name for thread in threading.enumerate() if thread not in before} == set()
    assert gpu.cupti.pm_sessions == {}
    assert gpu.cupti.hosts == {}


def sampling(**options: Any) -> Samples:
    return Samples(**{"window_s": 0.03, "overhead_pct": 100, "groups": THREE_GROUPS, **options})


def until(condition: Callable[[], object], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_a_recording_writes_samples_that_the_analysis_reads(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    before = time.time_ns()
    with recorder.record(run_dir, samples=sampling()):
        call = gpu.launch("gemm", duration_ns=5000)
        until(lambda: len(gpu.cupti.pm_configs) >= 5)
    after = time.time_ns()
    assert capsys.readouterr().err == ""
    assert [row["correlation_id"] for row in read_table(run_dir, "kernels")] == [call]
    assert shards_claimed(run_dir) == shards_on_disk(run_dir)
    assert shards_on_disk(run_dir)["samples"] >= 1
    with analysis.open(run_dir) as run:
        assert len(run.damage()) == 0
        frame = run.sql("SELECT * FROM samples ORDER BY start_ns")
    assert set(frame["counter_group"]) == {0, 1, 2}
    assert set(frame["device_id"]) == {0}
    assert frame["start_ns"].between(before, after).all()
    assert (frame["end_ns"] - frame["start_ns"] == 1_000_000).all()
    columns = {column: group for group, names in enumerate(THREE_GROUPS) for column in names}
    for column, group in columns.items():
        assert (frame[column].notna() == (frame["counter_group"] == group)).all()
    expected = [
        sampled_value("dram__bytes_read.sum", *times) for times in zip(frame["start_ns"], frame["end_ns"], strict=True)
    ]
    reads = frame["counter_group"] == 1
    assert frame["dram_read_bytes"][reads].tolist() == [
        value for value, was_read in zip(expected, reads, strict=True) if was_read
    ]
    assert frame[CLOCK].notna().all()


def test_the_process_and_the_events_tell_about_sampling(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, samples=sampling(interval_us=500)):
        until(lambda: len(gpu.cupti.pm_configs) >= 3)
    end = final_process(run_dir)
    assert set(end["layers"].split(",")) == {"timeline", "samples", "ranges", "device_state"}
    assert json.loads(end["settings"])["samples"] == {
        "interval_us": 500,
        "window_s": 0.03,
        "overhead_pct": 100,
        "groups": THREE_GROUPS,
        "by_default": False,
    }
    *counted, note = [row for row in read_table(run_dir, "events") if row["layer"] == "samples"]
    assert [row["kind"] for row in counted] == ["note"] * len(THREE_GROUPS)
    assert counted[0]["message"].startswith(f"device 0, counter_group 0: {CLOCK} = {CLOCK_METRIC}, inst = {INST}")
    assert (note["kind"], note["count"]) == ("note", len(read_table(run_dir, "samples")))
    words = note["message"].split()
    assert note["message"] == f"samples received of about {words[4]} expected on device 0"
    assert int(words[4]) >= note["count"] > 0


def test_what_nobody_asked_for_waits_for_the_first_kernels(gpu: FakeGpu, tmp_path: Path) -> None:
    """Else the first windows, of the counters that verdicts need, are those of an idle device."""
    with recorder.record(tmp_path / "run", samples=sampling(by_default=True), flush_s=0.1) as rec:
        assert rec._samples is not None
        gpu.use(0)
        time.sleep(0.5)
        assert gpu.cupti.pm_configs == []
        gpu.launch("k")
        until(lambda: len(gpu.cupti.pm_configs) >= 1)


@pytest.mark.parametrize(("by_default", "count"), [(True, 1), (False, 2)])
def test_samples_that_nobody_asked_for_go_with_the_timeline_in_silence(
    gpu: FakeGpu, tmp_path: Path, capfd: pytest.CaptureFixture[str], by_default: bool, count: int
) -> None:
    gpu.cupti.fail("cuptiActivityRegisterCallbacks", 39)
    with recorder.record(tmp_path / "run", samples=sampling(by_default=by_default)):
        pass
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("nanalyze: timeline is off: cuptiActivityRegisterCallbacks failed")
    assert len(lines) == count


def test_the_recorders_cpu_time_holds_that_of_sampling(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, thread_time_ns=lambda: 10**15)
    monkeypatch.setattr(module, "time", clock)
    with recorder.record(tmp_path / "run", samples=sampling()):
        until(lambda: len(gpu.cupti.pm_configs) >= 2)
    assert 10**15 <= final_process(tmp_path / "run")["recorder_cpu_ns"] < 10**15 + 60 * S


def test_an_overflow_is_an_event(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_pm, "RECORD_BYTES", pmsampling.BUFFER_BYTES // 8)
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, samples=sampling()):
        until(lambda: gpu.cupti.pm_lost and len(gpu.cupti.pm_configs) >= 3)
    (loss,) = [row for row in read_table(run_dir, "events") if row["kind"] == "loss"]
    assert (loss["layer"], loss["message"]) == (
        "samples",
        "times the hardware buffer overflowed: samples are missing",
    )
    assert loss["count"] >= 1


def test_samples_begin_once_cuda_is_used(gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.before_cuda()
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, samples=sampling()):
        time.sleep(0.05)
        assert gpu.cupti.calls["cuptiProfilerInitialize"] == 0
        gpu.use(0)
        until(lambda: len(gpu.cupti.pm_configs) >= 2)
    assert capsys.readouterr().err == ""
    assert len(read_table(run_dir, "samples")) > 0


def test_two_devices_are_sampled(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.use(0, 1)
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, samples=sampling()):
        until(lambda: len(gpu.cupti.pm_configs) >= 6)
    assert {row["device_id"] for row in read_table(run_dir, "samples")} == {0, 1}


def test_samples_without_a_timeline_are_off_and_say_why(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorder.record(tmp_path / "run", layers=("ranges",), samples=sampling()):
        gpu.launch()
    assert capsys.readouterr().err.splitlines() == [
        "nanalyze: samples is off: it needs the timeline, by which samples are attributed to kernels"
    ]
    assert gpu.cupti.calls["cuptiPmSamplingEnable"] == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"samples": 1000}, "samples=1000: must be a recorder.Samples, such as recorder.Samples()"),
        (
            {"samples": Samples(), "exact": recorder.Exact()},
            "samples and exact both need the GPU's counters: record once with each, the second with append=True",
        ),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(RecorderError) as caught:
        recorder.record(tmp_path / "run", **settings)
    assert str(caught.value) == text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("code", [35, 999])
@pytest.mark.parametrize("function", REACHED)
def test_no_error_of_sampling_reaches_the_job_or_the_other_layers(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, code: int
) -> None:
    gpu.cupti.fail(function, code)
    run_dir = tmp_path / "run"
    with recorder.record(run_dir, samples=sampling(groups=ONE_GROUP)), recorder.annotate("step"):
        calls = [gpu.launch("a"), gpu.launch("b")]
        until(lambda: gpu.cupti.calls[function])
    gpu.cupti.heal()
    gpu.cupti.pm_sessions.clear()
    gpu.cupti.hosts.clear()
    assert gpu.cupti.calls[function] > 0, "the test does not reach this function"
    assert [row["correlation_id"] for row in read_table(run_dir, "kernels")] == calls
    assert [row["name"] for row in read_table(run_dir, "ranges")] == ["step"]
    assert len(read_table(run_dir, "device_state")) >= 1
    assert final_process(run_dir)["ending"] == "stop"
    lines = capsys.readouterr().err.splitlines()
    failures = [(row["layer"], row["message"]) for row in read_table(run_dir, "events") if row["kind"] == "failure"]
    (line,) = lines
    assert line.startswith("nanalyze: device 0 is n")
    assert f": {function} failed: CUPTI_ERROR_{ERROR_CODES[code]} ({code})" in line
    assert failures == [("samples", line.removeprefix("nanalyze: "))]
