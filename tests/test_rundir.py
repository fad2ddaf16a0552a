"""The run directory: schema, shards, run.json and the page that documents them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanalyze.rundir import counters, document, runfile, schema, shards
from nanalyze.rundir.errors import FormatVersionError, NanalyzeError, RunError
from nanalyze.rundir.schema import DELTA, DICTIONARY, PLAIN, TABLES, Table

REPOSITORY = Path(__file__).parents[1]
PROCESS = "node7-0-4242"
HUGE_NAME = "void k<" + "a" * 10_000 + ">(\"'\u2028<script>\\x00é)"
SAMPLES: dict[str, list[Any]] = {
    "int32": [0, -(2**31), 2**31 - 1, 7],
    "int64": [0, -(2**63), 2**63 - 1, 1_790_000_000_000_000_000],
    "float64": [0.0, -1.5e308, 5e-324, 3.25],
    "string": ["", HUGE_NAME, "κ", "a\nb\t'"],
    "bool": [True, False, False, True],
    "histogram": [[], [{"bin": -1, "launches": 2**62}], [{"bin": 0, "launches": 1}, {"bin": 9, "launches": 2}], None],
}


def rows_of(table: Table, with_nulls: bool = True, extra: tuple[str, ...] = ()) -> pa.Table:
    """Four extreme values of each column's type, and a fifth row that is NULL where it may be."""
    arrow = table.arrow_schema(extra)
    data = {}
    for field in arrow:
        values = list(SAMPLES["float64" if field.name in extra else table.column(field.name).type])
        data[field.name] = [*values, None if field.nullable and with_nulls else values[3]]
    return pa.table(data, schema=arrow)


def read_back(data: bytes | pa.Buffer) -> pa.Table:
    return pq.read_table(pa.BufferReader(data), page_checksum_verification=True)


# --- schema -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_columns_are_declared_completely(table: Table) -> None:
    assert len(set(table.column_names)) == len(table.columns)
    assert table.meaning.endswith(".")
    assert "process" not in table.column_names
    for column in table.columns:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", column.name)
        assert column.meaning.endswith("."), column.name
        assert column.encoding in (DELTA, PLAIN, DICTIONARY), column.name
        assert column.arrow_type() == table.arrow_schema().field(column.name).type


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_column_named_in_nanoseconds_or_bytes_has_that_unit(table: Table) -> None:
    for column in table.columns:
        if column.name.endswith("_ns"):
            assert (column.type, column.unit) == ("int64", "ns"), column.name
        if column.name.endswith(("_bytes", "_hz", "_mw")):
            assert column.unit == {"_bytes": "bytes", "_hz": "Hz", "_mw": "mW"}["_" + column.name.rsplit("_", 1)[1]]


def test_arrow_schema_carries_version_table_and_nullability() -> None:
    arrow = schema.KERNELS.arrow_schema()
    assert arrow.metadata == {b"nanalyze.format_version": b"1", b"nanalyze.table": b"kernels"}
    assert arrow.field("start_ns").nullable
    assert not arrow.field("kernel_class_id").nullable


def test_only_open_tables_take_further_columns() -> None:
    assert schema.SAMPLES.arrow_schema(("dram_read_bytes",)).field("dram_read_bytes").type == pa.float64()
    with pytest.raises(ValueError, match="table kernels has a fixed set of columns"):
        schema.KERNELS.arrow_schema(("dram_read_bytes",))


def test_this_version_has_its_line_of_history() -> None:
    assert list(schema.HISTORY) == list(range(1, schema.FORMAT_VERSION + 1))


def test_counters_are_unique_by_name_and_by_raw_metric() -> None:
    every = (*counters.COUNTERS, *counters.IMPORTED)
    assert len(counters.BY_NAME) == len(every)
    raw = [metric for counter in every for metric in counter.raw]
    assert len(raw) == len(set(raw))
    for counter in every:
        assert counter.unit, counter.name
        assert counter.meaning.endswith("."), counter.name
        assert counter.raw, counter.name


# --- shards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_encode_keeps_every_value_type_and_null(table: Table) -> None:
    rows = rows_of(table)
    back = read_back(shards.encode(rows, table))
    assert back.equals(rows)
    assert back.schema.equals(rows.schema, check_metadata=True)


def test_encode_keeps_counter_columns_of_samples() -> None:
    rows = rows_of(schema.SAMPLES, extra=("dram_read_bytes", "sm__cycles_active.avg"))
    assert read_back(shards.encode(rows, schema.SAMPLES)).equals(rows)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_encode_of_no_rows_is_a_readable_file(table: Table) -> None:
    empty = table.arrow_schema().empty_table()
    assert read_back(shards.encode(empty, table)).equals(empty)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_columns_are_encoded_as_declared(table: Table) -> None:
    group = pq.read_metadata(pa.BufferReader(shards.encode(rows_of(table), table))).row_group(0)
    leaves = [(column, leaf) for column in table.columns for leaf in column.leaves]
    for index, (column, leaf) in enumerate(leaves):
        chunk = group.column(index)
        assert chunk.path_in_schema == leaf
        assert chunk.compression == "ZSTD"
        if leaf.endswith(".bin"):  # they ascend
            assert DELTA in chunk.encodings
        elif column.type != "bool":  # Parquet has one encoding for booleans
            assert column.encoding in chunk.encodings, column.name


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_null_where_none_may_be_is_refused(table: Table, tmp_path: Path) -> None:
    column = next(column for column in table.columns if not column.nullable)
    rows = rows_of(table)
    index = rows.schema.get_field_index(column.name)
    holed = rows.set_column(index, rows.schema.field(index), pa.nulls(rows.num_rows, column.arrow_type()))
    with pytest.raises(ValueError, match=rf"{table.name}\.{column.name}: holds NULL"):
        shards.write_shard(tmp_path, table.name, PROCESS, 1, holed)
    with pytest.raises(ValueError, match=f"{table.name}: has no column {column.name}"):
        shards.write_shard(tmp_path, table.name, PROCESS, 1, rows.drop_columns([column.name]))
    assert files_in(tmp_path) == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.none() | st.integers(0, 2**63 - 1),
            st.integers(0, 2**63 - 1),
        ),
        max_size=40,
    )
)
def test_any_integers_survive_encoding(values: list[tuple[int | None, int | None, int]]) -> None:
    rows = rows_of(schema.KERNELS).slice(0, 1)
    columns = {name: rows[name].to_pylist() * len(values) for name in rows.column_names}
    columns["start_ns"] = [value[0] for value in values]
    columns["duration_ns"] = [value[1] for value in values]
    columns["correlation_id"] = [value[2] for value in values]
    table = pa.table(columns, schema=schema.KERNELS.arrow_schema())
    assert read_back(shards.encode(table, schema.KERNELS)).equals(table)


def test_duckdb_reads_every_encoding(tmp_path: Path) -> None:
    rows = rows_of(schema.KERNELS)
    shards.write_shard(tmp_path, "kernels", PROCESS, 1, rows)
    query = f"SELECT * FROM read_parquet('{tmp_path}/kernels/**/*.parquet', hive_partitioning = true)"
    found = duckdb.sql(query).fetchall()
    assert found == [(*row.values(), PROCESS) for row in rows.to_pylist()]


def test_row_groups_are_bounded() -> None:
    rows = rows_of(schema.DEVICE_STATE).take(pa.array([3] * 280_000))
    metadata = pq.read_metadata(pa.BufferReader(shards.encode(rows, schema.DEVICE_STATE)))
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [250_000, 30_000]


def test_a_launch_takes_at_most_eight_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of benchmarks/storage.py, jittered like a real one; measured: 7.0 in shards of 50,000."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    import storage

    rows = storage.synthetic(200_000)
    size = sum(shards.encode(piece, schema.KERNELS).size for piece in storage.split(rows, 50_000))
    assert rows["queued_ns"].null_count == 0
    assert 3.0 < size / rows.num_rows < 8.0


def test_the_benchmark_measures_any_run(tmp_path: Path) -> None:
    kernels = rows_of(schema.KERNELS).slice(3, 1).take(pa.array([0] * 500))
    shards.write_shard(tmp_path, "kernels", PROCESS, 1, kernels)
    shards.write_shard(tmp_path, "kernels", PROCESS, 2, kernels)
    command = [sys.executable, REPOSITORY / "benchmarks" / "storage.py", "--launches", "100", "--run"]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=True)
    assert f"{tmp_path}: 1,000 launches in 1 file(s)" in done.stdout
    assert len(re.findall(r"^  shards\.encode +[0-9.]+ +[0-9.]+$", done.stdout, re.MULTILINE)) == 2
    failed = subprocess.run([*command, tmp_path / "none"], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stderr) == (
        1,
        f"{tmp_path}/none: holds no kernels. Give a directory that nanalyze recorded.\n",
    )


def test_a_flipped_bit_in_a_page_is_found_by_its_checksum() -> None:
    data = bytearray(memoryview(shards.encode(rows_of(schema.KERNELS), schema.KERNELS)))
    chunk = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(0).column(0)
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1  # the last byte of start_ns
    with pytest.raises(OSError, match="CRC"):
        read_back(bytes(data))


def test_a_shard_lies_in_its_partition_and_its_name_holds_sequence_and_hash(tmp_path: Path) -> None:
    shard = shards.write_shard(tmp_path, "copies", PROCESS, 7, rows_of(schema.COPIES))
    data = shard.path.read_bytes()
    expected = hashlib.blake2b(data, digest_size=8).hexdigest()
    assert shard.path == tmp_path / "copies" / f"process={PROCESS}" / f"000007-{expected}.parquet"
    assert (shard.table, shard.process, shard.sequence, shard.digest) == ("copies", PROCESS, 7, expected)
    assert shards.digest(data) == expected
    match = shards.SHARD_NAME.match(shard.path.name)
    assert match is not None
    assert match.groups() == ("000007", None, expected)
    assert read_back(data).equals(rows_of(schema.COPIES))


def test_a_sequence_beyond_six_digits_still_has_a_shard_name(tmp_path: Path) -> None:
    shard = shards.write_shard(tmp_path, "events", PROCESS, 1_234_567, rows_of(schema.EVENTS))
    assert shard.path.name.startswith("1234567-")
    assert shards.SHARD_NAME.match(shard.path.name)


@pytest.mark.parametrize("process", ["", "a b", "../up", "a/b", "é", "x\n", "a=b"])
def test_a_process_name_that_no_reader_takes_is_refused(tmp_path: Path, process: str) -> None:
    with pytest.raises(ValueError, match="only letters, digits"):
        shards.write_shard(tmp_path, "events", process, 1, rows_of(schema.EVENTS))
    assert list(tmp_path.iterdir()) == []


def files_in(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.rglob("*") if path.is_file()]


class FullDisk:
    """A file whose writes fail as on a full disk, after some bytes have gone through."""

    def __init__(self, path: Path, code: int) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.code = code

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: memoryview) -> int:
        self.file.write(data[:10])
        self.file.flush()
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(shards, "open", lambda path, mode: FullDisk(path, code), raising=False)
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        shards.write_shard(tmp_path, "events", PROCESS, 1, rows_of(schema.EVENTS))
    assert raised.value.errno == code
    assert files_in(tmp_path) == []


def test_a_failing_rename_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        shards.write_shard(tmp_path, "events", PROCESS, 1, rows_of(schema.EVENTS))
    assert files_in(tmp_path) == []


def test_the_reason_of_a_failed_write_survives_a_failed_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shards, "open", lambda path, mode: FullDisk(path, errno.ENOSPC), raising=False)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="No space left"):
        shards.write_shard(tmp_path, "events", PROCESS, 1, rows_of(schema.EVENTS))


def test_a_directory_that_refuses_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError):
        shards.write_shard(tmp_path, "events", PROCESS, 1, rows_of(schema.EVENTS))
    assert files_in(tmp_path) == []


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
import pyarrow as pa
from nanalyze.rundir import schema, shards
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
row = {"time_ns": [1], "layer": ["recorder"], "kind": ["note"], "message": ["x"], "count": [None]}
shards.write_shard(Path(sys.argv[1]), "events", "h-0-1", 1, pa.table(row, schema=schema.EVENTS.arrow_schema()))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_writer_leaves_only_a_name_that_readers_ignore(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = files_in(tmp_path)
    assert left.name.startswith(".")
    assert not shards.SHARD_NAME.match(left.name)
    with pytest.raises(duckdb.IOException, match="No files found"):
        duckdb.sql(f"SELECT * FROM read_parquet('{tmp_path}/events/**/*.parquet')")


# --- run.json ---------------------------------------------------------------------------------


def test_create_writes_what_read_returns(tmp_path: Path) -> None:
    run_dir = tmp_path / "deep" / "run"
    content = runfile.create(run_dir, "recorder", {"flush_s": 5.0, "label": "größe"})
    assert runfile.read(run_dir) == content
    assert content["format"] == "nanalyze"
    assert content["format_version"] == schema.RECORDED_VERSION
    assert content["source"] == "recorder"
    assert content["settings"] == {"flush_s": 5.0, "label": "größe"}
    assert re.fullmatch("[0-9a-f]{32}", content["run_id"])
    assert [path.name for path in run_dir.iterdir()] == ["run.json"]


def test_the_first_run_file_stays(tmp_path: Path) -> None:
    first = runfile.create(tmp_path, "recorder", {"n": 1})
    assert runfile.create(tmp_path, "recorder", {"n": 2}) == first


def _create(run_dir: Path) -> str:
    run_id: str = runfile.create(run_dir, "recorder", {})["run_id"]
    return run_id


def _create_without_links(run_dir: Path) -> str:
    os.link = _no_links  # type: ignore[assignment]
    return _create(run_dir)


def _no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("create", [_create, _create_without_links])
def test_processes_that_create_at_once_agree_on_one_run(tmp_path: Path, create: Any) -> None:
    with ProcessPoolExecutor(4) as pool:
        for attempt in range(10):
            run_dir = tmp_path / str(attempt)
            ids = set(pool.map(create, [run_dir] * 8))
            assert ids == {runfile.read(run_dir)["run_id"]}
            assert [path.name for path in run_dir.iterdir()] == ["run.json"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_filesystems_without_hard_links_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    first = runfile.create(tmp_path, "recorder", {"n": 1})
    assert runfile.create(tmp_path, "recorder", {"n": 2}) == first == runfile.read(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_lock_whose_owner_was_killed_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _no_links)
    monkeypatch.setattr(runfile, "LOCK_WAIT_S", 0.1)
    (tmp_path / runfile.LOCK_FILE).touch()
    content = runfile.create(tmp_path, "recorder", {})
    assert runfile.read(tmp_path) == content
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_failed_create_names_directory_reason_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError) as raised:
        runfile.create(tmp_path / "file" / "run", "recorder", {})
    assert str(raised.value) == (
        f"{tmp_path}/file/run: cannot create the run directory: Not a directory. Choose one you can write to."
    )


def test_a_full_disk_leaves_no_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match="cannot create the run directory: No space left on device"):
        runfile.create(tmp_path, "recorder", {})
    assert list(tmp_path.iterdir()) == []


def written(**changes: object) -> bytes:
    return json.dumps({"format": "nanalyze", "format_version": 1, **changes}).encode()


DAMAGED = {
    "json": (b"{", "{path}: is not valid JSON. The run directory is damaged: restore the file from a copy."),
    "empty": (b"", "{path}: is not valid JSON. The run directory is damaged: restore the file from a copy."),
    "half": (
        written()[:20],
        "{path}: is not valid JSON. The run directory is damaged: restore the file from a copy.",
    ),
    "nested": (
        b"[" * 100_000,
        "{path}: is not valid JSON. The run directory is damaged: restore the file from a copy.",
    ),
    "long number": (
        b"9" * 5_000,
        "{path}: is not valid JSON. The run directory is damaged: restore the file from a copy.",
    ),
    "binary": (
        b"PAR1\xff\xfe",
        "{path}: is not text. The run directory is damaged or not nanalyze's: restore the file from a copy.",
    ),
    "list": (b"[]", "{path}: was not written by nanalyze. Give a directory that nanalyze recorded or imported."),
    "foreign": (
        written(format="mlflow"),
        "{path}: was not written by nanalyze. Give a directory that nanalyze recorded or imported.",
    ),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_foreign_run_file_is_named_with_a_remedy(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(RunError) as raised:
        runfile.read(tmp_path)
    assert str(raised.value) == message.format(path=tmp_path / "run.json")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("version", [schema.FORMAT_VERSION + 1, 0, None, "1", True, 1.0, [1]])
def test_an_unknown_version_names_both_versions_and_the_remedy(tmp_path: Path, version: object) -> None:
    (tmp_path / "run.json").write_bytes(written(format_version=version))
    with pytest.raises(FormatVersionError) as raised:
        runfile.read(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}/run.json: has format version {version!r}, "
        f"this nanalyze reads versions 1 to {schema.FORMAT_VERSION}. "
        "Upgrade nanalyze (pip install -U nanalyze), or record the run again."
    )


def test_what_is_no_run_directory_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("")
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    expected = {
        "missing": "does not exist. Give the directory that was passed to the recorder.",
        "dangling": "does not exist. Give the directory that was passed to the recorder.",
        "empty": "is empty: nothing was recorded into it. Give the directory that the recorder wrote.",
        "file": "is a file, not a run directory. Give the directory that holds run.json.",
        "other": "has no run.json, so it is not a run directory. Give the directory that holds run.json.",
        "folder/run.json": "is empty: nothing was recorded into it. Give the directory that the recorder wrote.",
    }
    for name, message in expected.items():
        with pytest.raises(RunError) as raised:
            runfile.read(tmp_path / name)
        assert str(raised.value) == f"{tmp_path / name}: {message}"
    with pytest.raises(RunError, match=r"folder/run.json: cannot be read: Is a directory. Check its permissions"):
        runfile.read(tmp_path / "folder")


@pytest.mark.parametrize("method", ["read_bytes", "iterdir"])
def test_no_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(RunError) as raised:
        runfile.read(tmp_path)
    path = tmp_path / "run.json" if method == "read_bytes" else tmp_path
    assert str(raised.value) == (
        f"{path}: cannot be read: Permission denied. Check its permissions, or copy the run to where you can read it."
    )


def test_a_symlinked_run_is_read_and_kept(tmp_path: Path) -> None:
    content = runfile.create(tmp_path / "real", "recorder", {})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "linked-file").mkdir()
    (tmp_path / "linked-file" / "run.json").symlink_to(tmp_path / "real" / "run.json")
    assert runfile.read(tmp_path / "link") == content
    assert runfile.create(tmp_path / "link", "recorder", {}) == content
    assert runfile.create(tmp_path / "linked-file", "recorder", {}) == content


def test_every_error_is_one_a_user_can_solve() -> None:
    assert issubclass(FormatVersionError, RunError)
    assert issubclass(RunError, NanalyzeError)
    assert NanalyzeError.exit_code == 1


# --- docs/run-directory.md --------------------------------------------------------------------


def test_the_page_is_what_the_schema_gives() -> None:
    assert (REPOSITORY / document.DOCUMENT).read_text(encoding="utf-8") == document.document()


def test_the_page_describes_every_column() -> None:
    page = document.document()
    for table in TABLES.values():
        section = page.split(f"### {table.name}\n", 1)[1].split("###", 1)[0]
        described = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        assert described == [*table.column_names, "process"]


def test_check_tells_drift_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert document.main(["--check"]) == 1
    assert "docs/run-directory.md: is not what rundir/schema.py gives. Run `make docs`" in capsys.readouterr().err
    assert document.main([]) == 0
    assert document.main(["--check"]) == 0
    document.DOCUMENT.write_text("edited")
    assert document.main(["--check"]) == 1


def test_the_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run_dir"
    kernels = rows_of(schema.KERNELS).slice(3, 1)
    classes = rows_of(schema.KERNEL_CLASSES).slice(3, 1)
    shards.write_shard(run_dir, "kernels", PROCESS, 1, kernels)
    shard = shards.write_shard(run_dir, "kernel_classes", PROCESS, 1, classes)
    monkeypatch.chdir(tmp_path)
    query, frame, check = re.findall(r"```python\n(.*?)```", document.document(), re.DOTALL)

    exec(query, {})
    assert "1790000000000000000" in capsys.readouterr().out.replace("'", "").replace(",", "")
    variables: dict[str, Any] = {}
    exec(frame, variables)
    assert variables["kernels"]["start_ns"].tolist() == [1_790_000_000_000_000_000]
    assert variables["kernels"]["process"].tolist() == [PROCESS]
    exec(check, {})
    assert capsys.readouterr().out == ""
    shard.path.write_bytes(shard.path.read_bytes()[:-1] + b"X")
    exec(check, {})
    assert capsys.readouterr().out == f"damaged: {shard.path.relative_to(tmp_path)}\n"
