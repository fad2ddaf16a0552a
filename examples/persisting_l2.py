"""An experiment: does a persisting L2 window keep a hot buffer in L2 while others stream through?

    python examples/persisting_l2.py out             # half a minute on an H200

A buffer is read, then several times L2's size streams by, then the buffer is read again; that last read is
measured, once without and once with an access policy window on the stream. Windows and the part of L2 set
aside for them are the driver's (cuStreamSetAttribute, cuCtxSetLimit); both are put back at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from nanalyze import recorder

STREAMED_MIB = 512


def checked(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code):
        raise RuntimeError(f"the CUDA driver answered {code.name}")
    return values[0] if values else None


def window(buffer: torch.Tensor | None) -> None:
    """Let accesses to `buffer` from the current stream persist in L2; None takes the window away."""
    policy = driver.CUaccessPolicyWindow()
    if buffer is not None:
        policy.base_ptr = buffer.data_ptr()
        policy.num_bytes = buffer.nbytes
        policy.hitRatio = 1.0
        policy.hitProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
        policy.missProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    value = driver.CUstreamAttrValue()
    value.accessPolicyWindow = policy
    attribute = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    checked(driver.cuStreamSetAttribute(torch.cuda.current_stream().cuda_stream, attribute, value))


def reread(hot: torch.Tensor, streamed: torch.Tensor) -> None:
    """The hot buffer read after others went through L2, without and with a window."""
    for name, held in (("plain", None), ("persisting", hot)):
        window(held)
        hot.sum()
        streamed.mul_(1.0)
        with recorder.annotate(name):
            hot.sum()
        window(None)
        checked(driver.cuCtxResetPersistingL2Cache())


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("persisting-l2")
    torch.cuda.init()
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream takes no attributes
    device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
    most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE
    aside = checked(driver.cuDeviceGetAttribute(most, device))
    print(f"L2 that can be set aside: {aside >> 20} MiB")
    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    before = checked(driver.cuCtxGetLimit(limit))
    checked(driver.cuCtxSetLimit(limit, aside))
    try:
        result = recorder.measure(
            reread,
            {"mib": [4, 16]},
            setup=lambda mib: (
                torch.randn(mib << 18, device="cuda"),
                torch.randn(STREAMED_MIB << 18, device="cuda"),
            ),
            counters=["l2_hit_pct", "dram_read_bytes"],
            run_dir=out,
        )
    finally:
        checked(driver.cuCtxSetLimit(limit, before))
    print(result.to_wide().to_string(index=False))


if __name__ == "__main__":
    main()
