"""Writes `docs/run-directory.md` from the schema.

    python -m nanalyze.rundir.document            # write it
    python -m nanalyze.rundir.document --check    # exit 1 if it is out of date

The file is committed so that it can be read without running anything; a test fails on drift.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanalyze.rundir import schema
from nanalyze.rundir.schema import DELTA, PLAIN, Column, Table

# From the repository's root, where the Makefile and CI call this.
DOCUMENT = Path("docs/run-directory.md")

HEAD = """\
<!-- Generated from rundir/schema.py by `make docs`. Do not edit. -->
# The run directory

A recording is a directory of Parquet files and one small JSON file. It is the only thing that the
recorder and the analysis share: copy it anywhere, read it with anything that reads Parquet. This
page describes format version {version}.

    run_dir/
        run.json
{tree}

One folder per table, one folder per process in it (Hive partitioning: engines turn the folder's
name into a column `process`), one file per flush in that. Every file is complete when it appears
under its name. A table without rows has no folder.

`process` is `<host>-<rank>-<pid>`, with letters, digits, `_`, `.` and `-` only.

## run.json

    {{
      "format": "{format}",
      "format_version": 1, or 2 once launches were rolled up, or 3 once samples were,
      "run_id": "32 hex digits, new for each recording",
      "created_ns": nanoseconds since the Unix epoch,
      "source": "recorder, or the name of the importer",
      "settings": {{the recorder's settings}}
    }}

The first process of a job writes it; the others find it and add their own partitions.

## Shards

    000001-9f86d081884c7d65.parquet

- **Sequence**: six digits or more, from 1, without gaps for each table and process. A gap is a lost
  file. The last row of `processes` tells how many files each table has had (`shards`, a JSON
  object), so that a missing tail shows too.
- **Hash**: the 8-byte BLAKE2b hash of the file, as 16 hex digits
  (`hashlib.blake2b(data, digest_size=8).hexdigest()`). A file whose bytes give another hash is
  damaged. Check it: DuckDB verifies no page checksums and returns wrong sums from damaged files.
- **Merged files** (`nanalyze compact`) have the first and the last of the numbers that they stand for,
  `000001-000040-<hash>.parquet`, and hold the rows of those files in their order. One takes the place of
  every file whose numbers lie within its own, from the moment it has its name until those are removed:
  a reader that finds both reads the merged one only.
- **Names that start with a dot** are unfinished files and locks. Ignore them.
- The Parquet metadata of each file holds `nanalyze.format_version` and `nanalyze.table`.
- zstd level 1, row groups of {row_group_rows:,} rows, page checksums. Instants and ids that grow are
  `{delta}`, durations and values `{plain}`; all else is dictionary-encoded.
  `benchmarks/storage.py` compares this with the alternatives.

## Merging files

A job that runs for days leaves many small files. `nanalyze compact run_dir` merges those with consecutive
numbers into files of up to 64 MiB, also while the job is recorded: a recorder only ever adds files with new
numbers. Values, types and order stay as they are. The merged file is written under a name with a dot, flushed
to the disk and renamed, then its parts are removed; whatever is interrupted where, the next call finishes
what was begun, and nanalyze reads each row once at any moment. Other readers, which know nothing of merged
files, can see rows twice in the moment between the renaming and the removal, or for as long as an interrupted
call has not been repeated. A query that has a file open while it is removed fails; open the run again.
Damaged files, and numbers that occur twice, are left as they are. A lock (`.compact.lock`) keeps two calls apart.

## Rolling old launches up

`nanalyze compact run_dir --roll-up-older-than 7d` gives up single launches of the time before that: `kernel_minutes`
keeps, for each process, device, kernel class and minute, the number of launches, their total, shortest and longest
time, the bins of three percentiles, and a histogram of durations for each hour, from which the percentiles of any
hours follow by adding up. Queries that need no more (`top_kernels`, `kernel_durations`, `verdict_shares`, the view
`verdicts`, `nanalyze trend`) say the same as before, but that times are added up by minutes; everything that needs
single launches (gaps, time by cause, steps, what ranges and ranks spent, timelines, `nanalyze compare`) treats that
time as not recorded, and the report and `nanalyze info` say how much it is. Copies, ranges, exact counters, clocks and
events stay.

- **Which launches**: whole files, each process's first ones, up to the first that holds a launch that ended or was
  queued later. Damaged files stay as they are. A launch counts in the minute in which it started; one without a start
  in that of its call.
- **Safe at any moment**: a file of `kernel_minutes` has the numbers of the files of `kernels` that it stands for, and
  takes their place from the moment it has its name, as a merged file does; of equal numbers it wins. Then those are
  removed. Whatever is interrupted where, each launch counts once, and the next call finishes what was begun. A process
  that still records is not in the way: its files are complete when they have their names, and new ones get new numbers.
- **Versions**: before the first file appears, `run.json` gets format version 2, or 3 where samples are rolled up, so
  that an older nanalyze refuses the run instead of missing its launches.
- **Samples** cannot be attributed to kernels without single launches, so they go first: whole files of them, an hour
  at a time, are attributed to the launches of that hour, and a file of `sampled_windows` takes their place. Launches
  stay where samples do, so that nothing is ever attributed to a part of them. It takes as long as attributing that
  hour takes (docs/attribution.md). `--lose-samples` leaves that out: those samples are then never attributed. Counters
  of kernels measured exactly stay.

### What a window of samples keeps

Of each counter of each kernel class: its mean over the window, standard error, 95 % interval, and how many launches and
how much time stand behind it. `counters`, `verdicts`, reports and trends put windows and the samples that are still
there together: counters of a launch (bytes, instructions) by launches, percentages and rates by time. The normal
equations, from which everything would follow, are not kept: they grow with the square of the number of terms, 0.6 MB a
block at 400 terms, and an interval needs tens of blocks, so an hour would take more than its launches do.

- **The error** of windows together is the root of the summed squares of what each left open, plus what more samples do
  not remove (`lasting_error`: where launches begin and end, what L2 keeps of DRAM bytes from launch to launch, how far
  a class's clock is known, and 1 % of the value). Intervals shrink in proportion; not
  so an end that stands at 0 or at 100 %, nor the upper end of what is bounded by parts that were not sampled. A rate
  that may be zero is held there in each window, so the mean of many such rates is too high, by less than the lower half
  of one window's interval: that half stays as wide.
- **Against the same run not rolled up** (simulated by `tests/simulator.py`: 85 classes, launches of a class vary by
  10 %, 60 s in six windows of 10 s; 2026-11-30): half of the values differ by less than 0.13 standard errors (0.5 % of
  instructions, 1.2 % of DRAM reads), 95 % by less than 0.4. Intervals are as wide (median ratio 0.99 to 1.00); all hold
  the truth, as all of the whole run do. Where rates double over 30 s (20 classes), they are 0.9 times as wide: drift
  from window to window is no noise any more. All hold. Verdicts were the same in each case.
- **What is lost**: covariances of classes and counters; the views `attribution`, `attribution_windows` and
  `attribution_quality` of that time; which classes could not be told apart in it, which have no counter then. A file
  with fewer than 80 samples of a group says nothing of it. Of the minute in which rolled-up launches end, samples that
  are still there are not attributed any more, since not all launches of that minute are: a minute for each call.
  Spark has the view `sampled_windows`, but does not put it into `counters`.
- **Size and time**: 16 kB a window for 85 classes with ten counters each, so 11 MB for the 720 hours of a month. 120 s
  of that job, 3.1 million launches and 120,000 samples of 1 ms, took 5.1 s of CPU time and 0.9 GB: 4 % of a core.

An hour of a job with 100 million launches a day (4.17 million launches of 800 classes, each of them in every minute,
on four streams) took 36.1 MB as launches and 0.57 MB rolled up, 11.8 bytes a row; 720 such hours, so a month, are
409 MB instead of 26 GB. That is the one hour multiplied, measured on 2026-11-30; it took 3.1 s of CPU time. A
histogram for each minute instead of each hour would make it 1 GB.

A process that is killed leaves whole files up to its last flush, possibly one dotfile, and no
final row in `processes` (`ended_ns` is NULL in its latest row).

## Conventions

- Instants (`*_ns`) are integer nanoseconds since the Unix epoch on the host's realtime clock. CUPTI
  uses the same clock, so rows of different tables compare directly.
- Sizes are bytes, frequencies Hz. The unit is in the name of the column.
- NULL means not measured or not applicable. It is never 0, -1 or NaN.
- Ids are unique in a process; join on `process` and the id. `kernel_class_id` alone is the same in
  every process and run.

## Reading it

`nanalyze sql run_dir` and `nanalyze.analysis.open("run_dir")` check the hashes and add views. Without
nanalyze, read the files as they stand, also while the job runs:

DuckDB:

```python
import duckdb

duckdb.sql(\"\"\"
    SELECT name, count(*) AS launches, sum(duration_ns) AS total_ns
    FROM read_parquet('run_dir/kernels/**/*.parquet', hive_partitioning = true)
    JOIN (SELECT DISTINCT kernel_class_id, name FROM read_parquet('run_dir/kernel_classes/**/*.parquet'))
        USING (kernel_class_id)
    GROUP BY name
    ORDER BY total_ns DESC, name
\"\"\").show()
```

pandas, through pyarrow:

```python
import pyarrow.dataset

dataset = pyarrow.dataset.dataset("run_dir/kernels", format="parquet", partitioning="hive")
kernels = dataset.to_table().to_pandas()
```

Spark:

```
spark.read.parquet("run_dir/kernels").createOrReplaceTempView("kernels")
```

A reader that wants to trust what it reads checks four things: the version in `run.json`, each
file's hash, gaps in the sequence, and the counts in `processes.shards`:

```python
import hashlib, pathlib

for path in sorted(pathlib.Path("run_dir").glob("*/process=*/[0-9]*.parquet")):
    stated = path.stem.split("-")[-1]
    if hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() != stated:
        print(f"damaged: {{path}}")
```

## Versions

{history}

A reader refuses versions that it does not know. Any change of a table or of this layout makes a new
version; each keeps its line here.

## Tables
"""


def document() -> str:
    """The whole page."""
    parts = [_head()]
    parts += [_table(table) for table in schema.TABLES.values()]
    return "\n".join(parts)


def _head() -> str:
    from nanalyze.rundir.shards import ROW_GROUP_ROWS

    example = "process=node7-0-4242/000001-9f86d081884c7d65.parquet"
    return HEAD.format(
        version=schema.FORMAT_VERSION,
        format=schema.FORMAT_NAME,
        tree="\n".join(f"        {name}/{example}" for name in schema.TABLES),
        row_group_rows=ROW_GROUP_ROWS,
        delta=DELTA,
        plain=PLAIN,
        history="\n".join(f"- **{version}**: {text}" for version, text in schema.HISTORY.items()),
    )


def _table(table: Table) -> str:
    lines = [
        f"### {table.name}",
        "",
        table.meaning,
        "",
        "| column | type | unit | NULL | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(column) for column in _columns(table)]
    if table.open_ended:
        lines += ["", "Any further column is a counter, float64, named as the counter."]
    return "\n".join([*lines, ""])


def _columns(table: Table) -> Iterator[Column]:
    yield from table.columns
    yield schema.PROCESS_COLUMN


def _row(column: Column) -> str:
    nullable = "yes" if column.nullable else ""
    meaning = column.meaning.replace("|", "\\|")  # a bare bar would end the cell
    return f"| `{column.name}` | {column.type} | {column.unit} | {nullable} | {meaning} |"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with `--check` compare it; the exit code."""
    return write_or_check(arguments, DOCUMENT, document(), "rundir/schema.py")


def write_or_check(arguments: Sequence[str], path: Path, wanted: str, source: str) -> int:
    """Write `wanted` to `path`; with `--check` only compare, and say so on stderr where it differs."""
    if "--check" not in arguments:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == wanted:
        return 0
    sys.stderr.write(f"{path}: is not what {source} gives. Run `make docs` and commit the result.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
