"""Starts a Spark session and reads files by it; every failure is one line that says what to do."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from nanalyze.analysis.engines.translate import INSTALL
from nanalyze.rundir.errors import NanalyzeError, QueryError, RunError

if TYPE_CHECKING:
    import pyarrow as pa

CONNECT_S = 5.0
WORKER_S = 60.0
# What results depend on; all else is the cluster's own configuration (spark-defaults.conf, SPARK_CONF_DIR).
SETTINGS = {
    "spark.sql.ansi.enabled": "true",  # an overflow is an error, as in DuckDB
    "spark.sql.caseSensitive": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",  # a process called 1 is a text
    "spark.sql.cteRecursionLevelLimit": "250",  # queries end their own walks after 200
    "spark.sql.cteRecursionRowLimit": "-1",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",  # shards hold a CRC a page
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # All joins are on the partition's column, `process`: pruning by it would compute one side of each twice, and
    # took a plan of the view kernels from 30 scans to hundreds.
    "spark.sql.optimizer.dynamicPartitionPruning.enabled": "false",
}
QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
# With an appender, for without one Spark would put its own configuration in place of this.
NO_LOG = """\
appender.none.type = Null
appender.none.name = none
rootLogger.level = off
rootLogger.appenderRef.none.ref = none
"""
# Why Spark could not read a file, in the words of Hadoop, Parquet and Spark.
NO_CONNECTOR = re.compile(r"Class \S*FileSystem not found|No FileSystem for scheme", re.IGNORECASE)
SHARD = re.compile(r"\b[a-z0-9]+:/[^\n]+?\.parquet")


class EngineError(NanalyzeError):
    """Spark cannot be started, or does not answer."""


def start(master: str) -> Any:
    """A new Spark session on `master` (local[N], spark://host:port, yarn, k8s://...). Raises EngineError.

    All sessions of a process share one connection to the cluster: a second call with another master is refused.
    """
    _check_java()
    _check_reachable(master)
    session_type = _session_type()
    running = session_type.getActiveSession()
    if running is not None and running.sparkContext.master != master:
        raise EngineError(
            f"{master}: this process already has a Spark session on {running.sparkContext.master}. Stop that one first."
        )
    builder = session_type.builder.master(master).appName("nanalyze")
    for key, value in {**SETTINGS, **QUIET, **_object_store(), **_logging()}.items():
        builder = builder.config(key, value)
    with tempfile.TemporaryFile() as said:
        try:
            with quiet(), _stderr_to(said.fileno()):
                session = builder.getOrCreate()
        except Exception as error:
            said.seek(0)
            told = said.read().decode("utf-8", "replace").strip().splitlines() or [reason(error)]
            raise EngineError(f"{master}: Spark does not start: {told[-1][:300]}. Check the URL and Java.") from error
    _await_worker(session, master)
    # Views are a session's own, so that runs opened side by side keep theirs apart.
    own = session.newSession()
    for key, value in SETTINGS.items():
        if key.startswith("spark.sql."):
            own.conf.set(key, value)
    _fit_partitions(own)
    return own


def _fit_partitions(session: Any) -> None:
    """Spark's own 200 partitions of a shuffle are for hundreds of cores; who set another number keeps it."""
    if session.conf.get("spark.sql.shuffle.partitions") == "200":
        cores = session.sparkContext.defaultParallelism
        session.conf.set("spark.sql.shuffle.partitions", str(min(max(2 * cores, 4), 200)))


def _session_type() -> Any:
    try:
        with quiet():
            from pyspark.sql import SparkSession
    except ImportError:
        raise EngineError(f"--engine spark needs the package pyspark. {INSTALL}") from None
    logging.getLogger("SQLQueryContextLogger").disabled = True  # repeats each error as JSON
    return SparkSession


@contextlib.contextmanager
def _stderr_to(descriptor: int) -> Iterator[None]:
    """Have a child that is started meanwhile, the Java machine, write its messages there for good."""
    own = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if not (home and Path(home, "bin", "java").exists()) and shutil.which("java") is None:
        raise EngineError("Spark needs Java 17 or later, and there is none. Install it, or set JAVA_HOME.")


def _check_reachable(master: str) -> None:
    """Spark itself would try a standalone master that is not there for a minute."""
    match = re.fullmatch(r"spark://(.+)", master)
    if match is None:
        return
    failures = []
    for place in match.group(1).split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            failures.append(str(error))
    raise EngineError(f"{master}: no master answers there ({failures[0]}). Give the URL that its page shows.")


def _await_worker(session: Any, master: str) -> None:
    """Without a worker every query would wait for ever."""
    if master.startswith("local") or session.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        return
    deadline = time.monotonic() + WORKER_S
    while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 2:  # one is the driver
        if time.monotonic() > deadline:
            session.stop()
            raise EngineError(f"{master}: no worker took the job in {WORKER_S:.0f} s. Start workers, or free cores.")
        time.sleep(0.1)


def _object_store() -> dict[str, str]:
    """Spark takes AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_ENDPOINT_URL itself.

    Servers other than AWS are addressed by path rather than by a host name for each bucket.
    """
    return {"spark.hadoop.fs.s3a.path.style.access": "true"} if os.environ.get("AWS_ENDPOINT_URL") else {}


def _logging() -> dict[str, str]:
    """Java's logging off from the first line, unless the user has a configuration of Spark's."""
    if os.environ.get("SPARK_CONF_DIR"):
        return {}
    file = Path(tempfile.gettempdir(), f"nanalyze-log4j2-{os.getuid() if hasattr(os, 'getuid') else 0}.properties")
    with contextlib.suppress(OSError):
        file.write_text(NO_LOG, encoding="utf-8")
    return {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={file.as_uri()}"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without PySpark's remark on the version of pandas, which is not used."""
    with warnings.catch_warnings():
        if threading.current_thread() is threading.main_thread():
            warnings.filterwarnings("ignore", message=r"(?s).*PySpark does not yet fully support pandas")
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def arrow(frame: Any) -> pa.Table:
    """The rows of a Spark frame as an Arrow table, all at once. Raises QueryError."""
    try:
        with quiet():
            table: pa.Table = frame.toArrow()
    except Exception as error:
        raise failure(error) from error
    return table


def statement(session: Any, sql: str) -> Any:
    """The frame of a statement of Spark's SQL. Raises QueryError."""
    try:
        return session.sql(sql)
    except Exception as error:
        raise failure(error) from error


def computed(frame: Any) -> Any:
    """The same rows, computed now and kept by the workers, in memory or on disk, for as long as the frame is there.

    A frame that is merely cached still has the whole plan in it, and plans that hold others several times over grow
    beyond what Spark can optimise: a query over `verdicts` took 200 s for 95 rows. Raises QueryError.
    """
    try:
        return frame.localCheckpoint()
    except Exception as error:
        raise failure(error) from error


def files(session: Any, uri: str, shown: str) -> list[tuple[str, int]]:
    """(path below `uri`, bytes) of the files in the directory, listed by Spark. Raises RunError."""
    try:
        frame = session.read.format("binaryFile").option("recursiveFileLookup", "true").option("__globPaths__", "false")
        # The content is not among the columns, so it is not read.
        table = arrow(frame.load(uri).select("path", "length"))
    except Exception as error:
        raise unreadable(shown, error) from error
    prefix = re.compile(r"^[a-z0-9]+:/+")
    root = prefix.sub("", uri)
    found = zip(table.column("path").to_pylist(), table.column("length").to_pylist(), strict=True)
    return [(prefix.sub("", path)[len(root) :].lstrip("/"), size) for path, size in found]


def text(session: Any, uri: str, shown: str) -> bytes:
    """The content of a small file, read by Spark. Raises RunError."""
    try:
        reader = session.read.format("binaryFile").option("__globPaths__", "false")
        rows = arrow(reader.load(uri).select("content")).column("content").to_pylist()
    except Exception as error:
        raise unreadable(shown, error) from error
    if len(rows) != 1:
        raise RunError(f"{shown}: is not there. Give the directory that holds run.json.")
    return bytes(rows[0])


def unreadable(shown: str, error: BaseException) -> RunError:
    """Why a file or directory of a run cannot be read."""
    told = str(error.__cause__ or error)
    if NO_CONNECTOR.search(told):
        scheme = shown.split(":", 1)[0]
        return RunError(
            f"{shown}: Spark has no connector for {scheme}://. Give it the connector's package by spark.jars.packages "
            "in spark-defaults.conf, for S3 org.apache.hadoop:hadoop-aws of Spark's own Hadoop version."
        )
    if "PATH_NOT_FOUND" in told or "FileNotFoundException" in told:
        return RunError(f"{shown}: is not there, or Spark does not see it. Give the directory that holds run.json.")
    return RunError(f"{shown}: cannot be read by Spark: {reason(error)}. Check its name and the credentials.")


def failure(error: BaseException) -> QueryError:
    """Spark's error as one line; a file that is gone or damaged explains any other complaint."""
    told = str(error)
    match = SHARD.search(told)
    if match is None or "FAILED_READ_FILE" not in told:
        return QueryError(f"Spark: {reason(error)}.")
    shard = re.sub(r"^file:/+", "/", unquote(match.group(0)))
    if "NOT_EXIST" in told or "FileNotFound" in told:
        return QueryError(f"{shard}: is gone since the run was opened. Open the run again.")
    return QueryError(
        f"{shard}: is damaged, Spark cannot read it. Copy it again from where it was recorded, or move it out of the "
        "run directory."
    )


def reason(error: BaseException) -> str:
    """The first line of what Spark says that is not about where in Java it was said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("at ", "An error occurred while calling"))]
    first = (told or lines or [type(error).__name__])[0].lstrip(": ")
    first = re.sub(r"\s*SQLSTATE: \w+.*$", "", first)
    return first[:400].rstrip(". ;")
