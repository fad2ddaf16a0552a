"""The marker `own_process` of conftest.py, tried on a folder of tests of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
from pathlib import Path
import pytest

@pytest.fixture(scope="module", autouse=True)
def trace():
    with open("fixtures", "a") as file:
        file.write(f"{os.getpid()}\\n")

def note(name):
    Path(name).write_text(str(os.getpid()))

@pytest.mark.own_process
@pytest.mark.parametrize("what", ["a", "b"])
def test_passes(what):
    note(f"passes-{what}")

def test_stays():
    note("stays")

@pytest.mark.own_process
def test_fails():
    print("printed before")
    assert 1 + 1 == 3

@pytest.mark.own_process
def test_dies():
    os._exit(0)

@pytest.mark.own_process
def test_skips():
    pytest.skip("for a reason")

@pytest.mark.own_process
@pytest.mark.skip(reason="from the start")
def test_is_skipped():
    note("never")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_process")
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -ra --strict-markers\nmarkers =\n    gpu\n    own_process\n"
    )
    (folder / "test_some.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *["-P", "-m", "pytest", "-p", "no:cacheprovider"]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    (folder / "output").write_text(done.stdout)
    return folder


def test_each_marked_test_has_a_process_of_its_own(folder: Path) -> None:
    processes = [(folder / name).read_text() for name in ("passes-a", "passes-b", "stays")]
    assert len(set(processes)) == 3
    fixtures = (folder / "fixtures").read_text().split()
    assert fixtures.count(processes[2]) == 1
    assert len(fixtures) == len(set(fixtures)) == 6  # five children and the one test that stays
    assert not (folder / "never").exists()


def test_outcomes_and_output_are_those_of_the_process(folder: Path) -> None:
    output = (folder / "output").read_text()
    assert "2 failed, 3 passed, 2 skipped" in output
    assert re.search(r"SKIPPED \[1\] \S+: for a reason", output)
    assert re.search(r"SKIPPED \[1\] \S+: from the start", output)
    assert "in a process of its own: exit code 1\n" in output
    assert "assert (1 + 1) == 3" in output
    assert "printed before" in output
    # One that ends without a result has not passed, whatever its exit code.
    assert "in a process of its own: exit code 0\n" in output
