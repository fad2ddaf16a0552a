"""A GPU that is divided or watched by others: green contexts, MPS, compute-sanitizer, cuda-gdb."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_gpu import read_table
from gpu_jobs import RECORD, added, both, run, write

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

GREEN = """
    from cuda.bindings import driver
    def check(answer):
        assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer
        return answer[1] if len(answer) == 2 else answer[1:]
    print(launch(1000), flush=True)          # in the primary context
    device = check(driver.cuDeviceGet(0))
    whole = check(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    part, groups, rest = check(driver.cuDevSmResourceSplitByCount(1, whole, 0, 16))
    description = check(driver.cuDevResourceGenerateDesc(part, groups))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = check(driver.cuGreenCtxCreate(description, device, flags))
    streams = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = torch.cuda.ExternalStream(int(check(driver.cuGreenCtxStreamCreate(green, streams, 0))))
    with torch.cuda.stream(stream):
        x = torch.zeros(1, device="cuda")
        for _ in range(2000):
            x.add_(1)
        stream.synchronize()
    print(int(x.item()), flush=True)
"""


def test_kernels_of_a_green_context_are_in_the_run(tmp_path: Path) -> None:
    answer = both(tmp_path, GREEN, "--samples")
    assert answer[:2] == (0, "1000\n2000\n")
    assert "nanalyze" not in answer[2]
    assert added(tmp_path / "run") == 3000


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A multi-process service of this test alone, by folders of its own."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    started = subprocess.run([control, "-d"], capture_output=True, text=True, timeout=30, check=False)
    if started.returncode:
        pytest.skip(f"MPS does not start: {started.stdout}{started.stderr}")
    yield
    subprocess.run([control], input="quit\n", capture_output=True, text=True, timeout=30, check=False)


def test_two_processes_under_mps(tmp_path: Path, mps: None) -> None:
    script = write(tmp_path, "print(launch(int(sys.argv[1])), flush=True)")
    code, _, error = run(sys.executable, script, "1")
    if code:
        pytest.skip(f"CUDA does not start under MPS here: {error.strip().splitlines()[-1]}")
    shell = f'"{sys.executable}" "{script}" 2000 & "{sys.executable}" "{script}" 3000; wait $!'
    answer = run(*RECORD, "-o", tmp_path / "run", "--", "bash", "-c", shell)
    assert answer[0] == 0
    assert sorted(answer[1].split()) == ["2000", "3000"]
    assert added(tmp_path / "run") == 5000
    assert len({row["pid"] for row in read_table(tmp_path / "run", "processes")}) == 2


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("compute-sanitizer", ["--tool", "memcheck", "--target-processes", "application-only"]),
        ("cuda-gdb", ["-batch", "-nx", "-ex", "set breakpoint pending on", "-ex", "run", "--args"]),
    ],
)
def test_a_tool_around_the_job(tmp_path: Path, tool: str, options: list[str]) -> None:
    """It keeps working, and so does the job; whether the timeline is on is up to the tool, and said."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    script = write(tmp_path, "print(launch(300), flush=True)")
    bare = run(found, *options, sys.executable, script)
    if "300" not in bare[1].splitlines():
        pytest.skip(f"{tool} does not run the job here: {(bare[1] + bare[2]).strip()[-300:]}")
    answer = run(*RECORD, "-o", tmp_path / "run", "--", found, *options, sys.executable, script)
    assert answer[0] == bare[0], answer
    assert "300" in answer[1].splitlines(), answer
    assert "Traceback" not in answer[2]
    recorded = added(tmp_path / "run") if os.path.isdir(tmp_path / "run" / "processes") else 0
    print(f"{tool}: {recorded} of 300 recorded; it said: {answer[2].strip()[-300:]}")
    assert recorded == 300 or "nanalyze" in answer[2]
