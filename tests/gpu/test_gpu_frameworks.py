"""`recorder.measure` with each framework that is installed: all launch through the same driver, each in its own way.

A framework is a process of its own, as two of them in one share a context and its state.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SMALL, LARGE = 1 << 20, 1 << 26  # numbers of float32: 4 MiB fit into L2, 256 MiB do not
MEASURE = """
    import json, sys
    from nanalyze import recorder
    result = recorder.measure(negate, [{small}, {large}], setup=made, repetitions=8, run_dir=sys.argv[1],
                              counters=["dram_read_bytes"], progress=False)
    table = result.to_pandas()
    print("FOUND " + json.dumps([
        [row["configuration"], row["metric"], row["value"]] for row in table.to_dict("records")
    ] + [["failure", str(key), error] for key, error in result.failures.items()]))
"""
# Each defines `made(n)`, which makes the arguments, and `negate`, which launches one kernel that reads and writes them.
PROGRAMS = {
    "torch": """
        import torch
        def made(n):
            x = torch.ones(n, device="cuda")
            return x, torch.empty_like(x)
        def negate(x, y):
            torch.neg(x, out=y)
    """,
    "cupy": """
        import cupy
        def made(n):
            x = cupy.ones(n, dtype=cupy.float32)
            return x, cupy.empty_like(x)
        def negate(x, y):
            cupy.negative(x, out=y)
    """,
    "numba": """
        import numpy as np
        from numba import cuda
        @cuda.jit
        def kernel(x, y):
            i = cuda.grid(1)
            if i < x.size:
                y[i] = -x[i]
        def made(n):
            return cuda.to_device(np.ones(n, dtype=np.float32)), cuda.device_array(n, dtype=np.float32)
        def negate(x, y):
            kernel[(x.size + 255) // 256, 256](x, y)
    """,
    "jax": """
        import jax, jax.numpy as jnp
        compiled = jax.jit(jnp.negative)
        def made(n):
            return (jnp.ones(n, dtype=jnp.float32),)
        def negate(x):
            compiled(x).block_until_ready()
    """,
    "triton": """
        import torch, triton, triton.language as tl
        @triton.jit
        def kernel(x, y, n, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y + at, -tl.load(x + at, mask=at < n), mask=at < n)
        def made(n):
            x = torch.ones(n, device="cuda")
            return x, torch.empty_like(x)
        def negate(x, y):
            kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    """,
    "cuda.bindings": """
        import numpy as np
        from cuda.bindings import driver, nvrtc
        def checked(answer):
            assert int(answer[0]) == 0, answer
            return answer[1] if len(answer) == 2 else answer[1:]
        SOURCE = b'''extern "C" __global__ void negate(const float *x, float *y, size_t n) {
            size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) y[i] = -x[i];
        }'''
        checked(driver.cuInit(0))
        device = checked(driver.cuDeviceGet(0))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
        attribute = driver.CUdevice_attribute
        major = checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        program = checked(nvrtc.nvrtcCreateProgram(SOURCE, b"negate.cu", 0, [], []))
        checked(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_%d%d" % (major, minor)]))
        cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        function = checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(cubin)), b"negate"))
        def made(n):
            x, y = (checked(driver.cuMemAlloc(4 * n)) for _ in range(2))
            checked(driver.cuMemsetD32(x, 0x3F800000, n))
            values = [np.array([int(v)], dtype=np.uint64) for v in (x, y, n)]
            return values, np.array([v.ctypes.data for v in values], dtype=np.uint64), (n + 255) // 256
        def negate(values, parameters, blocks):
            checked(driver.cuLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, 0, parameters.ctypes.data, 0))
    """,
}


@pytest.mark.parametrize("framework", PROGRAMS)
def test_a_framework_is_measured(tmp_path: Path, framework: str) -> None:
    if importlib.util.find_spec(framework.partition(".")[0]) is None:
        pytest.skip(f"{framework} is not installed")
    program = textwrap.dedent(PROGRAMS[framework]) + textwrap.dedent(MEASURE.format(small=SMALL, large=LARGE))
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "run")]
    (tmp_path / "job.py").write_text(program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stdout[-500:] + done.stderr[-2000:]
    found = {(label, metric): value for label, metric, value in json.loads(line.removeprefix("FOUND "))}
    assert not [key for key in found if key[0] == "failure"], found
    labels = sorted({label for label, _ in found}, key=lambda label: int(label.rpartition("=")[2]))
    assert [found[label, "launches"] for label in labels] == [1, 1]
    # At 3 to 4.8 TB/s of DRAM, and a launch takes a microsecond at least.
    assert 2 * 4 * LARGE / 4.8e3 < found[labels[1], "total_ns"] < 2 * 4 * LARGE / 1e3
    assert 1e3 < found[labels[0], "total_ns"] < found[labels[1], "total_ns"] / 4
    assert found[labels[1], "dram_read_bytes"] == pytest.approx(4 * LARGE, rel=0.1)
