"""Write a run in formats that other programs open: Perfetto's trace JSON, Parquet, CSV.

from nanalyze import exporters

with na.open("run_dir") as run:
    exporters.export(run, "chrome", Path("trace.json"))
"""

from __future__ import annotations

from nanalyze.exporters.export import FORMATS, Exported, Progress, export

__all__ = ["FORMATS", "Exported", "Progress", "export"]
