"""The prompt of `nanalyze sql`: as a process at a pseudo-terminal, and what Tab offers."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from trace import Trace

import pyarrow.parquet as pq
import pytest

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.commands import _history, _pager
from nanalyze.commands._complete import Completer
from nanalyze.commands._shell import Shell

if os.name != "posix":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)
import fcntl
import select
import termios

PROMPT = "nanalyze> "
# The pseudo-terminal becomes the one that Ctrl-C is typed at.
PROGRAM = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from nanalyze.commands import main; main()"
)  # fmt: skip
SLOW = "SELECT count(*) FROM range(1000000) AS a, range(1000000) AS b WHERE a.range * b.range = 7;"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = Trace(tmp_path_factory.mktemp("shell") / "run")
    trace.device()
    for i, name in enumerate(("gemm", "copy", "tiny")):
        trace.kernel(trace.kernel_class(name), 1000 * i, 100 * (3 - i))
    trace.add(
        "samples", device_id=0, start_ns=0, end_ns=1, counter_group=0, dram_busy_ns=1.0
    )  # its columns differ from run to run
    trace.write()
    return trace.run_dir


class Terminal:
    """A prompt in a process of its own, whose terminal is this object."""

    def __init__(
        self,
        run_dir: Path,
        home: Path,
        *options: str,
        rows: int = 50,
        stdout: int | None = None,
        **environment: str,
    ) -> None:
        self.end, child = os.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 500, 0, 0))
        inherited = {key: value for key, value in os.environ.items() if key not in ("LINES", "COLUMNS", "INPUTRC")}
        settings = {"XDG_STATE_HOME": str(home / "state"), "PAGER": "", "TERM": "dumb", "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "sql", str(run_dir), *options],
            stdin=child, stdout=child if stdout is None else stdout, stderr=child,
            env={**inherited, **settings, **environment}, cwd=home, start_new_session=True,
        )  # fmt: skip
        os.close(child)

    def read_until(self, text: str, timeout_s: float = 60) -> str:
        """Everything shown until `text` is, with plain line ends."""
        seen, end = "", time.monotonic() + timeout_s
        while text not in seen:
            assert time.monotonic() < end, f"{text!r} is not in {seen!r}"
            if select.select([self.end], [], [], 0.2)[0]:
                seen += self._read()
        return seen.replace("\r\n", "\n")

    def _read(self) -> str:
        try:
            data = os.read(self.end, 65536)
        except OSError:  # Linux: the process has closed its side
            data = b""
        assert data, "the process has ended"
        return data.decode()

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def ask(self, line: str, until: str = PROMPT) -> str:
        """What comes back for a line, without its echo."""
        self.type(line + "\n")
        return self.read_until(until).partition("\n")[2].removesuffix(PROMPT)

    def interrupt(self) -> str:
        """Ctrl-C until the prompt is back: Python loses one that comes just before it waits for a key."""
        for _ in range(30):
            self.type("\x03")
            try:
                return self.read_until(PROMPT, 2)
            except AssertionError:
                assert self.process.poll() is None
        raise AssertionError("Ctrl-C has no effect")

    def leave(self, keys: str = ".quit\n") -> int:
        """The exit code after these keys."""
        self.type(keys)
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.end)


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(run_dir: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens a prompt and waits until it asks; all are closed at the end."""
    opened: list[Terminal] = []

    def start(*options: str, **settings: object) -> Terminal:
        opened.append(Terminal(run_dir, tmp_path, *options, **settings))  # type: ignore[arg-type]
        opened[-1].read_until(PROMPT)
        return opened[-1]

    yield start
    for each in opened:
        each.close()


NAMES = "SELECT kernel, total_ns FROM verdicts ORDER BY total_ns DESC"
TABLE = "kernel  total_ns\n------  --------\ngemm         300\ncopy         200\ntiny         100\n"


def test_a_session(terminal: Open, tmp_path: Path) -> None:
    shell = terminal()
    assert shell.ask(NAMES + ";") == TABLE
    assert shell.ask(".mode") == "table\n"
    assert shell.ask(".mode csv") == ""
    assert shell.ask(".query top_kernels n=1").splitlines()[1].split(",")[1] == '"gemm"'
    shell.ask(".mode json")
    assert json.loads(shell.ask("SELECT 1 AS a;")) == [{"a": 1}]
    shell.ask(".mode markdown")
    assert shell.ask("SELECT 1 AS a;") == "| a |\n| ---: |\n| 1 |\n"
    shell.ask(".mode vertical")
    assert shell.ask("SELECT 1 AS a;") == "--- row 1 ---\na  1\n"
    assert shell.ask(".mode xml") == (
        "nanalyze: error: .mode xml: no such mode. Give one of table, csv, json, markdown, vertical.\n"
    )
    assert shell.ask(".mode") == "vertical\n"
    assert "which kernels take the most GPU time?\n    rows=20" in shell.ask(".queries")
    assert ".timing [on|off]" in shell.ask(".help")
    assert shell.ask(".timng on") == (
        "nanalyze: error: .timng: no such command. Nearest: .timing. `.help` lists them.\n"
    )
    assert "no parameter 'rose'. It takes rows." in shell.ask(".query top_kernels rose=1")
    assert shell.leave() == 0


def test_timing_is_said_while_it_is_on(terminal: Open) -> None:
    shell = terminal()
    assert shell.ask(".timing") == "off\n"
    shell.ask(".timing on")
    assert re.fullmatch(r"a\n-\n1\n\d+\.\d{3} s\n", shell.ask("SELECT 1 AS a;"))
    assert ".timing maybe: give on or off." in shell.ask(".timing maybe")
    shell.ask(".timing off")
    assert shell.ask("SELECT 1 AS a;") == "a\n-\n1\n"


def test_save_writes_the_whole_last_result_and_overwrites_nothing(terminal: Open, tmp_path: Path) -> None:
    shell = terminal()
    assert "there is no result yet. Run a query first." in shell.ask(".save a.csv")
    shell.ask("SELECT * FROM range(2500) AS t(n) ORDER BY n;")
    assert shell.ask(".save a.csv") == "a.csv: written.\n"
    assert [row["n"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == [
        str(n) for n in range(2500)
    ]
    shell.ask("SELEC;")
    shell.ask(".save 'b c.JSON'")
    assert len(json.loads((tmp_path / "b c.JSON").read_text())) == 2500
    shell.ask(".query top_kernels rows=2")
    shell.ask(f".save {tmp_path}/d.parquet")
    assert pq.read_table(tmp_path / "d.parquet")["kernel"].to_pylist() == ["gemm", "copy"]
    assert shell.ask(".save a.csv") == "nanalyze: error: a.csv: exists. Give another name.\n"
    assert shell.ask(".save a.txt") == (
        "nanalyze: error: a.txt: the ending says the format. Give one of .csv, .json, .parquet.\n"
    )
    assert ".save: give one file" in shell.ask(".save")
    assert (tmp_path / "a.csv").read_text().startswith("n\n0\n")
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", "b c.JSON", "d.parquet"}
    assert "is not permitted" in shell.ask("COPY (SELECT 1) TO 'e.csv';")
    assert not (tmp_path / "e.csv").exists()


def test_the_first_rows_are_shown_and_where_the_rest_is(terminal: Open) -> None:
    shell = terminal()
    shell.ask(".mode csv")
    lines = shell.ask("SELECT * FROM range(2500) AS t(n) ORDER BY n;").splitlines()
    assert lines[1000:] == ["999", "Only the first 1000 rows are shown: `.save FILE` writes all."]


@pytest.mark.parametrize("keys", ["\x04", "SELECT 1\n\x04", ".exit\n"])
def test_the_prompt_is_left(terminal: Open, keys: str) -> None:
    shell = terminal()
    for line in keys.splitlines()[:-1]:
        shell.ask(line, "    ...> ")
    assert shell.leave(keys.splitlines()[-1] + ("\n" if keys.endswith("\n") else "")) == 0


def test_ctrl_c_stops_the_query_only(terminal: Open) -> None:
    shell = terminal()
    shell.type(SLOW + "\n")
    shell.read_until("= 7;\n".replace("\n", "\r\n"))
    time.sleep(0.5)
    shell.interrupt()
    assert shell.ask("SELECT 40 + 2 AS answer;") == "answer\n------\n    42\n"
    assert shell.leave() == 0


def test_ctrl_c_drops_what_is_typed(terminal: Open) -> None:
    shell = terminal()
    shell.ask("SELECT 1 AS one,", "    ...> ")
    shell.type("nonsense")
    shell.read_until("nonsense")
    shell.interrupt()
    assert shell.ask("SELECT 5 AS five;") == "five\n----\n   5\n"


def test_options_hold_at_the_prompt(terminal: Open) -> None:
    shell = terminal("--format", "csv", "--max-rows", "2")
    assert shell.ask("SELECT * FROM range(3) AS t(n) ORDER BY n;") == (
        "n\n0\n1\nOnly the first 2 rows are shown: `.save FILE` writes all.\n"
    )


@pytest.mark.parametrize("options", [("-o", "x.csv"), ("--format", "parquet", "-o", "x.parquet")])
def test_an_output_file_needs_a_query(run_dir: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    shell = Terminal(run_dir, tmp_path, *options)
    try:
        shell.read_until("Give a query for --output; at the prompt `.save FILE` writes the last result.")
        assert shell.process.wait(timeout=60) == 2
    finally:
        shell.close()
    assert list(tmp_path.iterdir()) == []


# --- paging ------------------------------------------------------------------------------------


@pytest.fixture
def pager(tmp_path: Path) -> str:
    """A pager that notes what it got and answers with one line."""
    script = tmp_path / "pager"
    script.write_text(f'#!/bin/sh\ncat > "{tmp_path}/paged"\necho "seen by $1"\n')
    script.chmod(0o755)
    return f"'{script}' 'the pager'"


def test_a_result_longer_than_the_terminal_goes_through_the_pager(terminal: Open, tmp_path: Path, pager: str) -> None:
    shell = terminal(rows=10, PAGER=pager)
    # Nine lines and the next prompt's fit: seven rows under the header's two.
    assert shell.ask("SELECT * FROM range(7) AS t(n) ORDER BY n;").splitlines()[-1] == "6"
    assert not (tmp_path / "paged").exists()
    assert shell.ask("SELECT * FROM range(8) AS t(n) ORDER BY n;") == "seen by the pager\n"
    assert (tmp_path / "paged").read_text().split() == ["n", "-", *map(str, range(8))]
    assert shell.ask(".help") == "seen by the pager\n"


def test_a_pager_that_is_left_early_or_missing_harms_nothing(terminal: Open) -> None:
    shell = terminal(rows=10, PAGER="true")
    assert shell.ask("SELECT repeat('x', 80) FROM range(1000);") == ""
    assert shell.ask("SELECT 1 AS a;") == "a\n-\n1\n"
    shell = terminal(rows=10, PAGER="/nowhere/less")
    assert len(shell.ask("SELECT * FROM range(100) AS t(n);").splitlines()) == 102


def test_ctrl_c_in_the_pager_is_the_pager_s(terminal: Open, tmp_path: Path) -> None:
    script = tmp_path / "slow"
    script.write_text(
        "#!/bin/sh\ntrap 'echo stopped; exit 0' INT\ncat > /dev/null\necho waiting\nwhile :; do sleep 0.1; done\n"
    )
    script.chmod(0o755)
    shell = terminal(rows=10, PAGER=str(script))
    shell.ask("SELECT * FROM range(100);", "waiting")
    shell.type("\x03")
    assert "stopped" in shell.read_until(PROMPT)
    shell.type("nonsense")
    shell.read_until("nonsense")
    shell.interrupt()  # afterwards it is the prompt's again
    assert shell.ask("SELECT 1 AS a;") == "a\n-\n1\n"


def test_nothing_is_paged_where_the_output_is_no_terminal(terminal: Open, tmp_path: Path, pager: str) -> None:
    with (tmp_path / "out").open("wb") as out:
        shell = terminal(rows=10, PAGER=pager, stdout=out.fileno())
        shell.type("SELECT * FROM range(100) AS t(n) ORDER BY n;\n")
        assert shell.leave() == 0
    assert not (tmp_path / "paged").exists()
    assert (tmp_path / "out").read_text().split() == ["n", "--", *(str(n) for n in range(100))]


def test_the_pager_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pager.shutil, "which", lambda program: program)
    monkeypatch.delenv("PAGER", raising=False)
    assert _pager.command() == ["less", "-FRSX"]
    monkeypatch.setenv("PAGER", "more -d")
    assert _pager.command() == ["more", "-d"]
    for text in ("", "'"):
        monkeypatch.setenv("PAGER", text)
        assert _pager.command() == []


# --- history and completion --------------------------------------------------------------------


def test_history_outlives_the_prompt_and_is_the_user_s_alone(terminal: Open, tmp_path: Path, run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    shell = terminal()
    shell.ask("SELECT 1 AS first;")
    other = terminal()
    other.ask("SELECT 2 AS second;")
    assert (shell.leave(), other.leave()) == (0, 0)
    file = tmp_path / "state" / "nanalyze" / "sql_history"
    assert file.read_text().splitlines() == ["SELECT 1 AS first;", ".quit", "SELECT 2 AS second;", ".quit"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shell = terminal()
    shell.type("\x1b[A\x1b[A")  # up, twice
    assert shell.ask("") == "second\n------\n     2\n"
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_history_that_cannot_be_kept_is_none(terminal: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shell = terminal(XDG_STATE_HOME=str(tmp_path / "file"))
    assert shell.ask("SELECT 1 AS a;") == "a\n-\n1\n"
    assert shell.leave() == 0


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert _history.path() == Path("/state/nanalyze/sql_history")
    for text in ("", "relative"):  # which the XDG specification says to ignore
        monkeypatch.setenv("XDG_STATE_HOME", text)
        assert _history.path() == Path("/home/ada/.local/state/nanalyze/sql_history")


def test_tab_completes(terminal: Open) -> None:
    shell = terminal()
    shell.type(".mo\tver\t\n")
    shell.read_until(PROMPT)
    assert shell.ask(".mode") == "vertical\n"
    shell.ask(".mode csv")
    shell.type("SELECT launches FROM verd\t ORDER BY total\t;\n")
    shell.read_until("launches\r\n1\r\n1\r\n1\r\n")
    shell.type(".query top_k\tro\t1\n")
    assert '"gemm"' in shell.read_until('gemm"')
    assert shell.leave() == 0


@pytest.fixture(scope="module")
def shell(run_dir: Path) -> Iterator[Shell]:
    with na.open(run_dir) as run:
        yield Shell(run)


@pytest.fixture
def completer(shell: Shell) -> Completer:
    return shell.completer()


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("", ".q", [".queries", ".query", ".quit"]),
        ("  ", ".tim", [".timing"]),
        (".timing ", "", ["off", "on"]),
        (".timing on ", "", []),
        (".schema ", "verd", ["verdicts"]),
        (".mode ", "", ["csv", "json", "markdown", "table", "vertical"]),
        (".query ", "", list(queries.query_names())),
        (".query ", "top", ["top_kernels"]),
        (".query top_kernels ", "", ["rows="]),
        (".query compare_repetitions range_name=x ", "w", ["within="]),
        (".query nope ", "", []),
        ("SELECT ", ".q", []),
        ("SELECT 1 FROM ", "verd", ["verdicts"]),
        (
            "SELECT 1 FROM copies WHERE ", "d",
            ["damage", "desc", "describe", "destination", "destination_device_id", "device_id", "device_state",
             "devices", "distinct", "duration_ns"],
        ),
        (
            "SELECT 1 FROM copies AS c ORDER BY ", "c.d",
            ["c.destination", "c.destination_device_id", "c.device_id", "c.duration_ns"],
        ),
        ("SELECT 1 FROM samples WHERE ", "dram", ["dram_busy_ns"]),
        ("", "SEL", ["SELECT"]),
        ("", "sel", ["select"]),
        ("SELECT * FROM ", "_lau", []),
    ],
)  # fmt: skip
def test_what_tab_offers(completer: Completer, line: str, word: str, expected: list[str]) -> None:
    assert completer.candidates(line, word) == expected


def test_tab_knows_the_lines_above(shell: Shell) -> None:
    shell.lines[:] = ["SELECT *", "FROM copies"]
    try:
        assert shell.completer().candidates("WHERE ", "du") == ["duration_ns"]
        assert shell.completer().candidates("", ".q") == []
        assert "vertical" not in shell.completer().candidates(".mode ", "v")
    finally:
        shell.lines.clear()


def test_an_interrupt_between_two_statements_is_not_lost(shell: Shell) -> None:
    """Ctrl-C while nothing runs yet must stop what is about to run."""
    from nanalyze.commands import _answer

    def work() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        list(shell.run.batches(SLOW.rstrip(";")))
        return False

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _answer.interruptible(shell.run, work)
    assert time.monotonic() - started < 30
