"""Fixtures and rules for every test.

Tests marked `gpu` run where the driver finds a device and are skipped elsewhere.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache

import pytest


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or gpu_count():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU with its driver"))
