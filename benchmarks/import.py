"""Importing other tools' traces: time and peak memory, beside Holistic Trace Analysis' parser for Kineto.

    python benchmarks/import.py                           # a million kernels and a million events, synthetic
    python benchmarks/import.py --hta /path/to/python     # also HTA, with an interpreter that has it
    python benchmarks/import.py --only nsys --size 4000000

Files are generated (seeded), so nothing is needed. Every measurement has a process of its own: `time` is
from the call to its end, imports of modules left out for both; `peak` is the process's largest resident
memory, imports included. Reading the file's first byte to its last once before takes the disk out of it.
The best of `--rounds` rounds counts, taken in turns, because other load only adds.

`sqlite3` reads the same columns of the same file with Python's own module into numpy arrays: what
`sqlite_pages` is measured against.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

KERNEL_COLUMNS = (
    "start", "end", "deviceId", "contextId", "greenContextId", "streamId", "correlationId", "globalPid",
    "demangledName", "shortName", "mangledName", "launchType", "cacheConfig", "registersPerThread",
    "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory", "dynamicSharedMemory",
    "localMemoryPerThread", "localMemoryTotal", "gridId", "sharedMemoryExecuted", "graphNodeId",
    "sharedMemoryLimitConfig",
)  # fmt: skip
RUNTIME_COLUMNS = (
    "start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue", "callchainId"
)  # fmt: skip
EPOCH_NS = 1_700_000_000_000_000_000
PID = (1 << 48) | (4242 << 24)
CLASSES = 300

# Each program prints the seconds that the call took and how many kernels or events it read.
IMPORT = """
import sys, time
from pathlib import Path
import duckdb, pyarrow
from nanalyze.importers import registry
registry.importers()
source, target = map(Path, sys.argv[1:])
start = time.perf_counter()
summary = registry.import_files([source], target)
print(time.perf_counter() - start, summary.kernels, summary.kernel_ns)
"""
SQLITE3 = """
import sqlite3, sys, time
import numpy as np
columns = 'start, "end", deviceId, contextId, streamId, correlationId, globalPid, demangledName, mangledName, shortName'
columns += ', gridX, gridY, gridZ, blockX, blockY, blockZ, registersPerThread, staticSharedMemory'
columns += ', dynamicSharedMemory, localMemoryPerThread'
start = time.perf_counter()
cursor = sqlite3.connect(sys.argv[1]).execute(f'SELECT {columns} FROM CUPTI_ACTIVITY_KIND_KERNEL')
kernels = total = 0
while rows := cursor.fetchmany(50_000):
    arrays = [np.array(column) for column in zip(*rows)]
    kernels += len(rows)
    total += int((arrays[1] - arrays[0]).sum())
print(time.perf_counter() - start, kernels, total)
"""
HTA = """
import sys, time
from hta.common.trace_parser import parse_trace_dataframe
from hta.configs.parser_config import ParserConfig
start = time.perf_counter()
_, frame, _ = parse_trace_dataframe(sys.argv[1], ParserConfig())
print(time.perf_counter() - start, len(frame), 0)
"""


@dataclass(frozen=True)
class Way:
    """One program that reads a file: what it is called, its interpreter and its text."""

    name: str
    python: str
    program: str


@dataclass(frozen=True)
class Taken:
    """What a run took: seconds, MiB, and what it read."""

    seconds: float
    peak_mib: float
    count: int
    total_ns: int


def nsys_file(path: Path, kernels: int, seed: int = 7) -> None:
    """A SQLite export with so many launches of 300 classes on 4 streams, and the call of each."""
    random = np.random.default_rng(seed)
    start = 1_000_000_000 + np.cumsum(random.integers(1_000, 9_000, kernels))
    length = np.maximum(800, random.lognormal(9, 1, kernels)).astype(np.int64)
    kind = random.integers(0, CLASSES, kernels)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    for table, columns in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", KERNEL_COLUMNS),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", RUNTIME_COLUMNS),
    ):
        connection.execute(f"CREATE TABLE {table} ({', '.join(f'{name!r} INTEGER' for name in columns)})")
    connection.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
    connection.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
    connection.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (EPOCH_NS,))
    names = [(id_, f"void gemm_{id_}<float, {id_}>(float *)") for id_ in range(CLASSES)]
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [*names, (CLASSES, "cudaLaunchKernel_v7000")])
    _insert(connection, "CUPTI_ACTIVITY_KIND_KERNEL", len(KERNEL_COLUMNS), _kernels(start, length, kind))
    _insert(connection, "CUPTI_ACTIVITY_KIND_RUNTIME", len(RUNTIME_COLUMNS), _calls(start))
    connection.commit()
    connection.close()


def _insert(connection: sqlite3.Connection, table: str, columns: int, rows: Iterator[tuple[int | None, ...]]) -> None:
    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)


def _kernels(start: np.ndarray, length: np.ndarray, kind: np.ndarray) -> Iterator[tuple[int | None, ...]]:
    for at, (begin, took, which) in enumerate(zip(start.tolist(), length.tolist(), kind.tolist(), strict=True)):
        yield (
            begin, begin + took, 0, 1, 0, 7 + which % 4, 3 * at, PID, which, which, which, 1, 0, 32 + which % 7,
            which + 1, 1 + which % 3, 1, 256, 1, 1, 0, 1024 * (which % 5), 0, 72_548_352, at, 32_768, None, 0,
        )  # fmt: skip


def _calls(start: np.ndarray) -> Iterator[tuple[int | None, ...]]:
    for at, begin in enumerate(start.tolist()):
        yield (begin - 9_000, begin - 6_000, 0, PID | 77, 3 * at, CLASSES, 0, None)


def measured(way: Way, arguments: list[Path]) -> Taken:
    """Run the program once; its peak memory is what the kernel counted."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([way.python, "-c", way.program, *map(str, arguments)], stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{way.name}: failed with exit code {process.returncode}")
        output.seek(0)
        seconds, count, total = output.read().split()[-3:]
    return Taken(float(seconds), usage.ru_maxrss / 1024, int(count), int(total))


def compared(ways: list[Way], source: Path, rounds: int) -> dict[str, Taken]:
    """The best round of each way, taken in turns."""
    best: dict[str, Taken] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for way in ways:
                target = [Path(folder) / f"run{number}"] if way.program is IMPORT else []
                taken = measured(way, [source, *target])
                if way.name not in best or taken.seconds < best[way.name].seconds:
                    best[way.name] = taken
    return best


def table(title: str, unit: str, size: int, best: dict[str, Taken]) -> str:
    """Time, rate and memory side by side; the first row is ours."""
    ours = next(iter(best.values()))
    lines = [title, "", f"| reader | s | {unit}/s | peak MiB | time | memory |", "|---|---|---|---|---|---|"]
    for name, taken in best.items():
        ratio = f"{taken.seconds / ours.seconds:.1f}x | {taken.peak_mib / ours.peak_mib:.1f}x"
        lines.append(f"| {name} | {taken.seconds:.2f} | {size / taken.seconds:,.0f} | {taken.peak_mib:.0f} | {ratio} |")
    return "\n".join(lines)


def nsys(arguments: argparse.Namespace, folder: Path) -> str:
    source = folder / "report.sqlite"
    nsys_file(source, arguments.size)
    ways = [Way("nanalyze import", sys.executable, IMPORT), Way("sqlite3, kernels only", sys.executable, SQLITE3)]
    best = compared(ways, source, arguments.rounds)
    if len({(taken.count, taken.total_ns) for taken in best.values()}) != 1:
        raise SystemExit(f"the readers disagree: {best}")
    return table(
        f"Nsight Systems, {arguments.size:,} kernels and as many launch calls", "kernels", arguments.size, best
    )


def kineto(arguments: argparse.Namespace, folder: Path) -> str:
    maker = _module(Path(__file__).with_name("make_kineto.py"))
    source = folder / "trace.json"
    written = maker.write_trace(source, maker.Mix(events=arguments.size))
    ways = [Way("nanalyze import", sys.executable, IMPORT)]
    if arguments.hta:
        ways.append(Way("Holistic Trace Analysis", arguments.hta, HTA))
    best = compared(ways, source, arguments.rounds)
    ours = best["nanalyze import"]
    if (ours.count, ours.total_ns) != (written.kernels, written.kernel_ns):
        raise SystemExit(f"read {ours}, written {written}")
    return table(f"Kineto, {written.events:,} events, {written.bytes / 2**20:.0f} MiB", "events", written.events, best)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def proton(arguments: argparse.Namespace, folder: Path) -> str:
    def node(name: str, children: list[object], **metrics: object) -> dict[str, object]:
        return {"children": children, "frame": {"name": name, "type": "function"}, "metrics": metrics}

    nodes, launches = arguments.size // 10, 10
    told = {"count": launches, "device_id": "0", "device_type": "CUDA", "time (ns)": 12_345}
    steps = [
        node(f"step {at}", [node(f"kernel_{k}", [], **told) for k in range(100)], flops=1e9)
        for at in range(nodes // 100)
    ]
    source = folder / "profile.hatchet"
    source.write_text(json.dumps([node("ROOT", list(steps)), {}]))
    best = compared([Way("nanalyze import", sys.executable, IMPORT)], source, arguments.rounds)
    size = best["nanalyze import"].count
    return table(f"Proton, {nodes:,} nodes that stand for {size:,} launches", "launches", size, best)


KINDS: dict[str, Callable[[argparse.Namespace, Path], str]] = {"nsys": nsys, "kineto": kineto, "proton": proton}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, comma-separated")
    parser.add_argument("--size", type=int, default=1_000_000, help="kernels or events in a file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hta", metavar="PYTHON", help="interpreter that has HolisticTraceAnalysis")
    arguments = parser.parse_args()
    for kind in arguments.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            print(KINDS[kind](arguments, Path(folder)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
