"""Reading a recorded run: no GPU and no CUDA needed.

import nanalyze.analysis as na

run = na.open("run_dir")
run.verdicts()

DuckDB and numpy are loaded with the first name that is used: most of what `nanalyze --help` would take.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanalyze.analysis.run import Batches, Run, open
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from nanalyze.analysis import run

        globals().update({each: getattr(run, each) for each in __all__})
        return globals()[name]


__all__ = ["Batches", "Run", "open"]
