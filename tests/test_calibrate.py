"""Calibration: its kernels compile for real where NVRTC is installed; all else runs on the fake driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_calibrate
import pytest
from click.testing import CliRunner, Result
from fake_calibrate import CalibrationDriver, FakeCompiler
from fake_gpu import UUID_TEXT, FakeGpu, read_table, shard_paths

import nanalyze.analysis as na
from nanalyze import commands, recorder
from nanalyze.recorder import calibrate, calibrate_kernels, ceilings
from nanalyze.recorder.calibrate_compile import Compiler
from nanalyze.recorder.ceilings import Ceiling
from nanalyze.rundir.errors import RecorderError

UUID = f"GPU-{UUID_TEXT}"


def nvrtc() -> Compiler:
    try:
        return Compiler()
    except RecorderError as error:
        pytest.skip(f"needs NVRTC (pip install nvidia-cuda-nvrtc): {error}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    fake.install(monkeypatch)
    monkeypatch.setattr(calibrate, "Compiler", FakeCompiler)
    monkeypatch.setattr(calibrate, "WARM_UP_S", 0.0)
    monkeypatch.setenv(ceilings.ENVIRONMENT, str(tmp_path / "cache" / "ceilings.json"))
    yield fake
    fake.close()


@pytest.fixture
def driver(gpu: FakeGpu) -> CalibrationDriver:
    return fake_calibrate.install(gpu)


def a_ceiling(name: str = "fp32", per_s: float = 6e13, measured_ns: int = 5) -> Ceiling:
    return Ceiling(name, "FFMA", "FLOP/s", per_s, 0.99 * per_s, 1.01 * per_s, 9, False, measured_ns, 1_755_000_000)


def run_doctor(*words: str | Path) -> Result:
    return CliRunner().invoke(commands.main, ["doctor", "--calibrate", *map(str, words)])


# --- kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_kernel_compiles_for_its_architecture(cc: tuple[int, int]) -> None:
    compiler = nvrtc()
    for probe in calibrate_kernels.probes(*cc):
        if "n256" not in probe.method or probe.ceiling == "tensor_bf16":  # half a second each
            image = compiler.compile(probe.source, *cc, probe.architecture_suffix)
            assert image.startswith(b"\x7fELF"), (cc, probe.ceiling)


def test_an_architecture_newer_than_nvrtc_gets_ptx_of_the_newest_it_knows() -> None:
    compiler = nvrtc()
    probe = calibrate_kernels.probes(99, 0)[0]
    image = compiler.compile(probe.source, 99, 0)
    assert b".target sm_" in image
    assert image.endswith(b"\0")


def test_a_kernel_that_does_not_compile_is_explained_by_one_line_of_the_log() -> None:
    with pytest.raises(RecorderError, match=r"^NVRTC [\d.]+ cannot compile for sm_90: .*error.*$"):
        nvrtc().compile("int x = no_such_thing;", 9, 0)


def test_mma_sync_counts_as_partial_where_the_full_rate_needs_other_instructions() -> None:
    def partial(major: int, minor: int) -> set[str]:
        return {probe.ceiling for probe in calibrate_kernels.probes(major, minor) if probe.is_partial}

    narrow = {"tensor_fp16", "tensor_bf16", "tensor_tf32", "tensor_fp8", "tensor_int8"}
    assert partial(9, 0) == partial(10, 0) == narrow
    assert partial(8, 0) == partial(8, 9) == partial(12, 0) == set()
    whole = {p.ceiling for p in calibrate_kernels.probes(9, 0) if p.method.startswith("wgmma")}
    assert whole == narrow


@pytest.mark.parametrize(
    ("cc", "ceiling", "method", "work"),
    [
        ((8, 0), "fp32", "FFMA", 2 * 8 * 16),
        ((8, 0), "fp16", "HFMA2", 4 * 8 * 16),
        ((8, 0), "tensor_fp16", "mma.sync m16n8k16", 2 * 16 * 8 * 16 * 16 // 32),
        ((9, 0), "tensor_bf16", "wgmma m64n256k16", 2 * 64 * 256 * 16 * 4 // 128),
        ((9, 0), "l1_read", "ld.ca", 8 * 16),
    ],
)
def test_the_work_of_a_thread_is_what_its_source_says(
    cc: tuple[int, int], ceiling: str, method: str, work: int
) -> None:
    (probe,) = [p for p in calibrate_kernels.probes(*cc) if (p.ceiling, p.method) == (ceiling, method)]
    assert probe.work == work
    calls = probe.source.count("asm volatile(") - 2  # the two clocks
    repeated = 16 if method in ("FFMA", "HFMA2") else 4 if method.startswith("mma") else 1
    for_each = {"FFMA": 2, "HFMA2": 4, "mma.sync m16n8k16": 128, "ld.ca": 16}
    if method in for_each:
        assert calls * repeated * for_each[method] == work


# --- measuring ---------------------------------------------------------------------------------


def test_each_ceiling_is_its_work_over_its_time(driver: CalibrationDriver) -> None:
    (found,) = calibrate.calibrate()
    assert [(c.ceiling, c.method) for c in found.ceilings] == [(p.ceiling, p.method) for p in fake_calibrate.PROBES]
    for ceiling in found.ceilings:
        assert ceiling.per_s == pytest.approx(fake_calibrate.RATE, rel=1e-3), ceiling.ceiling
        assert ceiling.sm_clock_hz == pytest.approx(1_755_000_000, rel=1e-6)
        assert (ceiling.memory_clock_hz, ceiling.throttle_reasons) == (3_201_000_000, 4)
        assert ceiling.repetitions == calibrate.REPETITIONS
    assert found.missing == {}


def test_launches_are_made_long_enough_to_time(driver: CalibrationDriver) -> None:
    calibrate.calibrate()
    last = {probe.method + probe.ceiling: (probe, n, count) for probe, n, count in driver.launches}
    for probe, iterations, count in last.values():
        seconds = driver_seconds(probe, iterations, count)
        assert calibrate.TARGET_S / 2 < seconds < 1.5 * calibrate.TARGET_S, probe.ceiling


def driver_seconds(probe: calibrate_kernels.Probe, iterations: int, count: int) -> float:
    grid = 132 * min(2048 // probe.block, probe.blocks_per_sm)
    copied = 2 if probe.ceiling == "dram_copy" else 1
    work = probe.work * grid * probe.block if probe.work else count * 16 * copied
    return work * iterations / fake_calibrate.RATE


def test_regions_fit_their_level(driver: CalibrationDriver) -> None:
    calibrate.calibrate()
    count = {probe.ceiling: count for probe, _, count in driver.launches}
    assert count["l2_read"] * 16 == 8 << 20  # the largest power of two within a quarter of 60 MiB
    assert count["l1_read"] * 16 == 32768
    assert count["dram_read"] * 16 > 20 * 60 << 20
    assert count["dram_read"] % (132 * 8 * 256 * 8) == 0


def test_one_slow_launch_widens_the_spread_and_leaves_the_median(driver: CalibrationDriver) -> None:
    driver.slow = lambda launch: 2.0 if driver.launches[-1][0].ceiling == "fp32" and launch == 8 else 1.0
    (found,) = calibrate.calibrate()
    fp32 = found.ceilings[0]
    assert fp32.per_s == pytest.approx(fake_calibrate.RATE, rel=1e-3)
    assert fp32.low_per_s == pytest.approx(fake_calibrate.RATE / 2, rel=1e-3)
    assert fp32.spread == pytest.approx(0.5, rel=1e-2)


def test_everything_is_given_back(driver: CalibrationDriver) -> None:
    calibrate.calibrate()
    assert (driver.held, driver.opened, driver.bindings.retained, driver.bindings.current) == (set(), 0, 0, [])


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuEventCreate", "cuModuleLoadData", "cuLaunchKernel"])
def test_a_driver_that_fails_leaves_nothing_behind(driver: CalibrationDriver, function: str) -> None:
    driver.bindings.codes = {function: 2}
    answered = "the CUDA driver answered CUDA_ERROR_2"
    if function in ("cuMemAlloc", "cuEventCreate"):
        with pytest.raises(RecorderError, match=answered):
            calibrate.calibrate()
    else:
        (found,) = calibrate.calibrate()
        assert (found.ceilings, set(found.missing.values())) == ([], {answered})
    assert driver.opened == 0
    assert (driver.bindings.retained, driver.bindings.current) == (0, [])


def test_what_does_not_compile_is_missing_and_the_rest_is_measured(
    driver: CalibrationDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCompiler, "broken", frozenset({"tensor_fp8"}))
    done = run_doctor()
    assert done.exit_code == 0
    assert "not measured: tensor_fp8 (wgmma m64n256k32): NVRTC 13.0 cannot compile" in done.output
    assert "tensor_fp16" in done.output


def test_too_little_free_memory_is_refused_with_the_remedy(driver: CalibrationDriver) -> None:
    driver.free_bytes = 100 << 20
    with pytest.raises(RecorderError, match=r"^NVIDIA H200: 100 MiB of its memory are free, 256 are needed: "):
        calibrate.calibrate()


def test_a_device_that_does_not_exist_is_refused(driver: CalibrationDriver) -> None:
    with pytest.raises(RecorderError, match="device 3 does not exist: this process sees devices 0 to 0"):
        calibrate.calibrate([3])


def test_a_share_of_the_datasheet_is_at_the_clock_that_ran(driver: CalibrationDriver) -> None:
    (found,) = calibrate.calibrate()
    by_name = {ceiling.ceiling: ceiling for ceiling in found.ceilings}
    hertz = by_name["fp32"].sm_clock_hz
    assert hertz is not None
    assert found.datasheet_per_s(by_name["fp32"]) == 256 * 132 * hertz
    assert found.datasheet_per_s(by_name["tensor_bf16"]) == 4096 * 132 * by_name["tensor_bf16"].sm_clock_hz
    assert found.datasheet_per_s(by_name["tensor_int8"]) == 8192 * 132 * by_name["tensor_int8"].sm_clock_hz
    assert found.datasheet_per_s(by_name["dram_read"]) == 2 * 3_201_000_000 * 6144 / 8
    assert found.datasheet_per_s(by_name["int32"]) is None
    assert found.datasheet_per_s(by_name["l2_read"]) is None


# --- keeping -----------------------------------------------------------------------------------


def test_the_cache_keeps_devices_apart_and_replaces_what_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "ceilings.json"
    ceilings.write(path, {"GPU-1": [a_ceiling()], "GPU-2": [a_ceiling("fp64")]})
    ceilings.write(path, {"GPU-1": [a_ceiling(per_s=5e13)]})
    found = ceilings.read(path)
    assert found == {"GPU-1": [a_ceiling(per_s=5e13)], "GPU-2": [a_ceiling("fp64")]}
    assert [entry.name for entry in path.parent.iterdir()] == ["ceilings.json"]


def test_no_file_is_no_ceilings(tmp_path: Path) -> None:
    assert ceilings.read(tmp_path / "none.json") == {}


def damaged(**changes: object) -> str:
    row = {**a_ceiling().__dict__, **changes}
    return json.dumps({"format": ceilings.FORMAT, "version": 1, "devices": {"GPU-1": [row]}})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": "nanalyze ceilings", "version": 2, "devices": {}}', "[" * 100_000,
        '{"format": "nanalyze ceilings", "version": 1, "devices": []}',
        damaged(per_s=float("nan")), damaged(per_s=-1.0), damaged(per_s="6"), damaged(ceiling=None),
        damaged(is_partial=1), damaged(sm_clock_hz=1 << 70), damaged(sm_clock_hz=1.5), damaged(repetitions=None),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(RecorderError, match=r"holds no ceilings of version 1: remove it and run nanalyze doctor"):
        ceilings.read(path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NANALYZE_CEILINGS": "/x/y.json"}, "/x/y.json"),
        ({"XDG_CACHE_HOME": "/cache", "NANALYZE_CEILINGS": ""}, "/cache/nanalyze/ceilings.json"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.cache/nanalyze/ceilings.json"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ceilings.ENVIRONMENT, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(ceilings.cache_file()) == expected


# --- into runs ---------------------------------------------------------------------------------


def record(gpu: FakeGpu, run_dir: Path) -> Path:
    with recorder.record(run_dir, layers=("timeline",), flush_s=60):
        gpu.use(0)
        gpu.launch()
    return run_dir


def test_a_recording_copies_the_ceilings_of_its_devices_and_no_others(gpu: FakeGpu, tmp_path: Path) -> None:
    ceilings.write(ceilings.cache_file(), {UUID: [a_ceiling()], "GPU-other": [a_ceiling("fp64")]})
    rows = read_table(record(gpu, tmp_path / "run"), "ceilings")
    assert [(row["device_id"], row["ceiling"], row["per_s"]) for row in rows] == [(0, "fp32", 6e13)]


def test_a_damaged_cache_costs_a_recording_nothing_but_a_line(gpu: FakeGpu, tmp_path: Path) -> None:
    ceilings.cache_file().parent.mkdir(parents=True)
    ceilings.cache_file().write_text("no")
    run_dir = record(gpu, tmp_path / "run")
    assert len(read_table(run_dir, "devices")) == 1
    assert shard_paths(run_dir, "ceilings") == []
    (message,) = [row["message"] for row in read_table(run_dir, "events") if "ceilings" in row["message"]]
    assert message.endswith("remove it and run nanalyze doctor --calibrate again")


def test_ceilings_added_later_count_and_the_run_stays_whole(
    gpu: FakeGpu, driver: CalibrationDriver, tmp_path: Path
) -> None:
    run_dir = record(gpu, tmp_path / "run")
    first = run_doctor("-o", run_dir)
    assert first.exit_code == 0, first.output
    assert first.output.splitlines()[-1] == f"added to 1 process of {run_dir}"
    ceilings.add_to_run(run_dir, {UUID: [a_ceiling(per_s=7e13, measured_ns=2**62)]})
    with na.open(run_dir) as run:
        assert run.sql("SELECT * FROM damage").empty
        rows = run.sql("SELECT ceiling, per_s FROM ceilings WHERE method = 'FFMA'")
        assert rows.to_dict("records") == [{"ceiling": "fp32", "per_s": 7e13}]
        assert run.sql("SELECT count(*) AS n FROM ceilings")["n"][0] == len(fake_calibrate.PROBES)


def test_a_run_of_other_gpus_is_refused(gpu: FakeGpu, tmp_path: Path) -> None:
    run_dir = record(gpu, tmp_path / "run")
    with pytest.raises(RecorderError, match="none of its processes used the GPUs that were measured"):
        ceilings.add_to_run(run_dir, {"GPU-other": [a_ceiling()]})
    assert shard_paths(run_dir, "ceilings") == []


# --- the command -------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_keeps_it(gpu: FakeGpu, driver: CalibrationDriver) -> None:
    done = run_doctor()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"NVIDIA H200 ({UUID}), 132 SMs, SM clock at most 1980 MHz"
    assert lines[1].split() == ["ceiling", "method", "median", "spread", "SM", "clock", "of", "datasheet"]
    assert lines[2].split() == ["fp32", "FFMA", "1.00", "TFLOP/s", "0.0", "%", "1755", "MHz!", "1.7", "%"]
    assert any("mma.sync m16n8k16" in line and "TFLOP/s*" in line for line in lines)
    assert "* mma.sync reaches only part of the tensor pipe here: no peak, whatever it shows" in lines
    assert lines[-1] == f"kept in {ceilings.cache_file()}: later recordings on this GPU hold them"
    assert [c.ceiling for c in ceilings.read(ceilings.cache_file())[UUID]] == [p.ceiling for p in fake_calibrate.PROBES]


def test_json_holds_the_same_numbers(gpu: FakeGpu, driver: CalibrationDriver, tmp_path: Path) -> None:
    done = run_doctor("--json", "-o", tmp_path / "mine.json")
    rows = json.loads(done.stdout)
    assert rows[0]["uuid"] == UUID
    assert [replace(c) for c in ceilings.read(tmp_path / "mine.json")[UUID]] == [
        Ceiling(**{name: value for name, value in row.items() if name != "uuid"}) for row in rows
    ]
    assert not ceilings.cache_file().exists()


def test_a_directory_that_is_no_run_is_refused_before_anything_is_measured(
    driver: CalibrationDriver, tmp_path: Path
) -> None:
    done = run_doctor("-o", tmp_path)
    assert done.exit_code == 1
    assert "is empty: nothing was recorded into it" in done.output
    assert driver.launches == []


def test_its_options_go_with_calibrate_only() -> None:
    done = CliRunner().invoke(commands.main, ["doctor", "-o", "x.json"])
    assert (done.exit_code, "-o and --device go with --calibrate" in done.output) == (2, True)
