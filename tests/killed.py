"""A call on a run directory, killed at each step at which it changes files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Without pyarrow in the parent, so that forking is safe. Each child gets SIGKILL at the n-th call that changes files.
CODE = """
import json, os, shutil, signal, sys
from pathlib import Path
from nanalyze.rundir import compaction

source, out, call, events, arguments = Path(sys.argv[1]), Path(sys.argv[2]), *map(json.loads, sys.argv[3:])
assert "pyarrow" not in sys.modules

def child(run_dir, number):
    calls = 0
    def count(event, details):
        nonlocal calls
        inside = str(run_dir) in str(details[0]) if details else False
        changes = event in events or (event == "open" and "w" in str(details[1]))
        if inside and changes:
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    try:
        getattr(compaction, call)(run_dir, *arguments)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

for number in range(1, 1000):
    run_dir = out / str(number)
    shutil.copytree(source, run_dir)
    pid = os.fork()
    if pid == 0:
        child(run_dir, number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != -signal.SIGKILL:
        sys.exit(code)
"""


def killed_at_every_step(
    source: Path, out: Path, call: str, *arguments: int, events: Sequence[str] = ("os.rename", "os.remove", "os.utime")
) -> list[Path]:
    """Copies of the run `source`, the n-th from `compaction.<call>` killed at its n-th step; the last ran to its end.

    A step is one of the audit `events`, or the opening of a file for writing. `out` is made.
    """
    out.mkdir()
    words = [json.dumps(word) for word in (call, list(events), arguments)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(source), str(out), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(out.iterdir(), key=lambda path: int(path.name))
