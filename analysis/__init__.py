"""Reading a recorded run: no GPU and no CUDA needed.

import nanalyze.analysis as na

run = na.open("run_dir")
run.verdicts()
"""

from nanalyze.analysis.run import Batches, Run, open

__all__ = ["Batches", "Run", "open"]
