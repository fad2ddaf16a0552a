"""Runs in object stores, read from a real server of S3's protocol (moto) that checks signatures."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from trace import Trace
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner, Result

import nanalyze.analysis as na
from nanalyze.analysis import remote
from nanalyze.analysis.engines import location
from nanalyze.commands import main
from nanalyze.rundir import objectstore
from nanalyze.rundir.errors import NanalyzeError, QueryError, RunError
from nanalyze.rundir.objectstore import UriPath

SECRET, TOKEN = "verySecretKeyOfNobody", "aTokenThatNobodyShouldSee"
RUN, OTHER = "s3://runs/a/run", "s3://runs/b/run"
QUERIES = ("top_kernels", "kernel_durations", "launch_gaps", "copies_summary", "ranges_summary", "losses")
ADDRESS = "http://127.0.0.1"


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def has_httpfs() -> bool:
    with duckdb.connect() as connection:
        return remote._load_httpfs(connection)


needs_server = pytest.mark.skipif(not has("moto") or not has("flask"), reason="needs moto: pip install 'moto[server]'")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that holds the bucket `runs`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MOTO_"))}
    with open(tmp_path_factory.mktemp("moto") / "log", "wb") as log:
        started = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(port)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if started.poll() is not None or time.monotonic() > deadline:
                    pytest.fail("moto does not start")
                time.sleep(0.05)
        yield f"{ADDRESS}:{port}"
    finally:
        started.terminate()
        started.wait()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two processes in two shards a table."""
    trace = Trace(tmp_path_factory.mktemp("made") / "run")
    for rank, process in enumerate(("node0-0-1", "node0-1-2")):
        trace.device(process)
        gemm = trace.kernel_class("gemm", (1320, 1, 1), (256, 1, 1), process=process)
        copy = trace.kernel_class("copy", (8, 1, 1), process=process)
        for number in range(30):
            trace.kernel(gemm, number * 100_000, 50_000 + 100 * number + rank, process=process)
            trace.kernel(copy, number * 100_000 + 60_000, 20_000, process=process)
        trace.measure(gemm, [{"compute_pct": 90.0, "memory_pct": 30.0, "duration_ns": 50_000.0}], process)
        trace.range("step", 0, 4_000_000, process=process)
        trace.copy("HtoD", 5_000_000, 10_000, 1 << 20, process=process)
        trace.process_row(process, rank=rank)
    trace.write(shards=2)
    return trace.run_dir


@pytest.fixture(scope="module")
def filled(server: str, local: Path) -> Any:
    """The server's file system, for writing; it holds the run as RUN."""
    from pyarrow import fs

    found = fs.S3FileSystem(
        access_key="AKIANOBODY",
        secret_key=SECRET,
        endpoint_override=server,
        region="us-east-1",
        allow_bucket_creation=True,
    )
    found.create_dir("runs")
    upload(found, local)
    return found


@pytest.fixture
def store(filled: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same; the environment names the server and a key."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return filled


def upload(store: Any, source: Path, run: str = RUN) -> str:
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        with store.open_output_stream(f"{run.partition('://')[2]}/{file.relative_to(source).as_posix()}") as out:
            out.write(file.read_bytes())
    return run


@pytest.fixture(params=["copied", "httpfs", "fsspec"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How DuckDB gets at the rows."""
    if request.param != "copied":
        monkeypatch.setattr(remote, "COPIED_BYTES", 0)
    if request.param == "httpfs" and not has_httpfs():
        pytest.skip("needs httpfs: pip install duckdb-extension-httpfs, in DuckDB's version")
    if request.param == "fsspec":
        monkeypatch.setattr(remote, "_load_httpfs", lambda connection: False)
        pytest.importorskip("fsspec", reason="needs fsspec")
    return str(request.param)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="nanalyze")


# --- the same answers --------------------------------------------------------------------------------


@needs_server
def test_every_query_says_the_same(store: Any, local: Path, way: str) -> None:
    with na.open(local) as expected, na.open(RUN) as found:
        assert found.damage_count == 0
        assert str(found.path) == RUN
        for name in QUERIES if way == "copied" else QUERIES[:1]:
            assert found.query(name).to_csv() == expected.query(name).to_csv(), name
        with pytest.raises(QueryError, match="disabled"):
            found.sql("SELECT * FROM 's3://runs/other/x.parquet'")
        with pytest.raises(QueryError, match="disabled"):
            found.sql("SELECT * FROM read_text('/etc/passwd')")


@needs_server
def test_google_speaks_the_same_protocol(store: Any) -> None:
    with na.open(RUN.replace("s3:", "gs:")) as found:
        assert str(found.path) == "gs://runs/a/run"
        assert found.sql("SELECT count(*) AS n FROM kernels")["n"][0] == 122


@needs_server
def test_a_name_that_looks_like_a_partition(store: Any, local: Path, way: str) -> None:
    place = "s3://runs/process=x/start_ns=1"
    if not objectstore.listing(UriPath(place)):
        upload(store, local, place)
    with na.open(place) as found:
        rows = found.sql("SELECT process, count(*) AS n FROM kernels GROUP BY 1 ORDER BY 1").to_dict("records")
    assert rows == [{"process": "node0-0-1", "n": 30 + 30 + 1}, {"process": "node0-1-2", "n": 30 + 30 + 1}]


@needs_server
def test_commands(store: Any, local: Path) -> None:
    run = RUN
    told = invoke("info", run, "--json")
    assert told.exit_code == 0, told.output
    content = json.loads(told.stdout)
    here = json.loads(invoke("info", str(local), "--json").stdout)
    assert {**content, "run_dir": ""} == {**here, "run_dir": ""}
    assert content["run_dir"] == run
    page = invoke("report", run, "--format", "json")
    assert page.exit_code == 0, page.output
    here_too = invoke("report", str(local), "--format", "json")
    assert page.stdout.replace(run, str(local)) == here_too.stdout
    compared = invoke("compare", run, str(local), "--step", "step")
    assert compared.exit_code == 0, compared.output
    assert compared.stdout.startswith(f"A: {run} (2 repetitions of step)\nB: {local} (")
    trend = invoke("trend", run, str(local), "--no-verdicts")
    assert trend.stderr.strip().endswith("is the same run as another one. Give each run once.")
    for result in (told, page, compared, trend):
        assert SECRET not in result.output


@needs_server
def test_reports_are_written_here_only_where_told(store: Any, local: Path) -> None:
    result = invoke("report", RUN)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: {RUN}: is not on this machine. Say with -o where to write."


@pytest.mark.parametrize("command", ["top", "compact"])
def test_commands_for_runs_on_this_machine(command: str) -> None:
    result = invoke(command, RUN)
    assert result.exit_code == 2
    assert f"{RUN}: is not on this machine, and this command works on runs that are." in result.stderr


@needs_server
@pytest.mark.parametrize("way", ["copied", "httpfs"], indirect=True)
def test_emitted_views_name_objects_and_no_secret(
    store: Any, local: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    result = invoke("sql", RUN, "--emit-views", "-")
    assert result.exit_code == 0, result.output
    assert result.stdout.count(f"'{RUN}/kernels/process=node0-0-1/00000") == 2
    assert "nanalyze-run-" not in result.stdout
    assert not any(secret in result.output for secret in (SECRET, TOKEN, "AKIANOBODY"))
    if way == "httpfs":
        with duckdb.connect() as connection:
            remote.attach(connection, UriPath(RUN))
            connection.execute(result.stdout)
            assert connection.execute("SELECT count(*) FROM kernels").fetchall() == [(122,)]


@needs_server
@pytest.mark.parametrize("way", ["copied", "httpfs"], indirect=True)
def test_secrets_cannot_be_asked_for(store: Any, local: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    with na.open(RUN) as run:
        told = ""
        for query in (
            "FROM duckdb_secrets()",
            "FROM duckdb_secrets(redact = false)",
            "FROM duckdb_settings()",
            "SELECT getenv('AWS_SECRET_ACCESS_KEY')",
            "FROM which_secret('s3://runs/a', 's3')",
        ):
            try:
                told += run.sql(query).to_string(max_colwidth=None)
            except QueryError as error:
                told += str(error)
        if way == "httpfs":
            assert "secret=redacted" in told
    assert SECRET not in told
    assert TOKEN not in told


# --- damage and disappearance --------------------------------------------------------------------------


@needs_server
def test_a_damaged_shard_is_left_out(store: Any, local: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(local, tmp_path / "run"))
    shard = sorted(copy.glob("kernels/process=node0-0-1/*.parquet"))[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    (copy / "kernels" / "process=node0-1-2" / "notes.txt").write_text("?")
    lost = sorted(copy.glob("kernels/process=node0-1-2/000001-*.parquet"))[0]
    lost.unlink()
    sorted(copy.glob("copies/*/*.parquet"))[0].write_bytes(b"")
    with na.open(upload(store, copy, OTHER)) as found:
        problems = [(row["path"], row["problem"]) for row in found.damage().to_dict("records")]
        rows = found.sql("SELECT count(*) AS n FROM kernels")["n"][0]
    folder = "kernels/process=node0-1-2"
    assert rows == 122 - 30 - 31  # of a process's 61 launches
    assert problems[1:] == [
        (
            shard.relative_to(copy).as_posix(),
            "does not match the hash in its name: it was changed or cut short",
        ),
        (folder, "shard 1 is missing"),
        (f"{folder}/notes.txt", problems[3][1]),
    ]
    assert problems[0][0].startswith("copies/")
    assert problems[0][1] == "is empty"


@needs_server
def test_an_object_that_is_gone(store: Any, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "COPIED_BYTES", 0)
    if not has_httpfs():
        pytest.importorskip("fsspec", reason="needs fsspec or httpfs")
    with na.open(upload(store, local, OTHER)) as run:
        store.delete_dir_contents("runs/b/run/kernels")
        with pytest.raises(QueryError, match=r"^s3://runs/b/run/kernels/.*: is gone since the run was opened"):
            run.sql("SELECT sum(duration_ns) FROM kernels")


@needs_server
def test_copies_are_private_and_removed(store: Any, local: Path) -> None:
    run = na.open(RUN)
    assert run._copies is not None
    folder = run._copies.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.rglob("*.parquet"))) == len(list(local.rglob("*.parquet")))
    run.close()
    assert not folder.exists()


@needs_server
def test_whole_tables_are_copied_while_there_is_room(store: Any, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_httpfs():
        pytest.importorskip("fsspec", reason="needs fsspec or httpfs")
    kernels = sum(path.stat().st_size for path in local.glob("kernels/*/*.parquet"))
    others = sum(path.stat().st_size for path in local.glob("*/*/*.parquet")) - kernels
    monkeypatch.setattr(remote, "COPIED_BYTES", others + kernels - 1)
    with na.open(RUN) as run, na.open(local) as expected:
        assert {table for table, shards in run._catalog.shards.items() for s in shards if objectstore.is_remote(s.path)}
        assert run.verdicts().to_csv() == expected.verdicts().to_csv()
        assert not list(run._copies.folder.glob("kernels")) or not list(run._copies.folder.glob("processes"))  # type: ignore[union-attr]


@needs_server
def test_without_checking_nothing_is_copied(store: Any, local: Path) -> None:
    if not has_httpfs():
        pytest.importorskip("fsspec", reason="needs fsspec or httpfs")
    with na.open(RUN, verify=False) as run:
        assert run._copies is None
        assert run.sql("SELECT count(*) AS n FROM kernels")["n"][0] == 122


# --- what can be wrong -----------------------------------------------------------------------------------


@needs_server
def test_what_is_not_there(store: Any, local: Path) -> None:
    server = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    for run, told in (
        ("s3://runs/a/other", "has no run.json, so there is no run there. Give the place that holds run.json."),
        ("s3://nobucket/a/run", f"{server} has no bucket 'nobucket'. Check its name and AWS_ENDPOINT_URL."),
    ):
        result = invoke("info", run)
        assert result.exit_code == 1
        assert result.stderr.splitlines() == [result.stderr.strip()]
        assert result.stderr.startswith(f"nanalyze: error: {run}")
        assert result.stderr.strip().endswith(told)


@needs_server
def test_no_server(local: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    with pytest.raises(RunError, match=rf"^{RUN}/run.json: {address} does not answer\. Check AWS_ENDPOINT_URL"):
        na.open(RUN)


@needs_server
def test_wrong_credentials(store: Any, local: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3", reason="needs boto3")
    iam = boto3.client(
        "iam", endpoint_url=server, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    reading = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [reading]})
    iam.put_user_policy(UserName="reader", PolicyName="reading", PolicyDocument=policy)
    run = RUN
    try:
        check_signatures(server, after=0)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        with na.open(run) as found:
            assert found.damage_count == 0
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        refused(run, "refuses the credentials in the environment")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
        monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
        refused(run, "refuses the credentials in the environment")
    finally:
        check_signatures(server, after=10**9)


def check_signatures(server: str, after: int) -> None:
    asked = urllib.request.Request(
        f"{server}/moto-api/reset-auth", data=str(after).encode(), headers={"Content-Type": "text/plain"}
    )
    urllib.request.urlopen(asked).read()


def refused(run: str, reason: str) -> None:
    result = invoke("sql", run, "SELECT 1")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert reason in result.stderr
    assert "AWS_ACCESS_KEY_ID" in result.stderr
    assert not any(secret in result.output for secret in (SECRET, TOKEN, "AKIANOBODY"))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "AWS Error ACCESS_DENIED during HeadObject operation: No response body.",
            "refuses access without credentials",
        ),
        (
            "AWS Error UNKNOWN (HTTP status 301) during HeadObject operation: ?",
            "the bucket is not in eu-west-1. Set AWS",
        ),
        ("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation: ?", "AWS has no bucket 'runs'. Check its name"),
        (f"AWS Error SLOW_DOWN during X: {SECRET}", "cannot be read: the server says SLOW_DOWN during X: ***. Check"),
    ],
)
def test_what_a_server_says(said: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    reached = objectstore.Access(None, None, None, "eu-west-1", None, True)
    error = objectstore.refused(UriPath(RUN), OSError(f"When reading 'a/run' in bucket 'runs': {said}"), reached)
    assert str(error).startswith(f"{RUN}: ")
    assert told in str(error)


@needs_server
def test_neither_extension_nor_fsspec(store: Any, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUN
    monkeypatch.setattr(remote, "_load_httpfs", lambda connection: False)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with na.open(run) as found:  # small enough to be copied
        assert found.sql("SELECT count(*) AS n FROM kernels")["n"][0] == 122
    monkeypatch.setattr(remote, "COPIED_BYTES", 0)
    with pytest.raises(RunError, match=r"^s3://runs/a/run: DuckDB \S+ has no extension httpfs.*INSTALL httpfs.*\[s3\]"):
        na.open(run)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"AWS_ACCESS_KEY_ID": "AKIA"}, "AWS_SECRET_ACCESS_KEY is not set, the other half of the key is."),
        ({"AWS_SECRET_ACCESS_KEY": SECRET}, "AWS_ACCESS_KEY_ID is not set, the other half of the key is."),
        ({"AWS_ENDPOINT_URL": f"https://me:{SECRET}@host"}, "AWS_ENDPOINT_URL is no server's address."),
        ({"AWS_ENDPOINT_URL": "host:9000"}, "AWS_ENDPOINT_URL is no server's address."),
        ({"AWS_ENDPOINT_URL_S3": "http://host:x"}, "AWS_ENDPOINT_URL is no server's address."),
        ({"AWS_ENDPOINT_URL": "http://host/prefix"}, "AWS_ENDPOINT_URL is no server's address."),
    ],
)
def test_an_environment_that_contradicts_itself(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError) as caught:
        na.open(RUN)
    assert str(caught.value).startswith(f"{RUN}/run.json: {told}")
    assert SECRET not in str(caught.value)


def test_how_a_bucket_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    reached = objectstore.access(UriPath(RUN))
    assert (reached.region, reached.endpoint, reached.is_tls, reached.key_id) == ("eu-west-1", None, True, None)
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    google = objectstore.access(UriPath("gs://runs/a"))
    assert (google.region, google.endpoint) == ("eu-north-1", "storage.googleapis.com")
    for name, value in (("ACCESS_KEY_ID", "AKIA"), ("SECRET_ACCESS_KEY", SECRET), ("SESSION_TOKEN", TOKEN)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://other")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://host:9000/")
    reached = objectstore.access(UriPath(RUN))
    assert (reached.endpoint, reached.is_tls, reached.secret, reached.token) == ("host:9000", False, SECRET, TOKEN)
    assert SECRET not in repr(reached)
    assert TOKEN not in repr(reached)
    assert reached.hidden(f"{SECRET} {TOKEN} x") == "*** *** x"


@pytest.mark.parametrize(
    "given", ["s3://runs", "s3://runs/a?s3_region=x", "s3://runs/*", "s3://runs/a[1]", "s3://runs/a/../b", "hdfs://n/a"]
)
def test_places_that_duckdb_does_not_read(given: str) -> None:
    with pytest.raises(NanalyzeError) as caught:
        location.for_duckdb(given)
    assert str(caught.value).startswith(f"{given}: ")
