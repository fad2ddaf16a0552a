"""Jobs for tests on a real GPU: each is a process of its own that launches a counted kernel."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import nanalyze.analysis as na

RECORD = (sys.executable, "-c", "from nanalyze.commands import main; main()", "record", "-q", "--pause", "0")
PRELUDE = """
    import ctypes, os, signal, subprocess, sys, time, torch
    def launch(count):
        x = torch.zeros(1, device="cuda")
        for _ in range(count):
            x.add_(1)
        torch.cuda.synchronize()
        return int(x.item())
"""
COUNT = """
SELECT count(*) AS n FROM kernels JOIN kernel_classes USING (kernel_class_id) WHERE lower(name) LIKE '%add%'
"""


def write(tmp_path: Path, program: str) -> Path:
    """A script that has `launch(count)`, which returns how many additions were made."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(program))
    return script


def run(*words: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, done.stdout, done.stderr


def both(tmp_path: Path, program: str, *options: str) -> tuple[int, str, str]:
    """The job bare and recorded: code and output must be alike. What the recorded one answered."""
    script = write(tmp_path, program)
    bare = run(sys.executable, script)
    recorded = run(*RECORD, "-o", tmp_path / "run", *options, script)
    assert recorded[:2] == bare[:2], (bare, recorded)
    return recorded


def added(run_dir: Path) -> int:
    """Additions in the run."""
    with na.open(run_dir) as opened:
        assert not len(opened.damage())
        return int(opened.sql(COUNT)["n"][0])
