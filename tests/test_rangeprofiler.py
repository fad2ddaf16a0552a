"""The range profiler's calls, against a fake that checks structures and states as CUPTI does."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import fake_cupti
import pytest
from fake_cupti import CHIP, METRICS_PER_PASS, FakeCupti, value_of

from nanalyze.recorder import rangeprofiler as rp
from nanalyze.recorder.cupti import Cupti, CuptiError
from nanalyze.recorder.exact import Exact
from nanalyze.recorder.exact_layer import supported_metrics
from nanalyze.rundir.counters import COUNTERS, Counter

CONTEXT = 0xC0DE
METRICS = ["gpu__time_duration.sum", "sm__cycles_active.avg", "dram__bytes_read.sum"]
MANY = [f"unit__counter_{number}.sum" for number in range(3 * METRICS_PER_PASS)]

# *_STRUCT_SIZE of CUDA 13.0's headers, as g++ printed them.
STRUCT_SIZES = {
    "cuptiProfilerInitialize": 16,
    "cuptiDeviceGetChipName": 32,
    "cuptiProfilerGetCounterAvailability": 40,
    "cuptiProfilerHostInitialize": 48,
    "cuptiProfilerHostDeinitialize": 24,
    "cuptiProfilerHostConfigAddMetrics": 40,
    "cuptiProfilerHostGetConfigImageSize": 32,
    "cuptiProfilerHostGetConfigImage": 40,
    "cuptiProfilerHostGetNumOfPasses": 40,
    "cuptiProfilerHostEvaluateToGpuValues": 72,
    "cuptiRangeProfilerEnable": 32,
    "cuptiRangeProfilerDisable": 24,
    "cuptiRangeProfilerGetCounterDataSize": 64,
    "cuptiRangeProfilerCounterDataImageInitialize": 40,
    "cuptiRangeProfilerSetConfig": 90,
    "cuptiRangeProfilerStart": 24,
    "cuptiRangeProfilerStop": 41,
    "cuptiRangeProfilerPushRange": 32,
    "cuptiRangeProfilerPopRange": 24,
    "cuptiRangeProfilerDecodeData": 32,
    "cuptiRangeProfilerGetCounterDataInfo": 40,
}


@pytest.fixture
def fake() -> Iterator[FakeCupti]:
    fake = FakeCupti()
    yield fake
    fake.close()


@pytest.fixture
def cupti(fake: FakeCupti) -> Cupti:
    return Cupti(fake.library, "fake")


@pytest.fixture
def host(cupti: Cupti) -> Iterator[rp.MetricHost]:
    rp.initialize(cupti)
    host = rp.MetricHost(cupti, rp.chip_name(cupti, 0), CONTEXT)
    yield host
    host.close()


def work(fake: FakeCupti, *names: bytes) -> None:
    session = fake.session_of(CONTEXT)
    assert session is not None
    for name in names:
        session.collects(name)


# --- structures -------------------------------------------------------------------------------


def test_the_fake_has_the_sizes_of_the_headers() -> None:
    ours = [name for name in fake_cupti._STRUCTS if name not in fake_cupti.PM_FUNCTIONS]  # test_pmsampling has those
    assert {name: fake_cupti.struct_size(name) for name in ours} == STRUCT_SIZES


def test_a_wrong_size_is_refused(fake: FakeCupti, cupti: Cupti) -> None:
    params = (ctypes.c_size_t * 2)(24, 0)
    with pytest.raises(CuptiError) as caught:
        cupti.cuptiProfilerInitialize(params)
    assert caught.value.code == fake_cupti.INVALID_PARAMETER


# --- host -------------------------------------------------------------------------------------


def test_the_chip_has_its_name(cupti: Cupti) -> None:
    assert rp.chip_name(cupti, 0) == CHIP.decode()


def test_an_unknown_chip_is_an_error(cupti: Cupti) -> None:
    with pytest.raises(CuptiError) as caught:
        rp.MetricHost(cupti, "GX999")
    assert (caught.value.code, caught.value.function) == (46, "cuptiProfilerHostInitialize")


@pytest.mark.parametrize(("count", "passes"), [(1, 1), (5, 1), (6, 2), (15, 3)])
def test_passes_of_a_set(host: rp.MetricHost, count: int, passes: int) -> None:
    assert host.passes(host.config(MANY[:count])) == passes


def test_sets_do_not_add_up(host: rp.MetricHost) -> None:
    host.config(MANY)
    assert host.passes(host.config(METRICS)) == 1


def test_host_objects_are_given_back(fake: FakeCupti, cupti: Cupti) -> None:
    fake.unsupported = {"sm__gone.sum"}
    host = rp.MetricHost(cupti, "GH100", CONTEXT)
    host.config(METRICS)
    with pytest.raises(CuptiError):
        host.config(["sm__gone.sum"])
    assert len(fake.hosts) == 1
    host.close()
    assert fake.hosts == {}


def test_what_the_chip_lacks_is_left_out(fake: FakeCupti, host: rp.MetricHost) -> None:
    fake.unsupported = {METRICS[1]}
    assert host.supported(METRICS) == [METRICS[0], METRICS[2]]


def test_the_first_supported_candidate_of_each_counter_is_taken(fake: FakeCupti, host: rp.MetricHost) -> None:
    counters = [
        Counter("a", "", "", ("sm__new.sum", "sm__old.sum")),
        Counter("b", "", "", ("sm__gone.sum",)),
        Counter("c", "", "", ("sm__only.sum",)),
        Counter("d", "", "", ("sm__only.sum",)),
    ]
    assert supported_metrics(host, counters) == ["sm__new.sum", "sm__gone.sum", "sm__only.sum"]
    fake.unsupported = {"sm__new.sum", "sm__gone.sum"}
    assert supported_metrics(host, counters) == ["sm__old.sum", "sm__only.sum"]


def test_the_verdict_set_is_a_part_of_the_full_set() -> None:
    full = [counter.name for counter in Exact().candidates()]
    verdict = [counter.name for counter in Exact(metrics="verdict").candidates()]
    assert full == [counter.name for counter in COUNTERS]
    assert set(verdict) < set(full)
    assert {"duration_ns", "compute_pct", "memory_pct"} <= set(verdict)
    assert [counter.raw for counter in Exact(metrics=["a__b.sum"]).candidates()] == [("a__b.sum",)]


# --- kernel mode ------------------------------------------------------------------------------


def test_each_launch_between_start_and_stop_is_a_range(fake: FakeCupti, cupti: Cupti, host: rp.MetricHost) -> None:
    profiler = rp.RangeProfiler(cupti, host, CONTEXT, METRICS, max_ranges=4)
    profiler.start()
    work(fake, b"one", b"two")
    assert profiler.stop() is True
    work(fake)
    profiler.start()
    work(fake, b"three")
    profiler.stop()
    assert profiler.read() == [[value_of(metric, [name]) for metric in METRICS] for name in (b"one", b"two", b"three")]
    profiler.start()
    work(fake, b"four")
    profiler.stop()
    assert profiler.read() == [[value_of(metric, [b"four"]) for metric in METRICS]]
    profiler.close()
    assert fake.sessions == {}


def test_ranges_beyond_the_reserved_ones_are_dropped(fake: FakeCupti, cupti: Cupti, host: rp.MetricHost) -> None:
    profiler = rp.RangeProfiler(cupti, host, CONTEXT, METRICS, max_ranges=2)
    profiler.start()
    work(fake, b"one", b"two", b"three")
    profiler.stop()
    assert len(profiler.read()) == 2
    profiler.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_missing(fake: FakeCupti, cupti: Cupti, host: rp.MetricHost, value: float) -> None:
    fake.values = {METRICS[0]: value, METRICS[1]: 0.0, METRICS[2]: 2.5}
    profiler = rp.RangeProfiler(cupti, host, CONTEXT, METRICS)
    profiler.start()
    work(fake, b"one")
    profiler.stop()
    assert profiler.read() == [[None, 0.0, 2.5]]
    profiler.close()


# --- user mode --------------------------------------------------------------------------------


def test_a_range_of_several_passes_needs_as_many_runs(fake: FakeCupti, cupti: Cupti, host: rp.MetricHost) -> None:
    profiler = rp.RangeProfiler(cupti, host, CONTEXT, MANY, user=True)
    assert profiler.passes == 3
    complete = []
    for _ in range(3):
        profiler.start()
        profiler.push("graph")
        work(fake, b"one", b"two")
        profiler.pop()
        complete.append(profiler.stop())
    assert complete == [False, False, True]
    assert profiler.read() == [[value_of(metric, [b"one", b"two"]) for metric in MANY]]
    profiler.close()


def test_what_runs_outside_the_range_does_not_count(fake: FakeCupti, cupti: Cupti, host: rp.MetricHost) -> None:
    profiler = rp.RangeProfiler(cupti, host, CONTEXT, METRICS, user=True)
    profiler.start()
    work(fake, b"before")
    profiler.push("graph")
    work(fake, b"inside")
    profiler.pop()
    work(fake, b"after")
    assert profiler.stop() is True
    assert profiler.read() == [[value_of(metric, [b"inside"]) for metric in METRICS]]
    profiler.close()


# --- states and errors ------------------------------------------------------------------------


def test_a_second_session_is_refused_and_the_first_stays(fake: FakeCupti, cupti: Cupti, host: rp.MetricHost) -> None:
    first = rp.RangeProfiler(cupti, host, CONTEXT, METRICS)
    with pytest.raises(CuptiError) as caught:
        rp.RangeProfiler(cupti, host, CONTEXT, METRICS)
    assert (caught.value.code, caught.value.function) == (7, "cuptiRangeProfilerEnable")
    first.start()
    first.stop()
    first.close()
    with pytest.raises(CuptiError):
        first.start()


def test_states_are_kept_in_order(cupti: Cupti, host: rp.MetricHost) -> None:
    profiler = rp.RangeProfiler(cupti, host, CONTEXT, METRICS)
    for wrong in (profiler.stop, profiler.pop, lambda: profiler.push("in kernel mode")):
        with pytest.raises(CuptiError):
            wrong()
    profiler.start()
    for wrong in (profiler.start, profiler.read):
        with pytest.raises(CuptiError):
            wrong()
    profiler.close()


@pytest.mark.parametrize(
    "function",
    [
        "cuptiRangeProfilerGetCounterDataSize",
        "cuptiRangeProfilerCounterDataImageInitialize",
        "cuptiRangeProfilerSetConfig",
    ],
)
def test_a_session_that_cannot_be_set_up_is_given_back(
    fake: FakeCupti, cupti: Cupti, host: rp.MetricHost, function: str
) -> None:
    fake.fail(function, 8, times=1)
    with pytest.raises(CuptiError) as caught:
        rp.RangeProfiler(cupti, host, CONTEXT, METRICS)
    assert (caught.value.function, caught.value.code) == (function, 8)
    assert fake.sessions == {}
    rp.RangeProfiler(cupti, host, CONTEXT, METRICS).close()


def test_the_reason_survives_a_close_that_fails_too(fake: FakeCupti, cupti: Cupti, host: rp.MetricHost) -> None:
    fake.fail("cuptiRangeProfilerSetConfig", 35)
    fake.fail("cuptiRangeProfilerDisable", 999)
    with pytest.raises(CuptiError) as caught:
        rp.RangeProfiler(cupti, host, CONTEXT, METRICS)
    assert caught.value.function == "cuptiRangeProfilerSetConfig"


@pytest.mark.parametrize("code", sorted(fake_cupti.ERROR_CODES))
def test_every_code_is_named(fake: FakeCupti, cupti: Cupti, code: int) -> None:
    fake.fail("cuptiProfilerInitialize", code)
    with pytest.raises(CuptiError) as caught:
        rp.initialize(cupti)
    text = str(caught.value)
    assert text.startswith(f"cuptiProfilerInitialize failed: CUPTI_ERROR_{fake_cupti.ERROR_CODES[code]} ({code})")
    assert "\n" not in text
