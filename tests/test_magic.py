"""The cell magic, in IPython's own shell, with a fake GPU."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGpu, final_process, read_table

from nanalyze import recorder

InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell


@pytest.fixture
def shell(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shell = InteractiveShell(user_ns={"gpu": gpu})
    shell.history_manager.enabled = False
    shell.run_line_magic("load_ext", "nanalyze.recorder")
    yield shell
    shell.atexit_operations()
    atexit.unregister(shell.atexit_operations)  # what it would do again is undone already


def run(shell: Any, options: str, *lines: str) -> Any:
    return shell.run_cell("\n".join([f"%%nanalyze {options}", *lines]))


def value(shell: Any, options: str, *lines: str) -> Any:
    """What the magic returns; `run_cell` forgets it when the cell runs a cell itself."""
    return shell.run_cell_magic("nanalyze", options, "\n".join(lines))


def test_a_cell_is_recorded_and_its_verdicts_are_the_result(shell: Any, tmp_path: Path, capsys: Any) -> None:
    table = value(
        shell, "-o run", "for _ in range(3): gpu.launch('gemm')", "gpu.launch('copy', duration_ns=10)", "x = 7"
    )
    assert list(table.columns) == ["kernel", "launches", "total_ns", "share", "bound", "reason"]
    assert table[["kernel", "launches", "total_ns"]].to_numpy().tolist() == [["gemm", 3, 3000], ["copy", 1, 10]]
    assert "nanalyze: recorded 4 launches into run. Next: nanalyze report run\n" in capsys.readouterr().out
    assert shell.user_ns["x"] == 7  # the cell ran in the notebook's own namespace
    assert final_process(tmp_path / "run")["ending"] == "stop"
    shell.user_ns["gpu"].launch("after")
    assert len(read_table(tmp_path / "run", "kernels")) == 4


def test_the_verdicts_are_displayed(shell: Any, capsys: Any) -> None:
    run(shell, "-o run", "gpu.launch('gemm')")
    assert "[1 rows x 6 columns]" in capsys.readouterr().out
    assert shell.user_ns["_"]["kernel"].tolist() == ["gemm"]


def test_the_directory_has_a_name_of_its_own_by_default(shell: Any, tmp_path: Path) -> None:
    for _ in range(2):
        assert run(shell, "", "gpu.launch('k')").success
    folders = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("run-"))
    assert len(folders) == 2
    assert all("notebook" in name for name in folders)


def test_options_reach_the_recorder(shell: Any, tmp_path: Path) -> None:
    options = (
        "-o run --layers timeline,ranges --no-nvtx --exact '^g{2} x|k' --exact-first 1 --exact-budget 100 "
        "--exact-metrics gpu__time_duration.sum --exact-ranges step --exact-exclude '^no' --rows 1"
    )
    lines = ("from nanalyze import recorder", "with recorder.annotate('step'):", *["    gpu.launch('k')"] * 3)
    table = value(shell, options, *lines, "gpu.launch('no k')")
    settings = json.loads(final_process(tmp_path / "run")["settings"])
    assert (settings["layers"], settings["nvtx"]) == (["timeline", "ranges"], False)
    exact = settings["exact"]
    assert (exact["kernels"], exact["exclude"], exact["ranges"]) == ("^g{2} x|k", "^no", "step")
    assert (exact["first"], exact["budget_pct"], exact["metrics"]) == (1, 100.0, ["gpu__time_duration.sum"])
    assert len(read_table(tmp_path / "run", "exact")) == 1
    assert len(table) == 1


def test_an_error_of_the_cell_is_shown_once_and_what_ran_is_recorded(shell: Any, tmp_path: Path, capsys: Any) -> None:
    run(shell, "-o run", "gpu.launch('k')", "1 / 0")
    said = capsys.readouterr()
    assert (said.out + said.err).count("division by zero") == 1
    assert len(read_table(tmp_path / "run", "kernels")) == 1
    assert recorder._active is None or recorder._active.is_stopped


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--wrong", "unrecognized arguments: --wrong. `%%nanalyze --help` lists the options."),
        ("--exact-first 3", "options --exact-* need --exact, which chooses the kernels"),
        ("--exact '('", "Exact(kernels='('): not a regular expression"),
        ("--exact 'open", "No closing quotation. Quote the option."),
        ("--layers sideways", "unknown layer 'sideways'"),
        ("-o taken", "taken: already holds a run. Use --append to add to it, --force to replace it"),
        ("-o taken --force --layers sideways", "unknown layer 'sideways'"),
        ("-o taken --force --append", "--force replaces the run, --append adds to it"),
        ("-o thesis --force", "thesis: exists and is not a run"),
        ("--samples-interval 500", "--samples-interval needs --samples"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_the_cell_is_not_run(
    shell: Any, tmp_path: Path, capsys: Any, options: str, problem: str
) -> None:
    with recorder.record("taken"):
        pass
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("mine")
    capsys.readouterr()
    result = run(shell, options, "ran = True")
    out = capsys.readouterr().out
    assert out.startswith("nanalyze: error: ")
    assert problem in out
    assert out.count("\n") == 1
    assert (result.success, "ran" in shell.user_ns) == (True, False)
    assert len(read_table(tmp_path / "taken", "processes")) == 2  # still there
    assert (tmp_path / "thesis" / "chapter").read_text() == "mine"


def test_a_cell_that_is_run_again_replaces_its_run_if_asked(shell: Any, tmp_path: Path) -> None:
    for number in range(2):
        assert run(shell, "-o run --force", f"for _ in range({number + 1}): gpu.launch('k')").success
        assert len(read_table(tmp_path / "run", "kernels")) == number + 1
    assert run(shell, "-o run --append --pause 0", "gpu.launch('k')").success
    assert len(read_table(tmp_path / "run", "kernels")) == 3


def test_help_lists_the_options_and_leaves_the_shell_alive(shell: Any, capsys: Any) -> None:
    assert run(shell, "--help", "ran = True").success
    assert "--exact REGEX" in capsys.readouterr().out
    assert "ran" not in shell.user_ns


def test_a_cell_without_kernels_says_so(shell: Any, capsys: Any) -> None:
    assert value(shell, "-o run", "y = 1") is None
    assert "nanalyze: recorded into run, but no kernels. Next: nanalyze info run\n" in capsys.readouterr().out


def test_importing_the_recorder_needs_no_ipython() -> None:
    import subprocess
    import sys

    program = "import sys; sys.modules['IPython'] = None; import nanalyze.recorder.magic; print('fine')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "fine\n"
