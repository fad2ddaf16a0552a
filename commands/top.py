"""`nanalyze top`: a run while it is recorded, refreshed until it ends."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanalyze.commands._open import LocalRun
from nanalyze.commands._output import _width, escape
from nanalyze.commands.info import ending
from nanalyze.rundir.errors import NanalyzeError

if TYPE_CHECKING:
    import nanalyze.analysis as na
    from nanalyze.analysis.live import Live

VERDICT_PERIOD_S = 15.0
VERDICT_SHARE = 0.1  # of the time that working them out may take
SHOWN_DEVICES = 8
SHOWN_LOSSES = 3
DEFAULT_SIZE = (100, 40)  # columns and lines, where there is no terminal

HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen, without a cursor

Row = dict[str, Any]


@click.command("top")
@click.argument("run_dir", type=LocalRun())
@click.option("--interval", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=2.0, help="Between refreshes.")
@click.option("--rows", metavar="N", type=click.IntRange(1, 10_000), help="Kernels to show; what fits by default.")
@click.option("--once", is_flag=True, help="Show the state once and end.")
def top(run_dir: Path, interval: float, rows: int | None, once: bool) -> None:
    """Watch the run in RUN_DIR while it is recorded: top kernels, verdicts so far, clocks, losses.

    Ends when the run does; `q` or Ctrl-C ends it before. Each refresh reads only what was written
    since the last one. Verdicts are worked out from the latest launches, every 15 seconds or more.

    \b
    Examples:
      nanalyze top run_dir
      nanalyze top run_dir --once
    """
    from nanalyze.analysis.live import Live

    live = Live(run_dir)
    if once:
        live.update()
        verdicts = Verdicts(run_dir)
        verdicts.work_out()
        _print(frame(live, verdicts.bounds, _size(), rows))
        return
    with _screen() as screen:
        _watch(live, interval, rows, screen)


def _watch(live: Live, interval: float, rows: int | None, screen: Screen) -> None:
    """Refresh until the run has ended or the user wants no more."""
    verdicts = Verdicts(live.run_dir)
    try:
        while True:
            started = time.monotonic()
            live.update()
            verdicts.tend()
            over = is_over(live)
            if over:
                verdicts.finish()
                verdicts.work_out()
            screen.show(frame(live, verdicts.bounds, _size(), rows))
            if over or screen.wait(interval - (time.monotonic() - started)):
                return
    finally:
        verdicts.stop()


def is_over(live: Live) -> bool:
    """Whether every process of the run has ended or was cut off."""
    states = [ending(row) for row in live.processes.values()]
    return bool(states) and "running" not in states


# --- verdicts ----------------------------------------------------------------------------------


class Verdicts:
    """What bounds each kernel class, worked out on a thread of its own so that the view stays live."""

    def __init__(self, run_dir: Path) -> None:
        self.bounds: dict[int, str] = {}
        self._run_dir = run_dir
        self._thread: threading.Thread | None = None
        self._next_at = 0.0
        self._run: na.Run | None = None
        self._is_stopping = False

    def tend(self) -> None:
        """Begin again if it is time to."""
        if time.monotonic() >= self._next_at and (self._thread is None or not self._thread.is_alive()):
            self._next_at = float("inf")
            self._thread = threading.Thread(target=self.work_out, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until what was begun is done."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Break off what is being worked out: DuckDB aborts a process that ends while it runs."""
        self._is_stopping = True
        while self._thread is not None and self._thread.is_alive():
            run = self._run
            if run is not None:
                run.interrupt()
            self._thread.join(0.1)

    def work_out(self) -> None:
        """Work them out now; where that fails those known so far stay."""
        from nanalyze.analysis import live

        started = time.monotonic()
        try:
            with live.newest(self._run_dir) as run:
                self._run = run
                if self._is_stopping:
                    return
                columns = run.arrow("SELECT kernel_class_id, bound FROM verdicts").to_pydict()
            self.bounds = dict(zip(columns["kernel_class_id"], columns["bound"], strict=True))
        except (NanalyzeError, OSError):
            pass
        finally:
            self._run = None
        took = time.monotonic() - started
        self._next_at = time.monotonic() + max(VERDICT_PERIOD_S, took / VERDICT_SHARE)


# --- the picture ---------------------------------------------------------------------------------


def frame(live: Live, bounds: dict[int, str], size: tuple[int, int], rows: int | None) -> list[str]:
    """Lines of at most size[0] columns; as many kernels as size[1] lines leave room for, or `rows`."""
    width, height = size
    head = [*_summary(live), *_devices(live), *_losses(live), ""]
    count = rows if rows is not None else max(1, height - len(head) - 2)
    lines = [*head, *_kernels(live, bounds, count)]
    return [_fit(line, width) for line in lines]


def _summary(live: Live) -> Iterator[str]:
    states = [ending(row) for row in live.processes.values()]
    counts = ", ".join(f"{states.count(kind)} {kind}" for kind in dict.fromkeys(states))
    noun = "process" if len(states) == 1 else "processes"
    started = min((row["started_ns"] for row in live.processes.values()), default=None)
    ends = [row["ended_ns"] for row in live.processes.values()]
    until = max(ends) if ends and None not in ends else time.time_ns()
    lasted = "" if started is None else f", {_duration((until - started) / 1e9)}"
    age = (
        "nothing written yet" if live.written_at is None else f"written {_duration(time.time() - live.written_at)} ago"
    )
    yield f"{escape(str(live.run_dir))}: {len(states)} {noun} ({counts or 'none yet'}){lasted}, {age}"
    launches = sum(totals.launches for totals in live.classes.values())
    yield f"{launches:,} launches of {len(live.classes):,} kernel classes, {_duration(live.total_ns / 1e9)} of GPU time"


def _devices(live: Live) -> Iterator[str]:
    for process, device_id in sorted(live.states)[:SHOWN_DEVICES]:
        state = live.states[process, device_id]
        device = live.devices.get((process, device_id), {})
        highest = device.get("sm_clock_max_hz")
        clock = _scaled(state["sm_clock_hz"], 1e6, "MHz") + (f" of {highest / 1e6:.0f}" if highest else "")
        parts = [clock, _scaled(state["power_mw"], 1e3, "W"), _scaled(state["temperature_c"], 1, "C")]
        name = escape(str(device.get("name", "device")))
        yield f"{escape(process)} {name} {device_id}: {', '.join(parts)}{_throttled(state['throttle_reasons'])}"
    if len(live.states) > SHOWN_DEVICES:
        yield f"and {len(live.states) - SHOWN_DEVICES} more devices"


def _throttled(reasons: int | None) -> str:
    idle = 0x1  # nvmlClocksEventReasonGpuIdle: not a limit
    return f", clocks held back (reasons {reasons:#x})" if reasons and reasons & ~idle else ""


def _losses(live: Live) -> Iterator[str]:
    for (layer, message), count in live.losses.most_common(SHOWN_LOSSES):
        yield f"loss: {escape(layer)}: {escape(message)} ({count:,})"
    if len(live.losses) > SHOWN_LOSSES:
        yield f"and {len(live.losses) - SHOWN_LOSSES} more kinds of loss: nanalyze info has all"
    if live.unreadable:
        yield f"{live.unreadable:,} shards could not be read: nanalyze info says why"


def _kernels(live: Live, bounds: dict[int, str], count: int) -> Iterator[str]:
    yield f"{'share':>6} {'time':>9} {'launches':>11} {'mean':>9} {'bound':<13} kernel"
    total_ns = live.total_ns
    ranked = sorted(live.classes.items(), key=lambda item: (-item[1].total_ns, item[0]))
    for class_id, totals in ranked[:count]:
        share = f"{100 * totals.total_ns / total_ns:.1f}%" if total_ns else "-"
        mean = _duration(totals.total_ns / totals.timed / 1e9) if totals.timed else "-"
        bound = bounds.get(class_id, "...")
        name = escape(live.names.get(class_id, f"class {class_id}"))
        time_ = _duration(totals.total_ns / 1e9)
        yield f"{share:>6} {time_:>9} {totals.launches:>11,} {mean:>9} {bound:<13} {name}"
    if len(ranked) > count:
        yield f"and {len(ranked) - count:,} more"


def _duration(seconds: float) -> str:
    """Three figures, for people."""
    seconds = max(seconds, 0.0)
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if seconds * factor >= 1 or unit == "ns":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def _scaled(value: float | None, unit_size: float, unit: str) -> str:
    return f"? {unit}" if value is None else f"{value / unit_size:.0f} {unit}"


def _fit(line: str, width: int) -> str:
    """`line` cut to `width` columns."""
    if _width(line) <= width:
        return line
    while line and _width(line) > width - 3:
        line = line[: max(0, len(line) - max(1, (_width(line) - width + 3) // 2))]
    return line + "..."[: max(0, width)]


# --- the terminal --------------------------------------------------------------------------------


class Screen:
    """Frames one after another, for output that is no terminal."""

    def show(self, lines: list[str]) -> None:
        _print([*lines, ""])

    def wait(self, seconds: float) -> bool:
        """Wait for the next refresh; whether the user wants no more."""
        time.sleep(max(0.0, seconds))
        return False


class Terminal(Screen):
    """One frame over the other; `q` ends it."""

    def __init__(self) -> None:
        self._last: list[str] = []
        self._keys = _keyboard()

    def show(self, lines: list[str]) -> None:
        self._last = lines
        lines = lines[: _size()[1]]
        _write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines[:-1]) + lines[-1] + CLEAR_LINE + CLEAR_REST)

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + max(0.0, seconds)
        while (left := until - time.monotonic()) > 0:
            if self._keys is None:
                time.sleep(left)
                return False
            if select.select([self._keys], [], [], left)[0]:
                pressed = os.read(self._keys, 64)
                if not pressed or b"q" in pressed or b"Q" in pressed or b"\x03" in pressed:
                    return True
        return False

    @property
    def last(self) -> list[str]:
        return self._last


@contextlib.contextmanager
def _screen() -> Iterator[Screen]:
    """A screen for this output. The terminal is given back as it was, with the last frame on it."""
    if not sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):
            yield Screen()
        return
    restore = _single_keys()
    terminal = Terminal()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the terminal is given back
    _write(ENTER)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield terminal
    finally:
        _write(LEAVE)
        restore()
        _print(terminal.last)


def _keyboard() -> int | None:
    try:
        return sys.stdin.fileno() if sys.stdin.isatty() else None
    except (OSError, ValueError, AttributeError):
        return None


def _single_keys() -> Any:
    """Have keys without Enter and without an echo; returns what undoes that."""
    keyboard = _keyboard()
    if keyboard is None:
        return lambda: None
    import termios
    import tty

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    return lambda: termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size(DEFAULT_SIZE)
    return max(size.columns, 1), max(size.lines, 1)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print(lines: list[str]) -> None:
    for line in lines:
        click.echo(line)
