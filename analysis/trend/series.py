"""Which kernel of each run is which, and one series a kernel over all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nanalyze.analysis.compare import match
from nanalyze.analysis.compare.sample import KernelClass
from nanalyze.analysis.trend.read import Kernel, Measured, Point

JOB, KERNEL = "job", "kernel"
STEP, LAUNCH = "step", "launch"

CallSites = Callable[[int], Mapping[int, str | None]]


@dataclass
class Track:
    """One kernel through the runs: the class that it is in each, and how each pair was found where not by its id."""

    ids: list[int | None] = field(default_factory=list)
    renamed: dict[int, str] = field(default_factory=dict)

    @property
    def latest(self) -> int:
        return next(class_id for class_id in reversed(self.ids) if class_id is not None)


@dataclass(frozen=True)
class Series:
    """One figure over the runs, None in runs that lack it. `kind` is job or kernel; times are ns a step or a launch.

    Of a kernel: its share of all kernel time where it runs, its verdict and launches in each run, and in which runs
    it has another name or shape than before.
    """

    kind: str
    name: str
    values: Sequence[Measured | None]
    share: float | None = None
    verdicts: Sequence[str | None] = ()
    launches: Sequence[int | None] = ()
    launch_ns: Sequence[Measured | None] = ()
    p50_ns: Sequence[float | None] = ()
    total_ns: Sequence[int | None] = ()
    class_ids: Sequence[int | None] = ()
    renamed: Mapping[int, str] = field(default_factory=dict)


def common_step(points: Sequence[Point]) -> str | None:
    """The range that is the step of every run: the outermost such name, then the one with most time."""
    names = set.intersection(*(point.repeating() for point in points)) if points else set()
    first = points[0].steps if points else {}
    ordered = sorted(names, key=lambda name: (first[name].depth, -first[name].total_ns, name))
    return ordered[0] if ordered else None


def tracks(points: Sequence[Point], call_sites: CallSites) -> list[Track]:
    """Every kernel of any run, matched run by run as `compare.match` does: by id, then by the rules for renaming.

    `call_sites` gives, for the number of a run, where its kernels are launched; it is asked only where ids differ.
    Launches that were rolled up have lost that, so where any were, no run's counts.
    """
    if any(point.rolled_up for point in points):
        call_sites = _nowhere
    found: list[Track] = []
    for number, point in enumerate(points):
        by_id = {track.latest: track for track in found}
        before = {one: _class_of(points, by_id[one], call_sites, number) for one in by_id}
        differ = set(by_id) != set(point.kernels)
        sites = call_sites(number) if differ and found else {}
        now = {one: replace(kernel.known, range_name=sites.get(one)) for one, kernel in point.kernels.items()}
        for pair in match.pairs(before, now, list(by_id), list(point.kernels)):
            if pair.a is None:
                missing: list[int | None] = [None] * number
                found.append(Track([*missing, pair.b]))
                continue
            by_id[pair.a].ids.append(pair.b)
            if pair.b is not None and pair.how != match.SAME:
                by_id[pair.a].renamed[number] = pair.how
    return found


def _nowhere(number: int) -> Mapping[int, str | None]:
    return {}


def _class_of(points: Sequence[Point], track: Track, call_sites: CallSites, number: int) -> KernelClass:
    """What the track's kernel was when it was last seen."""
    latest = max(place for place, class_id in enumerate(track.ids) if class_id is not None)
    known = points[latest].kernels[track.latest].known
    differ = track.latest not in points[number].kernels
    return replace(known, range_name=call_sites(latest).get(track.latest)) if differ else known


def kernels(points: Sequence[Point], found: Sequence[Track], step: str | None) -> list[Series]:
    """A series a kernel, the one with the largest share of kernel time first."""
    totals = [point.total_ns for point in points]
    series = [_kernel(points, totals, track, step) for track in found]
    return sorted(series, key=lambda one: (-(one.share or 0.0), one.name, str(one.class_ids)))


def _kernel(points: Sequence[Point], totals: Sequence[int], track: Track, step: str | None) -> Series:
    own = [None if one is None else point.kernels[one] for one, point in zip(track.ids, points, strict=True)]
    values = [None if k is None else _time(k, point, step) for k, point in zip(own, points, strict=True)]
    shares = [k.total_ns / max(total, 1) for k, total in zip(own, totals, strict=True) if k is not None]
    return Series(
        KERNEL,
        points[max(n for n, k in enumerate(own) if k is not None)].kernels[track.latest].known.name,
        values,
        sum(shares) / len(shares),
        [None if k is None else k.known.verdict for k in own],
        [None if k is None else k.launches for k in own],
        [None if k is None else k.launch_ns for k in own],
        [None if k is None else k.p50_ns for k in own],
        [None if k is None else k.total_ns for k in own],
        track.ids,
        track.renamed,
    )


def _time(kernel: Kernel, point: Point, step: str | None) -> Measured:
    """A step's time in the kernel: that of a launch times launches a step; without steps that of a launch."""
    return kernel.launch_ns if step is None else kernel.launch_ns.times(kernel.launches / point.steps[step].count)


def job(points: Sequence[Point], step: str | None) -> list[Series]:
    """The job's own series: host time of a step and its time in kernels; none without steps."""
    if step is None:
        return []
    steps = [point.steps[step] for point in points]
    in_kernels = [Measured(point.total_ns / one.count) for point, one in zip(points, steps, strict=True)]
    return [
        Series(JOB, f"step {step}, on the host", [one.host_ns for one in steps]),
        Series(JOB, "all kernels", in_kernels, 1.0, total_ns=[point.total_ns for point in points]),
    ]
