"""`nanalyze top`: what it reads again (nothing), what it shows, how it ends."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from trace import PROCESS, T0, Trace

import pytest
from click.testing import CliRunner

import nanalyze.analysis as na
from nanalyze.analysis import live as module
from nanalyze.analysis.live import Live
from nanalyze.commands import main
from nanalyze.commands.top import Verdicts, _duration, _fit, frame, is_over
from nanalyze.rundir import compaction

HERE = f"{socket.gethostname()}-0-{os.getpid()}"
PROGRAM = [sys.executable, "-c", "from nanalyze.commands import main; main()", "top"]


def running(run_dir: Path) -> Trace:
    """A run that this process is recording."""
    trace = Trace(run_dir, process=HERE)
    now = time.time_ns()
    trace.process_row(HERE, host=socket.gethostname(), pid=os.getpid(), started_ns=now, recorded_ns=now)
    trace.device(HERE)
    return trace


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    trace = Trace(tmp_path / "run")
    trace.device()
    gemm = trace.kernel_class("gemm", grid=(132, 1, 1))
    copy = trace.kernel_class("copy")
    for start in range(10):
        trace.kernel(gemm, start_ns=start * 1000, duration_ns=300)
    trace.kernel(copy, start_ns=20_000, duration_ns=1_000)
    trace.measure(gemm, [{"compute_pct": 90.0, "memory_pct": 20.0}])
    trace.state(1_000, sm_clock_hz=1_000_000_000, throttle_reasons=0)
    trace.state(2_000, sm_clock_hz=1_755_000_000, throttle_reasons=0x4)
    trace.event("loss", "records dropped by CUPTI, in all", count=3)
    trace.event("note", "nothing to see")
    trace.write()
    return tmp_path / "run"


def shown(run_dir: Path, size: tuple[int, int] = (200, 50), rows: int | None = None) -> list[str]:
    live = Live(run_dir)
    live.update()
    verdicts = Verdicts(run_dir)
    verdicts.work_out()
    return frame(live, verdicts.bounds, size, rows)


# --- what is read --------------------------------------------------------------------------------


def test_the_totals_are_those_of_the_views(ended: Path) -> None:
    live = Live(ended)
    assert live.update() > 4
    with na.open(ended) as run:
        rows = run.arrow(
            "SELECT kernel_class_id, count(*) n, count(start_ns) t, sum(duration_ns) s FROM raw.kernels GROUP BY 1"
        )
    expected = {row["kernel_class_id"]: (row["n"], row["t"], int(row["s"])) for row in rows.to_pylist()}
    found = {key: (totals.launches, totals.timed, totals.total_ns) for key, totals in live.classes.items()}
    assert found == expected
    assert sorted(found.values()) == [(1, 1, 1000), (11, 10, 3000)]
    assert live.total_ns == 4000
    assert live.newest_ns == T0 + 21_000
    assert live.losses == {("timeline", "records dropped by CUPTI, in all"): 3}
    assert live.states[PROCESS, 0]["sm_clock_hz"] == 1_755_000_000


def test_each_shard_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = running(tmp_path / "run")
    kernel = trace.kernel_class("k", process=HERE)
    for number in range(6):
        trace.kernel(kernel, start_ns=number, duration_ns=10, process=HERE)
    trace.write(shards=3, end=False)
    opened: list[str] = []
    original = Path.read_bytes

    def counting(path: Path) -> bytes:
        if path.suffix == ".parquet":
            opened.append(path.name)
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", counting)
    live = Live(tmp_path / "run")
    first = live.update()
    assert first == len(opened) == len(set(opened)) >= 6
    assert (live.update(), len(opened)) == (0, first)
    later = Trace(tmp_path / "run", process=f"{HERE}9")
    later.kernel(kernel, start_ns=50, duration_ns=7)
    later.write(end=False)
    assert live.update() == 2  # its kernels and its row in processes
    assert len(opened) == first + 2
    assert (live.total_ns, live.classes[kernel].launches) == (67, 7)


def test_launches_that_were_rolled_up_count(tmp_path: Path) -> None:
    """Rolled up before it looks, while it looks, and together with some that it has not seen."""
    trace = Trace(tmp_path / "run")
    trace.device()
    gemm, copy = trace.kernel_class("gemm", grid=(132, 1, 1)), trace.kernel_class("copy")
    for start in range(40):
        trace.kernel(
            gemm if start % 2 else copy, start_ns=start * 1000, duration_ns=None if start == 7 else 300 + start
        )
    trace.process_row()
    trace.write(shards=8)

    def totals(live: Live) -> dict[int, tuple[int, int, int]]:
        return {key: (one.launches, one.timed, one.total_ns) for key, one in live.classes.items()}

    follower, late = Live(tmp_path / "run"), Live(tmp_path / "run")
    follower.update()
    expected = totals(follower)
    assert sum(launches for launches, _, _ in expected.values()) == 40
    # `late` has seen the first three shards when five are rolled up together.
    hidden = sorted((tmp_path / "run" / "kernels").glob("*/*.parquet"))[3:]
    for path in hidden:
        path.rename(path.with_name(f".{path.name}"))
    late.update()
    assert sum(one.launches for one in late.classes.values()) == 15
    for path in hidden:
        path.with_name(f".{path.name}").rename(path)
    done = compaction.roll_up(tmp_path / "run", T0 + 26_000)
    assert done.launches == 25
    for live in (follower, late, Live(tmp_path / "run")):
        live.update()
        assert totals(live) == expected
        assert live.update() == 0
    # A single shard keeps its numbers; then all are merged.
    compaction.roll_up(tmp_path / "run", T0 + 31_000)
    compaction.compact(tmp_path / "run")
    for live in (follower, late, Live(tmp_path / "run")):
        live.update()
        assert totals(live) == expected


def test_verdicts_are_worked_out_from_the_newest_shards_only(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    kernel = trace.kernel_class("k")
    for number in range(4):
        trace.kernel(kernel, start_ns=number, duration_ns=10)
    shards = [shard for shard in trace.write(shards=4) if shard.table == "kernels"]
    for number, shard in enumerate(shards):
        os.utime(shard.path, (1000 + number, 1000 + number))
    size = shards[-1].path.stat().st_size
    for limit, launches in ((1, 1), (size + 1, 2), (1 << 30, 4)):
        with module.newest(tmp_path / "run", limit) as run:
            rows = run.arrow("SELECT start_ns FROM kernels ORDER BY start_ns").column("start_ns").to_pylist()
        assert rows == [T0 + number for number in range(4)][-launches:]


def test_damaged_and_foreign_files_are_left_out_and_counted(ended: Path) -> None:
    folder = next((ended / "kernels").iterdir())
    (folder / f"000099-{'0' * 16}.parquet").write_bytes(b"no Parquet")
    (folder / ".unfinished.parquet").write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    (ended / "kernels" / "process=..bad?").mkdir()
    live = Live(ended)
    live.update()
    assert (live.unreadable, live.total_ns) == (1, 4000)
    assert "1 shards could not be read: nanalyze info says why" in shown(ended)


# --- what is shown -------------------------------------------------------------------------------


def test_a_frame_tells_kernels_verdicts_clocks_and_losses(ended: Path) -> None:
    lines = shown(ended)
    assert lines[0].startswith(f"{ended}: 1 process (1 ")
    assert lines[1] == "12 launches of 2 kernel classes, 4 us of GPU time"
    assert lines[2] == f"{PROCESS} NVIDIA H200 0: 1755 MHz of 2000, 500 W, 50 C, clocks held back (reasons 0x4)"
    assert lines[3] == "loss: timeline: records dropped by CUPTI, in all (3)"
    assert lines[5].split() == ["share", "time", "launches", "mean", "bound", "kernel"]
    assert lines[6].split() == ["75.0%", "3", "us", "11", "300", "ns", "compute", "gemm"]
    assert lines[7].split()[:2] == ["25.0%", "1"]
    assert len(lines) == 8


def test_the_verdicts_are_those_of_the_report(ended: Path) -> None:
    verdicts = Verdicts(ended)
    verdicts.work_out()
    with na.open(ended) as run:
        table = run.arrow("SELECT kernel_class_id, bound FROM verdicts").to_pydict()
    assert verdicts.bounds == dict(zip(table["kernel_class_id"], table["bound"], strict=True))
    assert "compute" in verdicts.bounds.values()


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    running(tmp_path / "run").write(end=False)
    lines = shown(tmp_path / "run")
    assert ": 1 process (1 running), " in lines[0]
    assert lines[1] == "0 launches of 0 kernel classes, 0 ns of GPU time"


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    kernel = trace.kernel_class("evil\x1b[2J\r\n\x07\u202ename" + "x" * 10_000)
    trace.kernel(kernel, start_ns=0, duration_ns=1)
    trace.event("loss", "bad\x1b]0;title\x07")
    trace.write()
    for width in (400, 80, 20, 5, 1):
        lines = shown(tmp_path / "run", (width, 30))
        assert all(line.isprintable() for line in lines)
        assert max(map(len, lines)) <= width
    assert "evil\\x1b[2J\\r\\n\\x07\\u202ename" in "\n".join(shown(tmp_path / "run", (400, 30)))


def test_a_frame_keeps_to_the_terminals_height(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    for number in range(50):
        trace.kernel(trace.kernel_class(f"k{number:02d}"), start_ns=0, duration_ns=100 - number)
    trace.write()
    for height in (12, 20, 40):
        lines = shown(tmp_path / "run", (80, height))
        assert len(lines) == height
        assert lines[-1] == f"and {50 - (height - 5)} more"
    assert len([line for line in shown(tmp_path / "run", (80, 10), rows=50) if " k" in line]) >= 50


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (5e-9, "5 ns"),
        (1.5e-6, "1.5 us"),
        (0.0123, "12.3 ms"),
        (99.0, "99 s"),
        (125, "2 min 05 s"),
        (7260, "2 h 01 min"),
        (-3, "0 ns"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_wide_characters_are_cut_by_columns() -> None:
    assert _fit("ab\u6f22\u5b57\u6f22\u5b57", 8) == "ab\u6f22..."
    assert _fit("abc", 3) == "abc"


def test_a_run_is_over_when_all_its_processes_are(tmp_path: Path, ended: Path) -> None:
    live = Live(ended)
    assert not is_over(live)  # nothing is known yet
    live.update()
    assert is_over(live)
    running(tmp_path / "other").write(end=False)
    other = Live(tmp_path / "other")
    other.update()
    assert not is_over(other)


# --- the command ---------------------------------------------------------------------------------


def test_once_prints_one_frame(ended: Path) -> None:
    result = CliRunner().invoke(main, ["top", str(ended), "--once"])
    assert (result.exit_code, result.output.count("kernel classes")) == (0, 1)
    assert "gemm" in result.output
    assert "\x1b" not in result.output


def test_it_ends_with_the_run_and_shows_its_verdicts(ended: Path) -> None:
    result = CliRunner().invoke(main, ["top", str(ended), "--interval", "0.1"])
    assert result.exit_code == 0
    assert result.output.count("kernel classes") == 1
    assert " compute " in result.output


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["top", str(tmp_path), "--once"])
    assert result.exit_code == 1
    assert result.output.startswith(f"nanalyze: error: {tmp_path}")
    assert result.output.count("\n") == 1


def read_until(descriptor: int, text: bytes, seconds: float = 20) -> bytes:
    found, deadline = b"", time.monotonic() + seconds
    while text not in found and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                found += os.read(descriptor, 65536)
            except OSError:  # the other end is closed
                break
    assert text in found, found
    return found


@pytest.mark.parametrize("how", ["q", "interrupt", "terminate"])
def test_it_gives_the_terminal_back(tmp_path: Path, how: str) -> None:
    import termios

    trace = running(tmp_path / "run")
    trace.kernel(trace.kernel_class("k", process=HERE), start_ns=0, duration_ns=5, process=HERE)
    trace.write(end=False)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [*PROGRAM, str(tmp_path / "run"), "--interval", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        shown = read_until(ours, b"kernel classes")
        assert shown.startswith(b"\x1b[?1049h\x1b[?25l")
        if how == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGTERM)
        left = b"\x1b[?25h\x1b[?1049l"
        last = read_until(ours, left).partition(left)[2]
        if b"kernel classes" not in last:  # the last frame stays to be read
            read_until(ours, b"kernel classes")
        assert process.communicate(timeout=20)[1] == b""
        assert process.returncode == (143 if how == "terminate" else 0)
        assert termios.tcgetattr(theirs) == before
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        os.close(ours)
        os.close(theirs)
