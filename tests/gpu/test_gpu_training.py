"""A training step under the recorder, for as long as it once took to hang.

With CUPTI's default device-memory buffers a GPT-2 step deadlocked within seconds, CUPTI's worker
and the launching thread waiting for each other inside the driver. The step runs in a process of
its own, so that a hang fails the test instead of stopping the suite.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fake_gpu import final_process, read_table

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOB = """
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from gpt2_step import make_step
    from nanalyze import recorder
    import torch

    step = make_step("cuda")
    for index in range(3):
        step()
        with recorder.record(f"{sys.argv[2]}/{index}", pause_pct=0):
            end = time.monotonic() + 4
            steps = 0
            while time.monotonic() < end:
                with recorder.annotate("step"):
                    step()
                steps += 1
            torch.cuda.synchronize()
        print(steps)
"""


def test_training_goes_on_under_recordings_that_start_and_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(JOB), str(EXAMPLES), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    for index, steps in enumerate(map(int, done.stdout.split())):
        run = tmp_path / str(index)
        assert len(read_table(run, "ranges")) == steps
        end = final_process(run)
        assert end["records_lost"] == 0
        assert end["kernels_written"] % steps == 0  # every step launches the same
        assert end["kernels_written"] // steps > 500
