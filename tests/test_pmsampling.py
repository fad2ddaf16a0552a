"""PM sampling's calls, against a fake that checks structures and states as CUPTI does."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from ctypes import c_size_t, c_void_p
from typing import Any

import fake_cupti
import fake_pm
import numpy as np
import pytest
from fake_cupti import CHIP, ERROR_CODES, METRICS_PER_PASS, PM_FUNCTIONS, FakeCupti
from fake_pm import sampled_value
from fake_structs import (
    HARDWARE_BUSY,
    INSUFFICIENT_PRIVILEGES,
    INVALID_OPERATION,
    INVALID_PARAMETER,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    UNKNOWN,
)

from nanalyze.recorder import pmsampling as pm
from nanalyze.recorder import rangeprofiler as rp
from nanalyze.recorder.cupti import Cupti, CuptiError

METRICS = ["sm__cycles_elapsed.sum", "sm__inst_executed.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"]
OTHERS = ["l1tex__t_sectors.sum"]
INTERVAL_NS = 1_000_000
STARTED_NS = 1_800_000_000_000_000_000

# *_STRUCT_SIZE of CUDA 13.0's cupti_pmsampling.h, as g++ printed them.
STRUCT_SIZES = {
    "cuptiPmSamplingSetConfig": 64,
    "cuptiPmSamplingEnable": 32,
    "cuptiPmSamplingDisable": 24,
    "cuptiPmSamplingStart": 24,
    "cuptiPmSamplingStop": 24,
    "cuptiPmSamplingDecodeData": 45,
    "cuptiPmSamplingGetCounterAvailability": 40,
    "cuptiPmSamplingGetCounterDataSize": 56,
    "cuptiPmSamplingCounterDataImageInitialize": 40,
    "cuptiPmSamplingGetCounterDataInfo": 56,
    "cuptiPmSamplingCounterDataGetSampleInfo": 64,
}


class Clock:
    """The GPU's clock."""

    def __init__(self, fake: FakeCupti) -> None:
        self.now_ns = STARTED_NS
        fake.clock_ns = lambda: self.now_ns

    def pass_samples(self, count: float) -> None:
        self.now_ns += round(count * INTERVAL_NS)


@pytest.fixture
def fake() -> Iterator[FakeCupti]:
    fake = FakeCupti()
    yield fake
    fake.close()


@pytest.fixture
def clock(fake: FakeCupti) -> Clock:
    return Clock(fake)


@pytest.fixture
def cupti(fake: FakeCupti) -> Cupti:
    return Cupti(fake.library, "fake")


@pytest.fixture
def host(cupti: Cupti) -> rp.MetricHost:
    rp.initialize(cupti)
    return rp.MetricHost(cupti, CHIP.decode(), profiler_type=pm.PM_SAMPLING)


@pytest.fixture
def sampler(cupti: Cupti, host: rp.MetricHost, clock: Clock) -> Iterator[pm.PmSampler]:
    """Configured, not started."""
    sampler = pm.PmSampler(cupti, host, 0)
    sampler.configure(METRICS, INTERVAL_NS)
    yield sampler
    sampler.close()


def raised(work: Callable[[], object]) -> tuple[str, int]:
    """Function and code of the CUPTI error that `work` raises."""
    with pytest.raises(CuptiError) as caught:
        work()
    return caught.value.function, caught.value.code


def grid(first: int, last: int) -> list[tuple[int, int]]:
    """Times of samples number `first` to `last`, counted from 0 at the start."""
    return [(STARTED_NS + n * INTERVAL_NS, STARTED_NS + (n + 1) * INTERVAL_NS) for n in range(first, last + 1)]


def times(drained: pm.Drained) -> list[tuple[int, int]]:
    return list(zip(drained.start_ns.tolist(), drained.end_ns.tolist(), strict=True))


# --- structures and states --------------------------------------------------------------------


def test_the_fake_has_the_sizes_of_the_header() -> None:
    assert {name: fake_cupti.struct_size(name) for name in PM_FUNCTIONS} == STRUCT_SIZES


@pytest.mark.parametrize("function", [name for name in PM_FUNCTIONS if not name.endswith("Availability")])
def test_a_wrong_size_is_refused(cupti: Cupti, sampler: pm.PmSampler, function: str) -> None:
    params = (ctypes.c_uint64 * 8)(STRUCT_SIZES[function] + 8, 0, sampler._session)
    assert raised(lambda: getattr(cupti, function)(params)) == (function, INVALID_PARAMETER)


def test_a_device_is_enabled_once_at_a_time(cupti: Cupti, host: rp.MetricHost, fake: FakeCupti) -> None:
    first = pm.PmSampler(cupti, host, 0)
    refused = ("cuptiPmSamplingEnable", INVALID_OPERATION)
    assert raised(lambda: pm.PmSampler(cupti, host, 0)) == refused
    other = pm.PmSampler(cupti, host, 1)
    first.close()
    again = pm.PmSampler(cupti, host, 0)
    assert {session.device for session in fake.pm_sessions.values()} == {0, 1}
    for sampler in (other, again):
        sampler.close()
    assert fake.pm_sessions == {}


def test_an_uninitialised_profiler_answers_unknown(cupti: Cupti, fake: FakeCupti) -> None:
    host = rp.MetricHost(cupti, CHIP.decode(), profiler_type=pm.PM_SAMPLING)
    assert raised(lambda: pm.PmSampler(cupti, host, 0)) == ("cuptiPmSamplingEnable", UNKNOWN)
    fake.is_cuda_initialized = False
    assert raised(lambda: rp.initialize(cupti)) == ("cuptiProfilerInitialize", NOT_INITIALIZED)


@pytest.mark.parametrize(
    ("attribute", "value", "code"),
    [("busy", {0}, HARDWARE_BUSY), ("is_privileged", False, INSUFFICIENT_PRIVILEGES)],
)
def test_a_device_that_is_not_to_be_had(
    cupti: Cupti, host: rp.MetricHost, fake: FakeCupti, attribute: str, value: Any, code: int
) -> None:
    setattr(fake, attribute, value)
    assert raised(lambda: pm.PmSampler(cupti, host, 0)) == ("cuptiPmSamplingEnable", code)


def test_start_needs_a_configuration(cupti: Cupti, host: rp.MetricHost) -> None:
    sampler = pm.PmSampler(cupti, host, 0)
    assert raised(sampler.start) == ("cuptiPmSamplingStart", INVALID_OPERATION)
    sampler.close()


def test_start_and_stop_take_turns(sampler: pm.PmSampler) -> None:
    assert raised(sampler.stop) == ("cuptiPmSamplingStop", INVALID_OPERATION)
    sampler.start()
    assert raised(sampler.start) == ("cuptiPmSamplingStart", INVALID_OPERATION)
    sampler.stop()
    sampler.start()


def test_only_a_single_pass_can_be_sampled(sampler: pm.PmSampler) -> None:
    many = [f"unit__counter_{number}.sum" for number in range(METRICS_PER_PASS + 1)]
    assert raised(lambda: sampler.configure(many, INTERVAL_NS)) == ("cuptiPmSamplingSetConfig", NOT_SUPPORTED)
    sampler.configure(many[:-1], INTERVAL_NS)


def test_the_two_profilers_do_not_take_each_others_configuration(cupti: Cupti, sampler: pm.PmSampler) -> None:
    sampler.host = rp.MetricHost(cupti, CHIP.decode())
    assert raised(lambda: sampler.configure(OTHERS, INTERVAL_NS)) == ("cuptiPmSamplingSetConfig", INVALID_PARAMETER)


def test_the_configuration_reaches_the_device(fake: FakeCupti, sampler: pm.PmSampler) -> None:
    sampler.configure(OTHERS, 250_000, buffer_bytes=1 << 20)
    session = fake.pm_session_of(0)
    assert session is not None
    assert (session.metrics, session.interval_ns, session.buffer_bytes) == (OTHERS, 250_000, 1 << 20)
    assert session.slots == pm.IMAGE_SAMPLES


def test_counter_availability_tells_what_is_missing(cupti: Cupti, host: rp.MetricHost, fake: FakeCupti) -> None:
    struct = rp.params_struct("A", ("device", c_size_t), ("imageSize", c_size_t), ("image", c_void_p))
    function = "cuptiPmSamplingGetCounterAvailability"
    fake.unavailable = {METRICS[1]}
    size = rp.call(cupti, function, struct, device=0).imageSize
    image = (ctypes.c_uint8 * size)()
    rp.call(cupti, function, struct, device=0, imageSize=size, image=ctypes.addressof(image))
    host._availability = image
    assert host.supported(METRICS) == [METRICS[0], METRICS[2]]
    pm.PmSampler(cupti, host, 0)
    assert raised(lambda: rp.call(cupti, function, struct, device=0)) == (function, INVALID_OPERATION)


# --- draining ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 253, 254, 255, 256, 257, 510, 511, 512, 700])
def test_every_sample_arrives_once_over_however_many_images(
    sampler: pm.PmSampler, clock: Clock, fake: FakeCupti, count: int
) -> None:
    sampler.start()
    clock.pass_samples(count + 1.5)  # the first is dropped, the last is not complete
    drained = sampler.drain()
    assert times(drained) == grid(1, count)
    expected = [[sampled_value(metric, *time) for metric in METRICS] for time in grid(1, count)]
    assert drained.values.shape == (count, len(METRICS))
    assert drained.values.tolist() == expected
    assert not drained.overflowed
    assert (drained.start_ns.dtype, drained.end_ns.dtype, drained.values.dtype) == (np.int64, np.int64, np.float64)
    slots = count + 1 + fake.empty_slots
    assert fake.calls["cuptiPmSamplingDecodeData"] == slots // pm.IMAGE_SAMPLES + 1
    assert sampler.drain().start_ns.tolist() == []


def test_draining_goes_on_where_it_stopped(sampler: pm.PmSampler, clock: Clock) -> None:
    sampler.start()
    seen = []
    for count in (3, 0.25, 0.5, 1.25, 300):
        clock.pass_samples(count)
        seen += times(sampler.drain())
    sampler.stop()
    assert seen + times(sampler.drain()) == grid(1, 304)


def test_what_was_counted_before_stop_can_still_be_drained(sampler: pm.PmSampler, clock: Clock) -> None:
    sampler.start()
    clock.pass_samples(5)
    sampler.stop()
    clock.pass_samples(100)
    assert times(sampler.drain()) == grid(1, 4)


@pytest.mark.parametrize("empty_slots", [0, 1, 3])
@pytest.mark.parametrize("first_start", [0, 4242, STARTED_NS - 10**10, STARTED_NS + 5, STARTED_NS + 10**12, 2**64 - 1])
def test_rubbish_slots_are_dropped(
    sampler: pm.PmSampler, clock: Clock, fake: FakeCupti, empty_slots: int, first_start: int
) -> None:
    """The first sample's start time is any number, so its length and its counters mean nothing."""
    fake.empty_slots = empty_slots
    fake.first_start = lambda now: first_start
    sampler.start()
    clock.pass_samples(3)
    assert times(sampler.drain()) == grid(1, 2)


def test_only_the_first_slot_after_each_start_is_dropped(sampler: pm.PmSampler, clock: Clock) -> None:
    sampler.start()
    assert times(sampler.drain()) == []  # rubbish, but for the first slot that ends later
    clock.pass_samples(2)
    assert times(sampler.drain()) == grid(1, 1)
    clock.pass_samples(1)
    assert times(sampler.drain()) == grid(2, 2)
    sampler.stop()
    sampler.start()
    clock.pass_samples(2)
    assert times(sampler.drain()) == grid(4, 4)


def test_slots_that_are_not_completed_are_left_alone(sampler: pm.PmSampler, clock: Clock, fake: FakeCupti) -> None:
    fake.incomplete = 2
    sampler.start()
    clock.pass_samples(4)
    assert times(sampler.drain()) == grid(1, 3)


def test_values_without_a_number_are_nan(sampler: pm.PmSampler, clock: Clock, fake: FakeCupti) -> None:
    fake.script = {METRICS[0]: math.inf, METRICS[1]: lambda start, end: math.nan if start % 2_000_000 else 7.0}
    sampler.start()
    clock.pass_samples(5)
    values = sampler.drain().values
    assert np.isnan(values[:, 0]).tolist() == [True] * 4
    assert [str(value) for value in values[:, 1]] == ["nan", "7.0", "nan", "7.0"]
    assert not np.isnan(values[:, 2]).any()


def test_another_set_has_its_own_values(sampler: pm.PmSampler, clock: Clock) -> None:
    sampler.start()
    clock.pass_samples(3)
    sampler.stop()
    sampler.drain()
    sampler.configure(OTHERS, INTERVAL_NS)
    sampler.start()
    clock.pass_samples(3)
    drained = sampler.drain()
    assert times(drained) == grid(4, 5)
    assert drained.values.tolist() == [[sampled_value(OTHERS[0], *time)] for time in grid(4, 5)]


def test_counters_that_never_complete_give_no_samples(sampler: pm.PmSampler, clock: Clock, fake: FakeCupti) -> None:
    """NVLink counters on a machine without NVLink are so."""
    fake.silent = {"nvlrx__bytes.sum"}
    sampler.configure([METRICS[0], "nvlrx__bytes.sum"], INTERVAL_NS)
    sampler.start()
    clock.pass_samples(50)
    drained = sampler.drain()
    assert (len(drained.start_ns), drained.values.shape, drained.overflowed) == (0, (0, 2), False)


def test_a_sampler_that_outruns_the_drain_does_not_keep_it(
    sampler: pm.PmSampler, clock: Clock, fake: FakeCupti
) -> None:
    """Every decode finds more than an image of new samples, as at intervals of a few microseconds."""
    sampler.start()

    def busy_clock() -> int:
        clock.pass_samples(pm.IMAGE_SAMPLES)
        return clock.now_ns

    fake.clock_ns = busy_clock
    drained = sampler.drain(most_images=3)
    assert times(drained) == grid(1, 3 * pm.IMAGE_SAMPLES - 1 - fake.empty_slots)
    fake.clock_ns = lambda: clock.now_ns
    sampler.stop()
    assert times(sampler.drain())[0] == grid(3 * pm.IMAGE_SAMPLES - 1, 3 * pm.IMAGE_SAMPLES - 1)[0]


# --- losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["code", "flag"])
def test_an_overflow_is_told_and_the_oldest_samples_are_kept(
    sampler: pm.PmSampler, clock: Clock, fake: FakeCupti, told: str
) -> None:
    fake.overflow_as = told
    sampler.configure(METRICS, INTERVAL_NS, buffer_bytes=20 * fake_pm.RECORD_BYTES)
    sampler.start()
    clock.pass_samples(30)
    first, second = sampler.drain(), sampler.drain()
    assert (first.overflowed, second.overflowed) == (True, False)
    assert times(first) + times(second) == grid(1, 18)  # two of the twenty slots are rubbish
    assert fake.pm_lost == 11
    clock.pass_samples(2)
    assert times(sampler.drain()) == grid(30, 31)


def test_an_overflow_in_a_later_image_is_told_too(sampler: pm.PmSampler, clock: Clock, fake: FakeCupti) -> None:
    sampler.start()
    clock.pass_samples(pm.IMAGE_SAMPLES)
    fake.fail("cuptiPmSamplingDecodeData", OUT_OF_MEMORY, at=2, times=1)
    drained = sampler.drain()
    assert drained.overflowed
    assert times(drained) == grid(1, pm.IMAGE_SAMPLES - 2)
    assert times(sampler.drain()) == grid(pm.IMAGE_SAMPLES - 1, pm.IMAGE_SAMPLES - 1)


def test_an_overflow_in_an_earlier_image_is_told_too(sampler: pm.PmSampler, clock: Clock, fake: FakeCupti) -> None:
    fake.overflow_as = "flag"
    room = pm.IMAGE_SAMPLES + 10
    sampler.configure(METRICS, INTERVAL_NS, buffer_bytes=room * fake_pm.RECORD_BYTES)
    sampler.start()
    clock.pass_samples(room + 50)
    drained = sampler.drain()  # the flag comes with the first of two images
    assert drained.overflowed
    assert times(drained) == grid(1, room - 2)


# --- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_started", [False, True])
def test_close_gives_the_device_back(
    cupti: Cupti, host: rp.MetricHost, fake: FakeCupti, clock: Clock, is_started: bool
) -> None:
    sampler = pm.PmSampler(cupti, host, 0)
    sampler.configure(METRICS, INTERVAL_NS)
    if is_started:
        sampler.start()
    sampler.close()
    assert fake.pm_sessions == {}
    assert fake.calls["cuptiPmSamplingStop"] == int(is_started)


def test_close_disables_also_where_stop_fails(cupti: Cupti, host: rp.MetricHost, fake: FakeCupti, clock: Clock) -> None:
    sampler = pm.PmSampler(cupti, host, 0)
    sampler.configure(METRICS, INTERVAL_NS)
    sampler.start()
    fake.fail("cuptiPmSamplingStop", 9)
    sampler.close()
    assert fake.pm_sessions == {}


# --- every function, every code ---------------------------------------------------------------

USED = [name for name in PM_FUNCTIONS if not name.endswith("Availability")]


def whole(cupti: Cupti, clock: Clock) -> pm.Drained:
    host = rp.MetricHost(cupti, CHIP.decode(), profiler_type=pm.PM_SAMPLING)
    sampler = pm.PmSampler(cupti, host, 0)
    sampler.configure(METRICS, INTERVAL_NS)
    sampler.start()
    clock.pass_samples(3)
    sampler.stop()
    drained = sampler.drain()
    sampler.close()
    return drained


@pytest.mark.parametrize("function", USED)
def test_every_failure_names_function_and_code(fake: FakeCupti, cupti: Cupti, clock: Clock, function: str) -> None:
    rp.initialize(cupti)
    for code in sorted(ERROR_CODES):
        fake.pm_sessions.clear()
        fake.heal()
        fake.fail(function, code)
        if (function, code) == ("cuptiPmSamplingDecodeData", OUT_OF_MEMORY):
            assert whole(cupti, clock).overflowed
            continue
        with pytest.raises(CuptiError) as caught:
            whole(cupti, clock)
        assert (caught.value.function, caught.value.code) == (function, code)
        assert str(caught.value).startswith(f"{function} failed: CUPTI_ERROR_{ERROR_CODES[code]} ({code})")


@pytest.mark.parametrize("function", USED)
def test_an_older_cupti_says_what_it_lacks(fake: FakeCupti, clock: Clock, function: str) -> None:
    fake.remove(function)
    cupti = Cupti(fake.library, "fake")
    rp.initialize(cupti)
    with pytest.raises(CuptiError) as caught:
        whole(cupti, clock)
    assert str(caught.value) == f"{function} failed: CUPTI_ERROR_API_NOT_IMPLEMENTED (11): use a newer CUPTI"


def test_start_times_beyond_int64_do_no_harm(sampler: pm.PmSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times come as unsigned 64-bit numbers; only those that are kept must fit the table."""
    slots = np.array([2**64 - 5, STARTED_NS, STARTED_NS + 9], dtype=np.uint64)
    ends = np.array([2**64 - 1, STARTED_NS + 9, STARTED_NS + 9], dtype=np.uint64)
    monkeypatch.setattr(sampler, "_decode", lambda: (False, False))
    monkeypatch.setattr(sampler, "_read", lambda: (slots, ends, np.zeros((3, len(METRICS)))))
    assert times(sampler.drain()) == [(STARTED_NS, STARTED_NS + 9)]
