"""`nanalyze info`: what a run holds, how each process ended, what was lost."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanalyze.commands._open import RunDirectory, open_run
from nanalyze.commands._output import escape, table
from nanalyze.rundir import objectstore
from nanalyze.rundir.schema import TABLES
from nanalyze.rundir.shards import SHARD_NAME

if TYPE_CHECKING:
    import nanalyze.analysis as na

SHOWN_ROWS = 20  # of a list, for people; --json has them all
NOTE_CHARACTERS = 160  # of a note, for people
_STARTTIME = 19  # field of /proc/<pid>/stat after the name, which is in brackets

Row = dict[str, Any]


@click.command("info")
@click.argument("run_dir", type=RunDirectory())
@click.option("--json", "as_json", is_flag=True, help="Write everything as one JSON object.")
def info(run_dir: Path, as_json: bool) -> None:
    """Say what the run in RUN_DIR holds: processes and how they ended, devices, sizes, losses, damage.

    A process without an end was cut off (killed, or the machine failed) or is still running; what it
    had written until then is there.

    \b
    Examples:
      nanalyze info run_dir
      nanalyze info run_dir --json | jq '.processes[] | select(.ended == "cut off")'
    """
    with open_run(run_dir) as run:
        content = summary(run)
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    for line in lines(content):
        click.echo(line)


def summary(run: na.Run) -> Row:
    """Everything `info` tells, in types that JSON has; instants in ns since the epoch, sizes in bytes."""
    processes = _rows(run, PROCESSES)
    for row in processes:
        row["command"] = _command(row["command"])
        row["ended"] = ending(row)
        row["seconds"] = _seconds(row["started_ns"], row["ended_ns"] or row["last_ns"])
    starts = [row["started_ns"] for row in processes]
    ends = [row["ended_ns"] for row in processes]
    return {
        "run_dir": str(run.path),
        "run_id": run.info.get("run_id"),
        "source": run.info.get("source"),
        "created_ns": run.info.get("created_ns"),
        "started_ns": min(starts, default=None),
        "ended_ns": max(ends) if ends and None not in ends else None,
        "bytes": sum(size for _, size in _sizes(run.path)),
        "tables": _tables(run),
        "rolled_up": _rolled_up(run),
        "processes": processes,
        "devices": _rows(run, DEVICES),
        "losses": _rows(run, LOSSES),
        "notes": _rows(run, NOTES),
        "damage": _rows(run, DAMAGE),
    }


PROCESSES = """
WITH launches AS (
    SELECT process, CAST(sum(kernels) AS BIGINT) AS kernels, max(last_ns) AS last_ns
    FROM (
        SELECT process, launches AS kernels, last_ns FROM _class_devices
        UNION ALL
        SELECT process, launches, last_ns FROM _rolled_up
    ) AS found
    GROUP BY process
)
SELECT process, host, pid, rank, local_rank, world_size, started_ns, ended_ns, ending, command, layers,
       nanalyze_version, python_version, cuda_driver_version, gpu_driver_version, cupti_version, cupti_path,
       coalesce(kernels, 0) AS kernels, records_lost, recorder_cpu_ns, last_ns
FROM processes
LEFT JOIN launches USING (process)
ORDER BY rank NULLS LAST, started_ns, process
"""
DEVICES = """
SELECT uuid, name, chip, cc_major, cc_minor, sm_count, memory_bytes, is_mig, count(DISTINCT process) AS processes
FROM devices
GROUP BY ALL
ORDER BY uuid NULLS LAST, name
"""
LOSSES = """
SELECT process, layer, message, count
FROM events
WHERE kind = 'loss'
ORDER BY process, layer, message, count
"""
NOTES = """
SELECT process, layer, kind, message, count
FROM events
WHERE kind <> 'loss'
ORDER BY process, time_ns, layer, message
"""
DAMAGE = """
SELECT path, table_name, process, problem, remedy
FROM damage
ORDER BY table_name, process NULLS FIRST, path, problem
"""


ROLLED_UP = """
SELECT
    CAST(sum(launches) AS BIGINT) AS launches, CAST(min(first_ns) AS BIGINT) AS first_ns,
    CAST(max(last_ns) AS BIGINT) AS last_ns
FROM _rolled_up
"""


def _rolled_up(run: na.Run) -> Row | None:
    """How many launches of which time are kept as sums a minute; None where there are none."""
    (row,) = _rows(run, ROLLED_UP)
    return row if row["launches"] is not None else None


def _rows(run: na.Run, query: str) -> list[Row]:
    return list(run.arrow(query).to_pylist())


def _tables(run: na.Run) -> list[Row]:
    """Rows, shards and bytes of every table that has any; rows are those that can be read."""
    held: dict[str, Row] = {}
    for path, size in _sizes(run.path):
        if SHARD_NAME.match(path.name):
            row = held.setdefault(path.parts[0], {"table": path.parts[0], "rows": None, "shards": 0, "bytes": 0})
            row["shards"] += 1
            row["bytes"] += size
    for name, row in held.items():
        if name in TABLES:
            row["rows"] = run.arrow(f'SELECT count(*) AS n FROM "{name}"').column("n")[0].as_py()
    return [held[name] for name in TABLES if name in held]


def _sizes(run_dir: Path) -> Iterator[tuple[Path, int]]:
    """Files of the run, relative to it, with their sizes; one that vanishes meanwhile is left out."""
    if objectstore.is_remote(run_dir):
        yield from ((Path(name), size) for name, size in objectstore.listing(run_dir))
        return
    for folder, _, names in os.walk(run_dir):
        for name in names:
            path = Path(folder, name)
            try:
                yield path.relative_to(run_dir), path.stat().st_size
            except OSError:
                continue


def _command(text: str) -> list[str]:
    try:
        words = json.loads(text)
    except ValueError:
        return [text]
    return [str(word) for word in words] if isinstance(words, list) else [text]


# --- how a process ended -----------------------------------------------------------------------


def ending(row: Row) -> str:
    """stop, exit or failed as it was recorded; without an end: running, or cut off."""
    if row["ended_ns"] is not None:
        return str(row["ending"] or "end")
    return "running" if _is_running(row["host"], row["pid"], row["started_ns"]) else "cut off"


def _is_running(host: str, pid: int, started_ns: int) -> bool:
    """Whether that process is still there: on this host, and no later one with the same number."""
    if host != socket.gethostname():
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return False
    is_zombie = fields[0] == "Z"
    return not is_zombie and time.time() - age_s < started_ns / 1e9 + 1


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9


# --- for people --------------------------------------------------------------------------------


def lines(content: Row) -> Iterator[str]:
    """The same for a terminal."""
    yield from _head(content)
    yield ""
    names = ["process", "rank", "ended", "seconds", "kernels", "lost", "layers", "command"]
    yield from _table("Processes", names, [_process_cells(row) for row in content["processes"]])
    devices = [
        (row["name"], row["uuid"], f"{row['cc_major']}.{row['cc_minor']}", row["sm_count"], row["processes"])
        for row in content["devices"]
    ]
    yield from _table("Devices", ["name", "uuid", "cc", "SMs", "processes"], devices)
    rows = [(row["table"], row["rows"], row["shards"], size_text(row["bytes"])) for row in content["tables"]]
    yield from _table("Tables", ["table", "rows", "shards", "size"], rows)
    if content["rolled_up"] is not None:
        yield from _list("Rolled up", [_rolled_up_text(content["rolled_up"])])
    for name in ("losses", "notes"):
        yield from _events(name, content[name])
    yield from _list("Damage", [f"{row['path']}: {row['problem']}. {row['remedy']}" for row in content["damage"]])
    if not content["losses"] and not content["damage"]:
        yield "No losses, no damage."


def _head(content: Row) -> Iterator[str]:
    ended = [row["ended"] for row in content["processes"]]
    counts = ", ".join(f"{ended.count(kind)} {kind}" for kind in dict.fromkeys(ended))
    noun = "process" if len(ended) == 1 else "processes"
    yield f"{content['run_dir']}: {len(ended)} {noun} ({counts}), {size_text(content['bytes'])}, by {content['source']}"
    if content["started_ns"] is not None:
        moment = datetime.fromtimestamp(content["started_ns"] / 1e9, UTC)
        duration = _seconds(content["started_ns"], content["ended_ns"])
        lasted = "" if duration is None else f", lasted {duration:.1f} s"
        yield f"Started {moment:%Y-%m-%d %H:%M:%S} UTC{lasted}"


def _rolled_up_text(row: Row) -> str:
    first, last = (datetime.fromtimestamp(row[name] / 1e9, UTC) for name in ("first_ns", "last_ns"))
    return (
        f"{row['launches']:,} launches from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC are kept as sums a "
        "minute (view `kernel_minutes`): totals, percentiles and verdicts of kernels hold them; gaps, steps, ranges not"
    )


def _process_cells(row: Row) -> tuple[object, ...]:
    seconds = None if row["seconds"] is None else round(row["seconds"], 1)
    shown = (row["process"], row["rank"], row["ended"], seconds)
    return (*shown, row["kernels"], row["records_lost"], row["layers"], " ".join(row["command"]))


def _table(title: str, names: list[str], rows: Sequence[tuple[object, ...]]) -> Iterator[str]:
    if not rows:
        return
    yield f"{title}:"
    yield from (f"  {line}" for line in table(names, list(rows[:SHOWN_ROWS])).splitlines())
    if len(rows) > SHOWN_ROWS:
        yield f"  and {len(rows) - SHOWN_ROWS} more: --json has all"
    yield ""


def _events(name: str, rows: list[Row]) -> Iterator[str]:
    """A line each; what several processes say alike once, and notes, which may list every counter, cut."""
    said: dict[str, list[str]] = {}
    for row in rows:
        count = "" if row["count"] is None else f" ({row['count']:,})"
        kind = f" {row['kind']}" if "kind" in row else ""
        message = row["message"]
        if row.get("kind") == "note" and len(message) > NOTE_CHARACTERS:
            message = f"{message[:NOTE_CHARACTERS]}…"
        said.setdefault(f"{row['layer']}{kind}: {message}{count}", []).append(row["process"])
    texts = [f"{who[0] if len(who) == 1 else f'{len(who)} processes'}: {text}" for text, who in said.items()]
    yield from _list(name.capitalize(), texts)


def _list(title: str, texts: list[str]) -> Iterator[str]:
    if not texts:
        return
    yield f"{title}:"
    yield from (f"  {escape(text)}" for text in texts[:SHOWN_ROWS])
    if len(texts) > SHOWN_ROWS:
        yield f"  and {len(texts) - SHOWN_ROWS} more: --json has all"
    yield ""


def size_text(count: int) -> str:
    """Bytes for people: powers of 1000."""
    value, units = float(count), ["kB", "MB", "GB", "TB"]
    if count < 1000:
        return f"{count} B"
    while value >= 1000 and units:
        value, unit = value / 1000, units.pop(0)
    return f"{value:.1f} {unit}"
