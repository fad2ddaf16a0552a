"""Short pauses of the recorder at random moments, by which a recording measures its own effect.

Steps of the job inside a pause ran without the recorder, those just before and after it with it; the
analysis compares them (`analysis/overhead.py`). Only a job with steps pauses it: a range that repeats,
short enough for several to fit into a pause. Everything here runs on the recorder's own thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nanalyze.recorder.samples import SamplesLayer
    from nanalyze.recorder.timeline import Timeline

STEPS_A_PAUSE = 10
SHORTEST_S = 0.1
LONGEST_S = 10.0
LONGEST_STEP_S = LONGEST_S / 4  # three whole ones in a pause of four, however they lie
LEAST_REPEATS = 3  # of a range, before it counts as a step
MOST_NAMES = 4_096  # a job may give each step a name of its own, without end
HOLD_PATIENCE_S = 2.0  # for the samples layer to close its window
COMPLETE_PATIENCE_S = 15.0  # a quiet job's records come with the writes, flush_s apart


@dataclass
class _Name:
    """Ranges of one name at one level: how many were closed, and their length in all."""

    count: float = 0.0
    total_ns: float = 0.0


class Steps:
    """Finds the range that is most like a step: of those that repeat and are short enough, the one with most time."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int], _Name] = {}

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in rows of `ranges`; open ranges count for nothing."""
        for row in rows:
            if row["end_ns"] is None:
                continue
            if len(self._names) > MOST_NAMES:
                self._forget()
            own = self._names.setdefault((row["name"], row["depth"]), _Name())
            if own.count >= 1000:  # what is old counts less: steps grow longer or shorter
                own.count, own.total_ns = own.count / 2, own.total_ns / 2
            own.count += 1
            own.total_ns += row["end_ns"] - row["start_ns"]

    def _forget(self) -> None:
        """Keep the names that repeat most: half as many as may be."""
        kept = sorted(self._names.items(), key=lambda item: item[1].count, reverse=True)[: MOST_NAMES // 2]
        self._names = dict(kept)

    @property
    def length_s(self) -> float | None:
        """Mean length of a step; None while nothing is like one."""
        best = max(
            (own for own in self._names.values() if own.count >= LEAST_REPEATS and _mean_s(own) <= LONGEST_STEP_S),
            key=lambda own: own.total_ns,
            default=None,
        )
        return None if best is None else _mean_s(best)


def _mean_s(own: _Name) -> float:
    return own.total_ns / own.count / 1e9


@dataclass
class _Pause:
    """One pause; `resumed_ns` is when everything was on again, `first_ns` what ran then, by device."""

    start_ns: int
    off_ns: int
    end_ns: int
    resumed_ns: int
    deadline: float
    first_ns: dict[int, int] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {
            "start_ns": self.start_ns,
            "off_ns": self.off_ns,
            "end_ns": self.end_ns,
            "complete_ns": max(self.first_ns.values(), default=None),
        }


class Pauses:
    """When to pause, and the pausing itself. `pause_pct` is the share of the time, in percent.

    `next_at` (on time.monotonic's clock) is infinite until steps are known.
    """

    def __init__(self, pause_pct: float, timeline: Timeline, samples: SamplesLayer | None, seed: int | None = None):
        self.next_at = float("inf")
        self._share = pause_pct / 100
        self._timeline = timeline
        self._samples = samples
        self._random = random.Random(seed)
        self._steps = Steps()
        self._pending: list[_Pause] = []
        self._is_over = False
        timeline.listener = self._note_kernels

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in rows of `ranges`; the first steps set the first pause, a whole rest away.

        So a recording that is too short to measure anything by pauses has none, and all its launches.
        """
        self._steps.learn(rows)
        if self.next_at == float("inf") and not self._is_over and self._steps.length_s is not None:
            self.next_at = time.monotonic() + self._rest_s(self._length_s())

    def give_up(self) -> None:
        """Pause no more."""
        self.next_at, self._is_over = float("inf"), True

    def _length_s(self) -> float:
        wanted = STEPS_A_PAUSE * (self._steps.length_s or 0.0)
        return min(max(wanted, SHORTEST_S), LONGEST_S) * self._random.uniform(0.75, 1.25)

    def _rest_s(self, length_s: float) -> float:
        """Until the next pause, after one of this length: random, so that no rhythm of the job goes along with it."""
        return length_s * (1 / self._share - 1) * self._random.uniform(0.5, 1.5)

    def take(self, stopping: threading.Event) -> None:
        """Pause now; returns when everything is on again, or at once, all off, when `stopping` is set.

        Raises CuptiError where CUPTI refuses; everything is then on as far as it lets itself be.
        """
        length_s = self._length_s()
        if self._timeline.is_aside:  # another client has CUPTI: the recorder is off already
            self.next_at = time.monotonic() + self._rest_s(length_s)
            return
        start_ns = time.time_ns()
        try:
            if self._samples is not None:
                self._samples.hold(HOLD_PATIENCE_S)
            self._timeline.pause()
            off_ns = time.time_ns()
            stopping.wait(length_s)
            end_ns = time.time_ns()
            pause = _Pause(start_ns, off_ns, end_ns, end_ns, time.monotonic() + COMPLETE_PATIENCE_S)
            self._pending.append(pause)
        finally:
            self._resume(stopping)
        pause.resumed_ns = time.time_ns()
        self.next_at = time.monotonic() + self._rest_s((end_ns - start_ns) / 1e9)

    def _resume(self, stopping: threading.Event) -> None:
        try:
            if not stopping.is_set():
                self._timeline.resume()
        finally:
            if self._samples is not None:
                self._samples.release()

    def _note_kernels(self, columns: Mapping[str, Any]) -> None:
        """Find, for each pause, the first launch after it on each device; `columns` are of `kernels`."""
        for pause in self._pending:
            after = np.ma.filled(columns["start_ns"] >= pause.resumed_ns, False)
            # Graph nodes of some CUPTI versions have no launch time; a launch from before a pause seldom outlasts it.
            after = after & np.ma.filled(columns["queued_ns"] >= pause.resumed_ns, True)
            for device in np.unique(np.asarray(columns["device_id"])[after]).tolist():
                own = after & (np.asarray(columns["device_id"]) == device)
                first = int(np.min(np.ma.getdata(columns["start_ns"])[own]))
                pause.first_ns[device] = min(first, pause.first_ns.get(device, first))

    def rows(self, *, last: bool = False) -> list[dict[str, Any]]:
        """Rows of `pauses` of which no more will be known (all of them if `last`)."""
        now, devices = time.monotonic(), self._timeline.devices_seen
        # Before the first records come, no device is known, and nothing can be said yet.
        done = [p for p in self._pending if last or now >= p.deadline or (devices and devices <= p.first_ns.keys())]
        self._pending = [p for p in self._pending if p not in done]
        return [pause.row() for pause in done]
