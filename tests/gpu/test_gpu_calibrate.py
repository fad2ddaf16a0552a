"""Calibration on a real GPU: `pytest -m gpu tests/gpu/test_gpu_calibrate.py`. Needs NVRTC; skipped elsewhere.

What a kernel reaches can lie below a peak but not above it, so the rates of peaks.csv are a bound from above; from
below, kernels that do nothing else must come near it. `-s` shows the table.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import nanalyze.analysis as na
from nanalyze import commands, recorder
from nanalyze.recorder import calibrate, ceilings
from nanalyze.recorder.calibrate_compile import Compiler
from nanalyze.rundir.errors import RecorderError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found() -> calibrate.Calibration:
    try:
        Compiler()
    except RecorderError as error:
        pytest.skip(str(error))
    (calibration,) = calibrate.calibrate([0])
    return calibration


def test_nothing_is_above_the_datasheet_at_the_clock_that_ran(found: calibrate.Calibration) -> None:
    assert not found.missing
    for ceiling in found.ceilings:
        peak = found.datasheet_per_s(ceiling)
        assert ceiling.low_per_s <= ceiling.per_s <= ceiling.high_per_s
        if peak is not None:
            assert ceiling.per_s < 1.01 * peak, ceiling


def test_plain_pipes_and_memory_come_near_the_datasheet(found: calibrate.Calibration) -> None:
    shares = {
        ceiling.ceiling: ceiling.per_s / peak
        for ceiling in found.ceilings
        if not ceiling.is_partial and (peak := found.datasheet_per_s(ceiling))
    }
    assert shares["fp32"] > 0.93
    assert shares["fp64"] > 0.9
    assert shares["dram_read"] > 0.8
    assert all(share > 0.75 for name, share in shares.items() if name.startswith("tensor_")), shares


def test_levels_of_the_memory_are_in_order(found: calibrate.Calibration) -> None:
    """Each level is faster than the one below it, by a factor that no noise explains."""
    rates = {ceiling.ceiling: ceiling.per_s for ceiling in found.ceilings}
    assert rates["l2_read"] > 1.2 * rates["dram_read"]
    assert rates["l1_read"] > 1.5 * rates["l2_read"]
    assert rates["shared_read"] > 1.5 * rates["l2_read"]


def test_the_clock_of_the_kernel_is_one_that_the_device_has(found: calibrate.Calibration) -> None:
    highest = found.device["sm_clock_max_hz"]
    for ceiling in found.ceilings:
        assert ceiling.sm_clock_hz is not None
        assert 0.3 * highest < ceiling.sm_clock_hz < 1.01 * highest, ceiling


def test_repetitions_agree(found: calibrate.Calibration) -> None:
    assert all(ceiling.spread < 0.15 for ceiling in found.ceilings), [(c.ceiling, c.spread) for c in found.ceilings]


def test_a_recording_holds_what_the_cache_knows(
    found: calibrate.Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ceilings.ENVIRONMENT, str(tmp_path / "ceilings.json"))
    started = time.monotonic()
    done = CliRunner().invoke(commands.main, ["doctor", "--calibrate", "--device", "0"])
    print(f"\n{done.output}\n{time.monotonic() - started:.1f} s")
    assert done.exit_code == 0, done.output
    torch = pytest.importorskip("torch")
    with recorder.record(tmp_path / "run"):
        torch.zeros(1 << 20, device="cuda").add_(1)
        torch.cuda.synchronize()
    with na.open(tmp_path / "run") as run:
        rows = run.sql("SELECT ceiling, method, per_s FROM ceilings WHERE device_id = 0 ORDER BY ALL")
        assert len(rows) == len(found.ceilings)
        assert run.sql("SELECT count(*) AS n FROM damage")["n"][0] == 0
