"""Record what a job's kernels do, while it runs.

    from nanalyze import recorder

    with recorder.record("run_dir"):
        with recorder.annotate("step", flops=1e12):
            train_step()

Importing this needs neither a GPU nor CUDA and changes nothing in the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nanalyze.recorder.ranges import annotate

if TYPE_CHECKING:
    from nanalyze.recorder.exact import Exact
    from nanalyze.recorder.measuring import measure
    from nanalyze.recorder.samples import Samples
    from nanalyze.recorder.session import Recorder, UnderWay

__all__ = ["Exact", "Recorder", "Samples", "annotate", "measure", "record", "start", "stop"]

_active: Any = None
_is_whole_process = False  # whether `_active` is that of `nanalyze record`, which is not the job's to stop


def __getattr__(name: str) -> Any:
    if name == "Exact":
        from nanalyze.recorder.exact import Exact

        return Exact
    if name == "Samples":
        from nanalyze.recorder.samples import Samples

        return Samples
    if name == "Recorder":
        from nanalyze.recorder.session import Recorder

        return Recorder
    if name == "measure":
        from nanalyze.recorder.measuring import measure

        return measure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def record(run_dir: str | os.PathLike[str], **settings: Any) -> Recorder | UnderWay:
    """Start recording into `run_dir`; use the result as a context manager, or `stop()` it.

    Settings: `layers` (of "timeline", "ranges", "device_state"), `flush_s` (seconds between
    writes: the most a kill -9 can cost), `exact` (an `Exact`, for hardware counters of chosen
    launches), `samples` (a `Samples`, for counters of the whole device at an interval; not together
    with `exact`), `append` (add to a run directory that already holds a run), `timestamps` (where the GPU
    writes them: "host" memory, or "device" memory, which is cheaper but has been seen to deadlock),
    `launch_times` (False leaves out `queued_ns`, and with it which kernels belong to which range),
    `nvtx` (False leaves out the ranges that the job marks with NVTX), `copies` (False leaves them out),
    `memsets` (True records memory sets too, each of which costs the GPU about 2 us), `detach` (True shuts
    CUPTI down at `stop`, so that launches cost what they did before; safe only where nothing is launched
    meanwhile; otherwise it stays attached, at up to 1 us a launch), `overhead_pct` (the CPU time that the
    recorder may take, in percent of the cores this process may use, at most 5 % of one core unless it is
    above that itself: sampling keeps to what the timeline leaves of it), `pause_pct` (the share of the time,
    in percent, for which the recorder switches itself off to measure its effect on the job's steps; 0 for
    never, and never with `exact`).

    Raises RecorderError for wrong settings, a directory that cannot be used, or a recording
    already in progress. What is missing on the machine (GPU, CUPTI, permission) raises nothing:
    it is said in one line on stderr and in the `events` table, and the job goes on. In a job that
    runs under `nanalyze record` it says so and starts nothing: that recording goes on.
    """
    global _active
    from nanalyze.recorder import lifecycle
    from nanalyze.recorder.session import Recorder
    from nanalyze.recorder.settings import Settings
    from nanalyze.rundir.errors import RecorderError

    if _active is not None and not _active.is_stopped:
        if _is_whole_process:
            from nanalyze.recorder.session import UnderWay

            return UnderWay(_active)
        raise RecorderError(f"already recording into {_active.run_dir}: stop that first")
    unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
    if unknown:
        known = ", ".join(Settings.__dataclass_fields__)
        raise RecorderError(f"unknown setting {unknown[0]!r}: the settings are {known}")
    options = Settings(**settings)
    _active = Recorder(run_dir, options)
    lifecycle.watch(_active)
    return _active  # type: ignore[no-any-return]


def start(run_dir: str | os.PathLike[str], **settings: Any) -> Recorder | UnderWay:
    """The same as `record`, for use with `stop()`."""
    return record(run_dir, **settings)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nanalyze.recorder`: the cell magic `%%nanalyze`."""
    from nanalyze.recorder import magic

    magic.register(shell)


def stop() -> None:
    """End the recording in progress; does nothing if there is none."""
    global _active
    if _is_whole_process and _active is not None and not _active.is_stopped:
        return
    recording, _active = _active, None
    if recording is not None:
        recording.stop()
