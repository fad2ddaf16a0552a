"""Metrics divided into groups that the GPU counts in one pass each.

Replaying a kernel warms the caches for its own next pass, so hit rates of a cold cache can be had from
first passes only: the launch is made anew, caches prepared, for each group.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanalyze.recorder import caches, device
from nanalyze.recorder import cupti as cu
from nanalyze.recorder.exact import Exact
from nanalyze.recorder.exact_layer import supported_metrics
from nanalyze.recorder.rangeprofiler import MetricHost, chip_name, initialize


def single_pass_groups(metrics: str | Sequence[str]) -> list[list[str]]:
    """The metrics that `Exact(metrics=metrics)` stands for and this GPU has, in as few groups as first-fit finds.

    A metric that takes several passes by itself is a group of its own. Needs a current CUDA context.
    Raises RecorderError.
    """
    cupti = cu.load()
    driver = device._driver()
    ordinal = caches.current_device(driver)
    initialize(cupti)
    host = MetricHost(cupti, chip_name(cupti, ordinal), int(device._value(driver.cuCtxGetCurrent())))
    try:
        wanted = supported_metrics(host, Exact(metrics=metrics).candidates())
        return _first_fit(host, wanted)
    finally:
        host.close()


def _first_fit(host: MetricHost, metrics: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for metric in metrics:
        for group in groups:
            if host.passes(host.config([*group, metric])) == 1:
                group.append(metric)
                break
        else:
            groups.append([metric])
    return groups
