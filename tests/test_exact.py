"""The exact layer: which launches are measured, what that costs, and that a job never notices a failure."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cupti import METRICS_PER_PASS, value_of
from fake_gpu import CALLS, CONTEXT, FakeGpu

from nanalyze.recorder import exact_layer as module
from nanalyze.recorder import ranges
from nanalyze.recorder.cupti import Cupti
from nanalyze.recorder.exact import Exact, Measurement
from nanalyze.recorder.exact_layer import ExactLayer
from nanalyze.rundir.errors import RecorderError

ONE_PASS = ["gpu__time_duration.sum", "sm__inst_executed.sum", "dram__bytes_read.sum"]
THREE_PASSES = [f"unit__counter_{number}.sum" for number in range(2 * METRICS_PER_PASS + 1)]
KERNEL_LAUNCHES = [call for call in CALLS if call.startswith("cuLaunch")]


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    yield gpu
    gpu.close()


@pytest.fixture
def layer_of(gpu: FakeGpu) -> Iterator[Callable[..., ExactLayer]]:
    """Makes started layers that measure without limit unless told otherwise, and stops them."""
    layers: list[ExactLayer] = []

    def make(**options: Any) -> ExactLayer:
        settings = {"budget_pct": 100, "metrics": ONE_PASS, "first": 1, **options}
        layer = ExactLayer(Cupti(gpu.cupti.library, "fake"), gpu.driver, Exact(**settings))
        layers.append(layer)
        layer.start()
        return layer

    yield make
    for layer in layers:
        layer.stop()
    assert gpu.cupti.sessions == {}
    assert gpu.cupti.hosts == {}
    assert gpu.cupti.subscriptions == set()


class Clock:
    """The time that the exact layer sees."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**18
        fake = SimpleNamespace(
            monotonic_ns=lambda: self.now_ns,
            monotonic=lambda: self.now_ns / 1e9,
            time_ns=lambda: self.now_ns,
        )
        patch.setattr(module, "time", fake)

    def pass_ms(self, milliseconds: float) -> None:
        self.now_ns += int(milliseconds * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def measured(layer: ExactLayer) -> list[int]:
    return [measurement.correlation_id for measurement in layer.take()[0]]


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernels": "(gemm"}, "Exact(kernels='(gemm'): not a regular expression: "),
        ({"first": -1}, "first and skip must be 0 or more"),
        ({"skip": -2}, "first and skip must be 0 or more"),
        ({"every": 0}, "every 1 or more"),
        ({"budget_pct": 0}, "Exact(budget_pct=0): must be above 0 and at most 100"),
        ({"budget_pct": 100.5}, "must be above 0 and at most 100"),
        ({"budget_pct": float("nan")}, "must be above 0 and at most 100"),
        ({"metrics": "everything"}, "Exact(metrics='everything'): give 'full', 'verdict' or a list"),
        ({"metrics": []}, "metrics"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RecorderError) as caught:
        Exact(**options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


# --- which launches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"first": 1}, [1]),
        ({"first": 3}, [1, 2, 3]),
        ({"first": 0}, []),
        ({"first": 2, "skip": 4}, [5, 6]),
        ({"first": 0, "every": 4}, [4, 8, 12]),
        ({"first": 1, "every": 5}, [1, 5, 10]),
        ({"first": 2, "skip": 3, "every": 3}, [4, 5, 6, 9, 12]),
        ({"first": 0, "every": 1, "skip": 10}, [11, 12]),
    ],
)
def test_first_skip_and_every(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], options: dict[str, Any], expected: list[int]
) -> None:
    layer = layer_of(**options)
    calls = [gpu.launch("k") for _ in range(12)]
    assert [calls.index(call) + 1 for call in measured(layer)] == expected
    assert layer.tally.measured == len(expected)


def test_each_kernel_and_shape_counts_for_itself(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of()
    different: list[dict[str, Any]] = [
        {},
        {"grid": (5, 1, 1)},
        {"grid": (4, 2, 1)},
        {"block": (64, 1, 1)},
        {"block": (128, 1, 2)},
        {"shared": 1024},
    ]
    calls = [gpu.launch(name, **about) for _ in range(2) for name in ("a", "b") for about in different]
    assert measured(layer) == calls[: 2 * len(different)]


@pytest.mark.parametrize("call", KERNEL_LAUNCHES)
def test_every_launch_call_is_measured(gpu: FakeGpu, layer_of: Callable[..., ExactLayer], call: str) -> None:
    layer = layer_of()
    about = {"grid": (7, 2, 3), "block": (32, 2, 1), "shared": 512, "stream": 0x55, "call": call}
    correlation = gpu.launch("k", **about)
    gpu.launch("k", **about)
    assert measured(layer) == [correlation]
    other = gpu.launch("k", **{**about, "grid": (7, 2, 4)})
    assert measured(layer) == [other]


def test_the_pattern_is_searched_in_the_demangled_name(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(kernels=r"scaled<\d+, double>")
    calls = [gpu.launch(name) for name in ("plain", "_Z6scaledILi3EdEvPT0_i", "_Z6scaledILi3EfEvPT0_i", "scaled")]
    assert measured(layer) == [calls[1]]


@pytest.mark.parametrize(
    "name",
    [
        "void vllm::cross_device_reduce_1stage<float, 2>(RankData*, float*, int)",
        "void deep_ep::intranode::dispatch<2, 768>(int4*, float*)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t",
        "_Z21ncclDevKernel_Generic24ncclDevKernelArgsStorage",
        "vllm::cross_device_reduce_1stage all_reduce",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel<half>",
        "nvshmemi_transfer_put",
        "mscclpp_kernel",
        "reduce_scatter_kernel",
        "all_to_all_permute",
    ],
)
def test_collectives_are_never_replayed(gpu: FakeGpu, layer_of: Callable[..., ExactLayer], name: str) -> None:
    layer = layer_of(first=100)
    for _ in range(5):
        gpu.launch(name)
    call = gpu.launch("reduce_kernel")
    assert measured(layer) == [call]
    assert layer.tally.skipped["communication"] == 1
    assert gpu.cupti.calls["cuptiRangeProfilerStart"] == 1


def test_a_kernel_with_a_hostile_name_is_measured(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of()
    calls = [gpu.launch(name) for name in (b"\xff\xfe", b"k" * 10_000, b"", b"_Z\xff")]
    assert measured(layer) == calls


# --- what is measured -------------------------------------------------------------------------


def test_a_measurement_says_what_it_saw_and_cost(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], clock: Clock
) -> None:
    layer = layer_of(metrics=THREE_PASSES)
    gpu.cupti.values = {THREE_PASSES[1]: float("nan")}
    gpu.during_launch = lambda: clock.pass_ms(190)
    correlation = gpu.launch("k")
    (measurement,), times = layer.take()
    assert measurement == Measurement(
        scope="kernel",
        correlation_id=correlation,
        device_id=0,
        measured_ns=clock.now_ns,
        metrics=THREE_PASSES,
        values=[None if metric == THREE_PASSES[1] else value_of(metric, [b"k"]) for metric in THREE_PASSES],
        passes=3,
        cost_ns=190_000_000,
    )
    assert times == [(correlation, clock.now_ns - 190_000_000)]
    rows = measurement.rows(kernel_class_id=77, graph_id=5)
    assert len(rows) == len(THREE_PASSES)
    assert rows[0] == {
        "scope": "kernel",
        "measured_ns": clock.now_ns,
        "device_id": 0,
        "correlation_id": correlation,
        "kernel_class_id": 77,
        "graph_id": None,
        "passes": 3,
        "cost_ns": 190_000_000,
        "metric": THREE_PASSES[0],
        "value": value_of(THREE_PASSES[0], [b"k"]),
    }
    assert layer.take() == ([], [])


def test_metrics_that_this_gpu_lacks_are_left_out(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    gpu.cupti.unsupported = {ONE_PASS[1]}
    layer = layer_of()
    gpu.launch("k")
    (measurement,), _ = layer.take()
    assert measurement.metrics == [ONE_PASS[0], ONE_PASS[2]]
    assert layer.failure is None


def test_no_supported_metric_at_all_ends_the_layer_with_a_reason(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer]
) -> None:
    gpu.cupti.unsupported = set(ONE_PASS)
    layer = layer_of()
    gpu.launch("k")
    assert layer.failure == "exact counters stopped: this GPU offers none of the requested metrics"
    assert measured(layer) == []


def test_each_device_has_its_own_session(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(first=2)
    for device in (0, 1, 0, 1):
        gpu.device = device
        gpu.launch(f"k{device}")
    assert layer.failure is None
    assert [(m.device_id, m.values[0]) for m in layer.take()[0]] == [
        (device, value_of(ONE_PASS[0], [b"k%d" % device])) for device in (0, 1, 0, 1)
    ]
    assert {session.context for session in gpu.cupti.sessions.values()} == {CONTEXT, CONTEXT + 1}


# --- the budget -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1.0, 10.0, 50.0])
def test_the_budget_is_kept_at_all_times(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], clock: Clock, budget: float
) -> None:
    started = clock.now_ns
    layer = layer_of(first=10**6, budget_pct=budget)
    costs: list[int] = []
    for number in range(400):
        clock.pass_ms(20)

        def replay(cost_ms: int = 100 + 50 * (number % 3)) -> None:
            session = gpu.cupti.session_of(CONTEXT)
            if session is not None and session.is_started:
                clock.pass_ms(cost_ms)

        gpu.during_launch = replay
        gpu.launch("k")
        costs += [m.cost_ns for m in layer.take()[0]]
        # The first cost is not known beforehand, and a replay may cost more than the mean so far.
        allowed = (clock.now_ns - started) * budget / 100 + 200_000_000
        assert sum(costs) <= allowed
    elapsed = clock.now_ns - started
    assert sum(costs) >= elapsed * budget / 100 * 0.7 - 200_000_000
    assert layer.tally.spent_ns == sum(costs)
    assert layer.tally.measured == len(costs)
    assert layer.tally.over_budget == 400 - len(costs)


def test_a_budget_of_all_measures_all(gpu: FakeGpu, layer_of: Callable[..., ExactLayer], clock: Clock) -> None:
    layer = layer_of(first=50, budget_pct=100)
    for _ in range(50):
        gpu.during_launch = lambda: clock.pass_ms(1000)
        gpu.launch("k")
    assert (layer.tally.measured, layer.tally.over_budget) == (50, 0)


# --- capture and other threads ----------------------------------------------------------------


@pytest.mark.parametrize("begin", ["cuStreamBeginCapture", "cuStreamBeginCapture_v2", "cuStreamBeginCaptureToGraph"])
def test_nothing_is_measured_during_a_capture(gpu: FakeGpu, layer_of: Callable[..., ExactLayer], begin: str) -> None:
    layer = layer_of()
    gpu.begin_capture(0x5, begin)
    gpu.launch("k", stream=0x5)
    gpu.launch("k", stream=0x6)  # a replay synchronises, which would break the other stream's capture
    assert measured(layer) == []
    gpu.end_capture(0x5)
    call = gpu.launch("k", stream=0x5)
    assert measured(layer) == [call]


def test_a_capture_begun_before_the_recording_is_noticed(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    gpu.capturing.add(0x5)
    layer = layer_of()
    gpu.launch("k", stream=0x5)
    assert measured(layer) == []
    gpu.end_capture(0x5)
    assert layer._captures == 0
    call = gpu.launch("k", stream=0x5)
    assert measured(layer) == [call]


def test_values_mixed_with_another_threads_launch_are_discarded(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer]
) -> None:
    layer = layer_of(first=1)

    def meanwhile() -> None:
        other = threading.Thread(target=lambda: gpu.launch("other"))
        other.start()
        other.join()

    gpu.during_launch = meanwhile
    gpu.launch("k")
    assert measured(layer) == []
    assert layer.tally.discarded == 1
    again = gpu.launch("k")
    other = gpu.launch("other")
    assert measured(layer) == [again, other]
    assert layer.failure is None


def test_many_threads_launching_never_break_the_layer(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(first=5)

    def work(number: int) -> None:
        for step in range(40):
            gpu.launch(f"k{number}", (step % 4 + 1, 1, 1))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert layer.failure is None
    done, _ = layer.take()
    assert len(done) + layer.tally.discarded == layer.tally.measured > 0
    names = dict(gpu.launches)
    for measurement in done:
        assert measurement.values == [value_of(metric, [names[measurement.correlation_id]]) for metric in ONE_PASS]
    assert not layer._lock.locked()


# --- graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuGraphLaunch", "cuGraphLaunch_ptsz"])
def test_a_graph_collects_one_pass_a_launch(gpu: FakeGpu, layer_of: Callable[..., ExactLayer], call: str) -> None:
    layer = layer_of(metrics=THREE_PASSES)
    calls = [gpu.launch_graph(0xAA, ["a", "b"], call=call) for _ in range(5)]
    (measurement,), times = layer.take()
    assert (measurement.scope, measurement.correlation_id, measurement.passes) == ("graph", calls[2], 3)
    assert measurement.values == [value_of(metric, [b"a", b"b"]) for metric in THREE_PASSES]
    assert [correlation for correlation, _ in times] == calls[:3]
    (row, *_) = measurement.rows(kernel_class_id=4, graph_id=9)
    assert (row["scope"], row["kernel_class_id"], row["graph_id"]) == ("graph", None, 9)
    assert gpu.cupti.calls["cuptiRangeProfilerStart"] == 3


def test_a_graphs_cost_is_that_of_all_its_passes(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], clock: Clock
) -> None:
    layer = layer_of(metrics=THREE_PASSES)
    for milliseconds in (30, 40, 50):
        gpu.during_launch = lambda ms=milliseconds: clock.pass_ms(ms)  # type: ignore[misc]
        gpu.launch_graph(0xAA, ["a"])
        clock.pass_ms(1000)
    (measurement,), _ = layer.take()
    assert measurement.cost_ns == 120_000_000
    assert layer.tally.spent_ns == 120_000_000


def test_a_graph_gets_no_metric_of_elapsed_time(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    metrics = [
        "gpu__time_duration.sum",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__cycles_elapsed.avg.per_second",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "dram__bytes_read.sum",
    ]
    layer = layer_of(metrics=metrics)
    gpu.launch("k")
    gpu.launch_graph(0xAA, ["a"])
    kernel, graph = layer.take()[0]
    assert kernel.metrics == metrics
    assert graph.metrics == metrics[3:]


def test_kernels_wait_while_a_graph_collects_and_are_measured_after(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer]
) -> None:
    layer = layer_of(metrics=THREE_PASSES)
    gpu.launch_graph(0xAA, ["a"])
    gpu.launch("k")
    gpu.launch_graph(0xBB, ["b"])
    gpu.launch_graph(0xAA, ["a"])
    graph = gpu.launch_graph(0xAA, ["a"])
    assert measured(layer) == [graph]
    kernel = gpu.launch("k")
    assert measured(layer) == [kernel]
    others = [gpu.launch_graph(0xBB, ["b"]) for _ in range(3)]
    assert measured(layer) == [others[-1]]
    assert layer.failure is None


def test_a_graph_that_is_not_launched_again_makes_way(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], clock: Clock
) -> None:
    layer = layer_of(metrics=THREE_PASSES)
    gpu.launch_graph(0xAA, ["a"])
    layer.tend()
    clock.pass_ms(9_000)
    layer.tend()
    gpu.launch("k")
    assert measured(layer) == []
    clock.pass_ms(1_500)
    layer.tend()
    assert layer.tally.unfinished_graphs == 1
    call = gpu.launch("k")
    assert measured(layer) == [call]
    gpu.launch_graph(0xAA, ["a"])  # not tried again
    assert len(gpu.cupti.sessions) == 1
    assert layer.tally.unfinished_graphs == 1


def test_an_unfinished_graph_at_the_end_is_counted(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(metrics=THREE_PASSES)
    gpu.launch_graph(0xAA, ["a"])
    layer.stop()
    assert layer.tally.unfinished_graphs == 1
    assert gpu.cupti.sessions == {}


def test_graphs_can_be_left_out(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(graphs=False)
    for _ in range(3):
        gpu.launch_graph(0xAA, ["a"])
    assert measured(layer) == []
    assert gpu.cupti.calls["cuptiRangeProfilerEnable"] == 0


def test_kernels_and_graphs_take_turns_with_the_session(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(first=2)
    calls = []
    for _ in range(2):
        calls += [gpu.launch("k"), gpu.launch_graph(0xAA, ["a"])]
    assert measured(layer) == calls
    assert len(gpu.cupti.sessions) == 1


# --- rest -------------------------------------------------------------------------------------


def test_callbacks_rest_while_nothing_of_interest_is_launched(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BORING_LAUNCHES", 20)
    captures = {495, 496, 497, 498, 539, 540, 720, 721}
    launches = {307, 442, 477, 478, 652, 653, 514, 515}
    layer = layer_of()
    assert gpu.cupti.subscriptions == captures | launches
    for _ in range(15):
        gpu.launch("k")
    layer.tend()
    assert gpu.cupti.subscriptions == captures | launches
    for _ in range(10):
        gpu.launch("k")
    layer.tend()
    assert gpu.cupti.subscriptions == captures
    clock.pass_ms(500)
    layer.tend()
    assert gpu.cupti.subscriptions == captures
    clock.pass_ms(600)
    layer.tend()
    assert gpu.cupti.subscriptions == captures | launches
    layer.take()
    call = gpu.launch("new")
    assert measured(layer) == [call]


def test_callbacks_never_rest_when_every_nth_launch_is_wanted(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BORING_LAUNCHES", 20)
    layer = layer_of(first=0, every=1000)
    for _ in range(30):
        gpu.launch("k")
    layer.tend()
    assert 307 in gpu.cupti.subscriptions


# --- failures ---------------------------------------------------------------------------------

SESSION_FUNCTIONS = [
    "cuptiProfilerInitialize",
    "cuptiDeviceGetChipName",
    "cuptiProfilerGetCounterAvailability",
    "cuptiProfilerHostInitialize",
    "cuptiProfilerHostGetNumOfPasses",
    "cuptiRangeProfilerEnable",
    "cuptiRangeProfilerGetCounterDataSize",
    "cuptiRangeProfilerCounterDataImageInitialize",
    "cuptiRangeProfilerSetConfig",
    "cuptiRangeProfilerStart",
    "cuptiRangeProfilerStop",
    "cuptiRangeProfilerDecodeData",
    "cuptiRangeProfilerGetCounterDataInfo",
    "cuptiProfilerHostEvaluateToGpuValues",
]


@pytest.mark.parametrize("function", SESSION_FUNCTIONS)
def test_a_failure_ends_the_layer_and_not_the_job(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], function: str
) -> None:
    gpu.cupti.fail(function, 35)
    layer = layer_of()
    for _ in range(3):
        gpu.launch("k")
    assert layer.failure is not None
    assert layer.failure.startswith(f"exact counters stopped: {function} failed: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in layer.failure
    assert measured(layer) == []
    calls = gpu.cupti.calls.copy()
    gpu.launch("another")
    assert gpu.cupti.calls == calls  # a layer that failed leaves the profiler alone
    assert not layer._lock.locked()


@pytest.mark.parametrize(
    "function", [*SESSION_FUNCTIONS[-6:], "cuptiRangeProfilerPushRange", "cuptiRangeProfilerPopRange"]
)
def test_a_failure_within_a_graph_measurement_ends_the_layer(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], function: str
) -> None:
    layer = layer_of(metrics=THREE_PASSES)
    gpu.cupti.fail(function, 999)
    for _ in range(4):
        gpu.launch_graph(0xAA, ["a"])
    assert layer.failure is not None
    assert layer.failure.startswith(f"exact counters stopped: {function} failed: CUPTI_ERROR_UNKNOWN (999)")
    assert not layer._lock.locked()


def test_a_failure_in_mid_measurement_keeps_what_was_measured(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer]
) -> None:
    layer = layer_of(first=9)
    gpu.cupti.fail("cuptiRangeProfilerStop", 9, at=3)
    calls = [gpu.launch("k") for _ in range(5)]
    assert measured(layer) == calls[:2]
    assert layer.tally.measured == 2
    assert layer.failure is not None


def test_a_thread_without_a_context_ends_the_layer_with_a_reason(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer]
) -> None:
    layer = layer_of()
    layer._driver = SimpleNamespace(
        cuStreamIsCapturing=gpu.driver.cuStreamIsCapturing, cuCtxGetDevice=lambda ordinal: 201
    )
    gpu.launch("k")
    assert layer.failure == "exact counters stopped: the launching thread has no current CUDA context"


def test_another_subscriber_is_said_at_the_start(gpu: FakeGpu) -> None:
    cupti = Cupti(gpu.cupti.library, "fake")
    first = ExactLayer(cupti, gpu.driver, Exact())
    first.start()
    second = ExactLayer(cupti, gpu.driver, Exact())
    with pytest.raises(RecorderError) as caught:
        second.start()
    assert "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39): another profiler" in str(caught.value)
    second.stop()
    gpu.launch("k")
    assert gpu.cupti.subscriptions
    first.stop()
    assert not gpu.cupti.subscriptions


def test_a_start_that_fails_half_way_unsubscribes(gpu: FakeGpu) -> None:
    gpu.cupti.fail("cuptiEnableCallback", 1, at=3)
    layer = ExactLayer(Cupti(gpu.cupti.library, "fake"), gpu.driver, Exact())
    with pytest.raises(RecorderError):
        layer.start()
    assert gpu.cupti.subscriptions == set()


def test_stop_waits_for_a_measurement_only_so_long(
    gpu: FakeGpu, layer_of: Callable[..., ExactLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_PATIENCE_S", 0.05)
    layer = layer_of()
    gpu.during_launch = layer.stop  # from within the launch that is being measured
    gpu.launch("k")
    assert gpu.cupti.subscriptions == set()
    assert layer._running is not None  # its exit was never seen
    layer._lock.release()


@pytest.mark.parametrize("function", ["cuptiUnsubscribe", "cuptiRangeProfilerDisable", "cuptiProfilerHostDeinitialize"])
def test_stop_never_raises(gpu: FakeGpu, function: str) -> None:
    layer = ExactLayer(Cupti(gpu.cupti.library, "fake"), gpu.driver, Exact(budget_pct=100, metrics=ONE_PASS))
    layer.start()
    gpu.launch("k")
    gpu.cupti.fail(function, 999)
    layer.stop()
    assert len(measured(layer)) == 1


# --- filters ----------------------------------------------------------------------------------


class Nvtx:
    """Calls of NVTX as CUPTI hands them to a subscriber: id, parameters, result."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self._kept: list[Any] = []

    def call(self, cbid: int, *words: int, result: int | None = None) -> bool:
        params = (ctypes.c_uint64 * max(1, len(words)))(*words)
        value = ctypes.c_uint64(result or 0)
        data = (ctypes.c_void_p * 3)(None, ctypes.addressof(params), ctypes.addressof(value) if result else None)
        self._kept += [params, value, data]
        return self.gpu.cupti.deliver_nvtx(cbid, ctypes.addressof(data))

    def text(self, text: bytes) -> int:
        self._kept.append(ctypes.create_string_buffer(text))
        return ctypes.addressof(self._kept[-1])

    def attributes(self, kind: int, message: int) -> int:
        """nvtxEventAttributes_v2 with a message of `kind`: 1 for ASCII, 3 for a registered string."""
        self._kept.append(
            ctypes.create_string_buffer(struct.pack("<HHIiIiiQiiQ", 2, 48, 0, 0, 0, 0, 0, 0, kind, 0, message))
        )
        return ctypes.addressof(self._kept[-1])

    def push(self, name: bytes) -> None:
        assert self.call(8, self.text(name))

    def pop(self) -> None:
        assert self.call(11, 0)


def test_kernels_can_be_left_out_by_name(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(kernels="gemm|copy", exclude="^gemm_small")
    calls = [gpu.launch(name) for name in ("gemm_large", "gemm_small", "other", "copy")]
    assert measured(layer) == [calls[0], calls[3]]


def test_only_the_first_seconds_are_measured(gpu: FakeGpu, layer_of: Callable[..., ExactLayer], clock: Clock) -> None:
    layer = layer_of(seconds=2.0, first=100, every=1)
    first = gpu.launch("k")
    clock.pass_ms(1900)
    second = gpu.launch("k")
    clock.pass_ms(200)
    gpu.launch("k")
    assert measured(layer) == [first, second]
    layer.tend()
    assert not gpu.cupti.subscriptions & {CALLS[name] for name in KERNEL_LAUNCHES}  # launches cost nothing again
    clock.pass_ms(60_000)
    layer.tend()
    assert not gpu.cupti.subscriptions & {CALLS[name] for name in KERNEL_LAUNCHES}


@pytest.fixture
def log() -> Iterator[ranges.RangeLog]:
    log = ranges.RangeLog()
    ranges.set_log(log)
    yield log
    ranges.set_log(None)


@pytest.mark.usefixtures("log")
def test_only_launches_within_a_range_are_measured(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(ranges="^step", first=2, skip=1)
    gpu.launch("k")
    with ranges.annotate("other"):
        gpu.launch("k")
    with ranges.annotate("step 1"), ranges.annotate("inner"):
        gpu.launch("k")  # the one that is skipped: the first within the range
        inside = [gpu.launch("k")]
        worker = threading.Thread(target=lambda: inside.append(gpu.launch("k")))  # as autograd's
        worker.start()
        worker.join()
        gpu.launch("k")
    gpu.launch("k")
    assert measured(layer) == inside


def test_nvtx_ranges_choose_launches_too(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer, nvtx = layer_of(ranges="forward|model", first=100), Nvtx(gpu)
    assert nvtx.call(39, 0xD, nvtx.text(b"model"), result=0x51)
    assert nvtx.call(39, 0xD, nvtx.text(b"else"), result=0x52)
    inside = []
    nvtx.pop()  # of a range opened before
    gpu.launch("k")
    nvtx.push(b"forward")
    inside.append(gpu.launch("k"))
    nvtx.push(b"deeper")
    inside.append(gpu.launch("k"))
    nvtx.pop()
    nvtx.pop()
    gpu.launch("k")
    nvtx.call(33, 0xD, nvtx.attributes(3, 0x51))  # a domain's push, with a registered string
    nvtx.push(b"another domain")
    nvtx.pop()
    inside.append(gpu.launch("k"))
    nvtx.call(34, 0xD)
    nvtx.call(33, 0xD, nvtx.attributes(3, 0x52))
    nvtx.call(33, 0xD, nvtx.attributes(3, 0x99))  # registered before anybody listened
    nvtx.call(33, 0xD, 0)
    gpu.launch("k")
    nvtx.call(10, nvtx.attributes(1, nvtx.text(b"forward")))
    inside.append(gpu.launch("k"))
    nvtx.call(11, 0)
    gpu.launch("k")
    nvtx.call(4, nvtx.text(b"forward pass"), result=77)
    nvtx.call(31, 0xD, nvtx.attributes(1, nvtx.text(b"forward too")), result=78)
    nvtx.call(7, 77)
    inside.append(gpu.launch("k"))
    nvtx.call(32, 0xD, 78)
    gpu.launch("k")
    assert measured(layer) == inside
    assert len(inside) == 5


def test_a_push_in_one_thread_is_not_popped_by_another(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer, nvtx = layer_of(ranges="forward", first=100), Nvtx(gpu)
    nvtx.push(b"forward")
    worker = threading.Thread(target=nvtx.pop)
    worker.start()
    worker.join()
    inside = gpu.launch("k")
    nvtx.pop()
    gpu.launch("k")
    assert measured(layer) == [inside]


def test_graphs_are_measured_within_a_range_only(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer, nvtx = layer_of(ranges="forward"), Nvtx(gpu)
    gpu.launch_graph(0xA, ["n"])
    nvtx.push(b"forward")
    inside = gpu.launch_graph(0xA, ["n"])
    assert measured(layer) == [inside]


def test_without_that_filter_nobody_follows_nvtx(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer_of(kernels="x")
    assert gpu.cupti.nvtx_subscriptions == set()


def test_callbacks_do_not_rest_while_a_range_is_awaited(gpu: FakeGpu, layer_of: Callable[..., ExactLayer]) -> None:
    layer = layer_of(ranges="rare")
    for _ in range(module.BORING_LAUNCHES + 1):
        layer._boring += 1
    layer.tend()
    assert CALLS["cuLaunchKernel"] in gpu.cupti.subscriptions


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"exclude": "("}, "Exact(exclude='('): not a regular expression"),
        ({"ranges": "["}, "Exact(ranges='['): not a regular expression"),
        ({"seconds": 0}, "Exact(seconds=0): must be above 0"),
        ({"seconds": -1.0}, "Exact(seconds=-1.0): must be above 0"),
    ],
)
def test_filters_that_mean_nothing_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecorderError) as caught:
        Exact(**options)
    assert str(caught.value).startswith(problem)
