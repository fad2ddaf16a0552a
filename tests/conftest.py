"""Fixtures and rules for every test.

Tests marked `gpu` run where the driver finds a device and are skipped elsewhere. Tests marked
`own_process` run in a `pytest` of their own.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

IS_OWN_PROCESS = "PYTEST_OWN_PROCESS"  # set where a test marked own_process has got its process


@cache
def gpu_count() -> int:
    """GPUs that the CUDA driver finds; 0 without a driver."""
    name = ctypes.util.find_library("cuda") or "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake GPU in place of the machine's, and no recording left when the test ends."""
    from fake_gpu import FakeGpu

    from nanalyze import recorder

    gpu = FakeGpu()
    gpu.install(monkeypatch)
    yield gpu
    recorder.stop()
    gpu.close()


@pytest.fixture
def measuring_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A fake GPU whose work takes the time it is told; no launcher's variables, files and locks in `tmp_path`."""
    from fake_measuring import MeasuringGpu

    from nanalyze import recorder

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NANALYZE_LOCK_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    gpu = MeasuringGpu()
    gpu.install(monkeypatch)
    yield gpu
    recorder.stop()
    gpu.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("nanalyze")]


def pytest_configure() -> None:
    """Let signals end what tests start: a shell makes its background jobs ignore Ctrl-C, nohup hang-ups, for good."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_OWN_PROCESS not in os.environ:
        items[:] = [OwnProcess.of(item) if item.get_closest_marker("own_process") else item for item in items]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or gpu_count():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU with its driver"))


class OwnProcess(pytest.Item):
    """Stands for a test that a `pytest` of its own runs; it needs no fixtures here, so none are made."""

    original: pytest.Item

    @classmethod
    def of(cls, item: pytest.Item) -> OwnProcess:
        stand_in: OwnProcess = cls.from_parent(item.parent, name=item.name)
        stand_in.original = item
        for mark in item.own_markers:
            stand_in.add_marker(getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs))
        return stand_in

    def runtest(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.xml"
            # -P: -m would put this folder on the path, where an installed package shall be tested.
            command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={results}"]
            done = subprocess.run(
                [*command, self.nodeid],
                cwd=self.config.rootpath,
                env={**os.environ, IS_OWN_PROCESS: "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
                timeout=600,
            )
            cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
        if done.returncode or len(cases) != 1:
            raise OwnProcessFailed(f"exit code {done.returncode}\n{done.stdout}")
        skipped = cases[0].find("skipped")
        if skipped is not None and skipped.get("type") == "pytest.skip":
            pytest.skip(skipped.get("message", ""))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, OwnProcessFailed):
            return f"in a process of its own: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self.original.reportinfo()


class OwnProcessFailed(Exception):
    """A test failed in its own process; the message is what pytest printed there."""
