"""What the shipped queries cost on Spark with one and with two workers, beside DuckDB on the same machine.

    python benchmarks/spark.py RUN_DIR [--workers 1 2] [--query NAME ...] [--repeat N] [--report]

A standalone cluster is started on loopback for each number of workers, a master and workers of one core and
`--memory` each, from pyspark's own jars, and stopped afterwards. Each query runs in full on Spark, all of its views
translated; DuckDB runs it on as many cores. Times include bringing the result over. What a session computes first
pays for what the Java machines compile: `--repeat` runs each query several times and tells the last. `--report` adds
what a report costs, which brings aggregates over once and works on them here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nanalyze.analysis as na
from nanalyze import queries
from nanalyze.analysis import report
from nanalyze.analysis.engines import spark
from nanalyze.rundir.errors import NanalyzeError

QUERIES = ("kernel_durations", "top_kernels", "launch_gaps", "time_by_cause", "timeline_utilisation", "ranges_summary")
START_S = 120.0
OPENING = "(start and open)"


@dataclass(frozen=True)
class Cluster:
    """A standalone cluster: its URL, and the processes of its workers."""

    url: str
    workers: list[int]

    def cpu_s(self) -> float:
        """CPU seconds of the workers and of all that they started, which does the work."""
        return sum(_cpu_s(pid) for pid in _descendants(self.workers))


def _descendants(pids: Sequence[int]) -> list[int]:
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, pending = [], list(pids)
    while pending:
        found.append(pending.pop())
        pending += parents.get(found[-1], [])
    return found


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@contextlib.contextmanager
def cluster(workers: int, memory: str, folder: Path) -> Iterator[Cluster]:
    """A standalone cluster on loopback."""
    import pyspark

    home = Path(pyspark.__file__).parent
    port, page = _free_port(), _free_port()
    environment = {
        **os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1",
        "SPARK_PUBLIC_DNS": "127.0.0.1",
    }  # fmt: skip
    spark_class = str(home / "bin" / "spark-class")
    url = f"spark://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:

        def run(name: str, *arguments: str) -> int:
            log = stack.enter_context(open(folder / f"{name}.log", "wb"))
            process = subprocess.Popen([spark_class, *arguments], env=environment, stdout=log, stderr=log)
            stack.callback(_stop, process)
            return process.pid

        master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port)]
        run("master", *master, "--webui-port", str(page))
        pids = []
        for number in range(workers):
            worker = ["org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", memory]
            place = ["--host", "127.0.0.1", "--work-dir", str(folder / f"work{number}"), "--webui-port", "0"]
            pids.append(run(f"worker{number}", *worker, *place, url))
        _await(f"http://127.0.0.1:{page}/json/", workers)
        yield Cluster(url, pids)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(page: str, workers: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(page, timeout=5) as answer:
            if json.load(answer)["aliveworkers"] >= workers:
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"the cluster did not come up in {START_S:.0f} s")
        time.sleep(0.2)


def _parameters(query: queries.Query) -> dict[str, object] | None:
    return {p.name: p.value(p.default) for p in query.parameters} or None


def _times_on_spark(
    run_dir: Path, workers: int, names: Sequence[str], memory: str, with_report: bool, repeat: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by query, and the workers' CPU seconds."""
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, cluster(workers, memory, Path(folder)) as there:

        @contextlib.contextmanager
        def measured(name: str) -> Iterator[None]:
            before, started = there.cpu_s(), time.perf_counter()
            try:
                yield
                seconds[name], cpu[name] = time.perf_counter() - started, there.cpu_s() - before
            except NanalyzeError as error:
                print(f"{name}: {error}", file=sys.stderr)
            print(f"# {workers} workers, {name}: {seconds.get(name, float('nan')):.1f} s", file=sys.stderr, flush=True)

        with measured(OPENING):
            run = spark.open(run_dir, there.url)
        run.on_spark("SELECT count(*) AS n, sum(duration_ns) AS ns FROM raw.kernels ORDER BY n")
        for name in names:
            query = queries.query(name)
            for _ in range(repeat):  # the last one counts
                with measured(name):
                    run.on_spark(query.sql, _parameters(query), everything=True)
        if with_report:
            with measured("(report)"):
                report.write([run], Path(folder, "report"))
        run.close()
        run.stop()
    return seconds, cpu


def _times_in_duckdb(run_dir: Path, threads: int, names: Sequence[str]) -> dict[str, float]:
    found = {}
    # A locked connection takes no settings: the threads are those of the cores it may use.
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:threads])
    try:
        started = time.perf_counter()
        with na.open(run_dir) as run:
            found[OPENING] = time.perf_counter() - started
            for name in names:
                query = queries.query(name)
                started = time.perf_counter()
                run.arrow(query.sql, _parameters(query))
                found[name] = time.perf_counter() - started
    finally:
        os.sched_setaffinity(0, cores)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--query", dest="names", nargs="+", default=list(QUERIES))
    parser.add_argument("--memory", default="3g", help="of each worker")
    parser.add_argument("--repeat", type=int, default=1, help="how often each query runs on Spark; the last counts")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = f"--driver-memory 2g --conf spark.executor.memory={options.memory}"
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", f"{settings} pyspark-shell")
    columns = {f"DuckDB, {n} cores": _times_in_duckdb(options.run_dir, n, options.names) for n in options.workers}
    for workers in options.workers:
        seconds, cpu = _times_on_spark(
            options.run_dir, workers, options.names, options.memory, options.report, options.repeat
        )
        columns[f"Spark, {workers} workers"] = seconds
        columns[f"CPU of {workers} workers"] = cpu
    rows = list(dict.fromkeys(name for column in columns.values() for name in column))
    print("| seconds | " + " | ".join(columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in rows:
        print(f"| {name} | " + " | ".join(f"{c[name]:.1f}" if name in c else "" for c in columns.values()) + " |")


if __name__ == "__main__":
    main()
