"""`nanalyze import`, the sink and the registry: what is shown, stored, refused and left behind."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from nsys_files import Export

import nanalyze.analysis as na
from nanalyze.commands import import_ as command
from nanalyze.commands import main
from nanalyze.importers import registry
from nanalyze.importers.options import ImportFailed, Options
from nanalyze.importers.sink import Sink
from nanalyze.rundir.classes import KernelClass
from nanalyze.rundir.errors import NanalyzeError, RunError
from nanalyze.rundir.sampled import BY_COLUMN
from nanalyze.rundir.schema import TABLES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "import.md"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["import", *map(str, arguments)])


def export(path: Path) -> Path:
    made = Export()
    made.gpu()
    made.kernel(100, 350, "gemm", 1)
    made.kernel(400, 390, "gemm", 2)
    made.call(50, 1)
    return made.sqlite(path)


# --- the command -----------------------------------------------------------------------------------------


def test_it_shows_what_was_read_and_left_out_and_what_to_do_next(tmp_path: Path) -> None:
    source, target = export(tmp_path / "report.sqlite"), tmp_path / "my run"
    result = run(source, "-o", target)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        f"Imported {source} (nsys) into {target}.",
        "Read:",
        "  2  kernels",
        "  1  launch calls",
        "GPU time of all kernels: 250 ns.",
        "Left out:",
        "  1  kernels without a launch call: their range is unknown",
        "  1  kernels: durations whose end lies before the start",
        f"Next: nanalyze report '{target}'",
    ]


def test_what_was_left_out_is_stored_too(tmp_path: Path) -> None:
    run(export(tmp_path / "report.sqlite"), "-o", tmp_path / "run")
    with na.open(tmp_path / "run") as opened:
        events = opened.sql("SELECT layer, kind, message, count FROM events ORDER BY kind, message")
        process = opened.sql("SELECT layers, kernels_written, ending, command FROM processes")
        assert opened.info["source"] == "nsys"
        assert opened.info["settings"]["files"] == [
            {"name": "report.sqlite", "bytes": (tmp_path / "report.sqlite").stat().st_size}
        ]
    assert events.to_numpy().tolist() == [
        ["import", "loss", "kernels without a launch call: their range is unknown", 1],
        ["import", "loss", "kernels: durations whose end lies before the start", 1],
        ["import", "note", "read: kernels", 2],
        ["import", "note", "read: launch calls", 1],
    ]
    assert process.to_numpy().tolist() == [["imported", 2, "stop", '["report.sqlite"]']]


def test_machine_readable_output(tmp_path: Path) -> None:
    result = run(export(tmp_path / "r.sqlite"), "-o", tmp_path / "run", "--json")
    told = json.loads(result.output)
    assert (told["source"], told["kernels"], told["kernel_ns"], told["exact"]) == ("nsys", 2, 250, 0)
    assert told["read"] == {"launch calls": 1, "kernels": 2}
    assert told["run_dir"] == str(tmp_path / "run")


def test_everything_works_on_an_imported_run(tmp_path: Path) -> None:
    run(export(tmp_path / "r.sqlite"), "-o", tmp_path / "run")
    result = CliRunner().invoke(
        main, ["sql", str(tmp_path / "run"), "SELECT kernel, launches FROM verdicts", "--format", "csv"]
    )
    assert result.output.splitlines() == ["kernel,launches", '"gemm",2']
    assert CliRunner().invoke(main, ["report", str(tmp_path / "run")]).exit_code == 0
    assert (tmp_path / "run" / "report" / "report.html").stat().st_size > 1000


def test_an_existing_run_needs_force_and_anything_else_is_never_replaced(tmp_path: Path) -> None:
    source, target = export(tmp_path / "r.sqlite"), tmp_path / "run"
    assert run(source, "-o", target).exit_code == 0
    again = run(source, "-o", target)
    assert (again.exit_code, again.stderr) == (
        1, f"nanalyze: error: {target}: exists. Use --force to replace it, or choose another directory with -o.\n"
    )  # fmt: skip
    (target / "report").mkdir()
    assert run(source, "-o", target, "--force").exit_code == 0
    assert not (target / "report").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    refused = run(source, "-o", tmp_path / "mine", "--force")
    assert (refused.exit_code, "exists and is not a run" in refused.stderr) == (1, True)
    (tmp_path / "mine" / "run.json").write_text('{"format": "another program"}')
    assert run(source, "-o", tmp_path / "mine", "--force").exit_code == 1
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_a_failed_import_leaves_the_earlier_run_and_nothing_else(tmp_path: Path) -> None:
    source, target = export(tmp_path / "r.sqlite"), tmp_path / "run"
    run(source, "-o", target)
    before = sorted(path for path in target.rglob("*"))
    empty = Export().sqlite(tmp_path / "empty.sqlite")
    result = run(empty, "-o", target, "--force")
    assert (result.exit_code, result.stderr.startswith(f"nanalyze: error: {empty}: has no table of kernels")) == (
        1,
        True,
    )
    assert sorted(path for path in target.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.sqlite", "r.sqlite", "run"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty. Export it again."),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n",
            "is a git-LFS pointer, not the file itself. Fetch the file: git lfs pull.",
        ),
        (b"\x00\x01\x02", "is not recognised: it starts with b'\\x00\\x01\\x02' (binary data). "
         "Choose what it is with --kind, or export it again."),
    ],
)  # fmt: skip
def test_files_that_hold_no_trace(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    result = run(path, "-o", tmp_path / "run")
    assert (result.exit_code, result.stderr) == (1, f"nanalyze: error: {path}: {message}\n")
    assert not (tmp_path / "run").exists()


def test_errors_stay_on_one_line_whatever_they_quote() -> None:
    error = ImportFailed("f", 'unrecognized token: "\x1b[2J\n  NOT NULL' + "x" * 5000, "Export it again.")
    assert str(error).startswith('f: unrecognized token: "\\x1b[2J NOT NULLxxx')
    assert str(error).endswith("xxx. Export it again.")
    assert len(str(error)) < 1100


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    assert "does not exist" in run(tmp_path / "nothing", "-o", tmp_path / "run").stderr


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    profile = tmp_path / "p.hatchet"
    profile.write_text('[{"frame": {"name": "ROOT"}, "metrics": {}, "children": []}]')
    result = run(export(tmp_path / "r.sqlite"), profile, "-o", tmp_path / "run")
    assert result.stderr == (
        f"nanalyze: error: {profile}: is of kind proton, {tmp_path / 'r.sqlite'} of kind nsys. "
        "Import each kind into a run of its own.\n"
    )


def test_kinds_of_the_command_are_those_of_the_importers() -> None:
    assert set(command.KINDS) == {kind.partition("-")[0] for kind in registry.kinds()}


def test_a_kind_that_is_given_wins_over_the_content(tmp_path: Path) -> None:
    result = run(export(tmp_path / "r.sqlite"), "-o", tmp_path / "run", "--kind", "proton")
    assert result.exit_code == 1
    assert "is not valid JSON" in result.stderr


def test_an_unknown_locale_is_refused() -> None:
    with pytest.raises(NanalyzeError, match="Choose one of en, de"):
        Options(locale="fr")


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    registry.import_files([export(tmp_path / "r.sqlite")], tmp_path / "run", progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


# --- the sink ----------------------------------------------------------------------------------------------


def sink(tmp_path: Path, force: bool = False) -> Sink:
    source = tmp_path / "source.txt"
    source.touch()
    return Sink(tmp_path / "run", "kineto", [source], force)


def kernels(kernel_class: int, **columns: Any) -> dict[str, Any]:
    rows = len(next(iter(columns.values())))
    return {"kernel_class_id": np.full(rows, kernel_class), **columns}


def test_values_that_no_column_holds_become_null_and_are_counted(tmp_path: Path) -> None:
    with sink(tmp_path) as receiver:
        process = receiver.process("p")
        kernel = receiver.kernel_class(process, KernelClass(b"k", (1, 1, 1), (1, 1, 1)), "k")
        receiver.add("kernels", process, kernels(kernel, duration_ns=[5, 2**70, None, 2.5], device_id=[0, 2**40, 1, 1]))
        receiver.add(
            "exact",
            process,
            {
                "scope": ["kernel"] * 2,
                "metric": ["m"] * 2,
                "value": [float("nan"), 2.0],
                "kernel_class_id": [kernel] * 2,
            },
        )
        summary = receiver.commit()
    assert summary.refused == {
        "kernels.duration_ns: no finite number that fits": 2,
        "kernels.device_id: no finite number that fits": 1,
        "exact.value: no finite number that fits": 1,
    }
    with na.open(tmp_path / "run") as opened:
        assert opened.arrow("SELECT duration_ns FROM raw.kernels ORDER BY 1 NULLS LAST")["duration_ns"].to_pylist() == [
            5, None, None, None
        ]  # fmt: skip
        assert opened.arrow("SELECT value FROM exact ORDER BY 1 NULLS LAST")["value"].to_pylist() == [2.0, None]


def test_shapes_beyond_31_bits_do_not_stop_an_import(tmp_path: Path) -> None:
    with sink(tmp_path) as receiver:
        process = receiver.process("p")
        kernel = receiver.kernel_class(process, KernelClass(b"k", (2**70, 1, 1), (1, 1, 1), (0, 0, 0), -4), "k")
        receiver.add("kernels", process, kernels(kernel, duration_ns=[5]))
        assert receiver.commit().refused == {"launch shapes or resources that are no 31-bit numbers": 1}
    with na.open(tmp_path / "run") as opened:
        found = opened.sql("SELECT grid_x, block_x, registers_per_thread FROM kernel_classes")
    assert found.astype(object).where(found.notna(), None).to_numpy().tolist() == [[0, 1, None]]


def test_rows_become_many_shards_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanalyze.importers import sink as module

    monkeypatch.setattr(module, "FLUSH_ROWS", 100)
    with sink(tmp_path) as receiver:
        processes = [receiver.process("a/b"), receiver.process("a b"), receiver.process("a/b")]
        assert processes == ["a_b", "a_b-2", "a_b"]
        for process in processes[:2]:
            kernel = receiver.kernel_class(process, KernelClass(b"k", (1, 1, 1), (1, 1, 1)), "k")
            for start in range(0, 250, 50):
                times = np.arange(start, start + 50)
                receiver.add("kernels", process, kernels(kernel, start_ns=times, duration_ns=np.ones(50, dtype=int)))
        assert receiver.commit().kernels == 500
    assert len(list((tmp_path / "run" / "kernels" / "process=a_b").iterdir())) == 3
    with na.open(tmp_path / "run") as opened:
        assert opened.damage_count == 0
        found = opened.sql(
            "SELECT count(*) AS n, min(started_ns) AS s, max(ended_ns) AS e FROM kernels JOIN processes USING (process)"
        )
    assert found.to_numpy().tolist() == [[500, 0, 250]]


def test_without_kernels_and_counters_there_is_no_run(tmp_path: Path) -> None:
    receiver = sink(tmp_path)
    receiver.add("ranges", receiver.process("p"), {"name": ["r"], "start_ns": [1]})
    receiver.count("ranges", 1)
    receiver.refuse("marks", 3)
    with pytest.raises(ImportFailed, match=r"holds no GPU kernels: .* gave 1 ranges, and left out: marks \(3\)"):
        receiver.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["source.txt"]


def test_leaving_the_sink_early_removes_what_was_written(tmp_path: Path) -> None:
    with sink(tmp_path) as receiver:
        receiver.add("events", receiver.process("p"), {"message": ["m"]})
    assert [path.name for path in tmp_path.iterdir()] == ["source.txt"]


def test_a_run_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with sink(tmp_path) as receiver:
        process = receiver.process("p")
        kernel = receiver.kernel_class(process, KernelClass(b"k", (1, 1, 1), (1, 1, 1)), "k")
        receiver.add("kernels", process, kernels(kernel, duration_ns=[5]))
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.json").write_text("{}")
        with pytest.raises(RunError, match="exists"):
            receiver.commit()
    assert (tmp_path / "run" / "run.json").read_text() == "{}"


def test_a_process_without_an_end_was_cut_off(tmp_path: Path) -> None:
    with sink(tmp_path) as receiver:
        process = receiver.process("p", rank=3)
        receiver.process("p", ended_ns=None, ending=None)
        kernel = receiver.kernel_class(process, KernelClass(b"k", (1, 1, 1), (1, 1, 1)), "k")
        receiver.add("kernels", process, kernels(kernel, start_ns=[7], duration_ns=[5]))
        receiver.commit()
    with na.open(tmp_path / "run") as opened:
        row = opened.arrow("SELECT rank, started_ns, ended_ns, ending FROM processes").to_pylist()
    assert row == [{"rank": 3, "started_ns": 7, "ended_ns": None, "ending": None}]


def test_devices_get_the_peaks_of_their_capability_but_not_amd_s(tmp_path: Path) -> None:
    told = {"cc_major": 9, "cc_minor": 0, "sm_count": 132, "warp_size": 32}
    with sink(tmp_path) as receiver:
        process = receiver.process("p")
        receiver.device(process, device_id=0, name="NVIDIA H100")
        receiver.device(process, device_id=0, **told)
        receiver.device(process, device_id=1, name="AMD Instinct MI210", **told)
        receiver.device(process, device_id=2, name="NVIDIA H100")
        kernel = receiver.kernel_class(process, KernelClass(b"k", (1, 1, 1), (1, 1, 1)), "k")
        receiver.add("kernels", process, kernels(kernel, duration_ns=[5]))
        receiver.commit()
    with na.open(tmp_path / "run") as opened:
        rows = opened.arrow("SELECT device_id, fp64_flops_per_sm_cycle FROM devices ORDER BY 1").to_pylist()
    assert [tuple(row.values()) for row in rows] == [(0, 128.0), (1, None), (2, None)]


# --- the page ----------------------------------------------------------------------------------------------


def test_the_page_names_only_columns_and_kinds_that_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(rf"`({'|'.join(TABLES)})\.([a-z_]+)`", text)
    assert len(named) > 30
    assert [f"{table}.{column}" for table, column in named if column not in TABLES[table].column_names] == []
    metrics = text.split("GPU metrics are percentages")[1].split("Speed:")[0]
    sampled = set(re.findall(r"\| `([a-z_]+)`(?:, `([a-z_]+)`)? \|", metrics))
    assert len(sampled) == 7
    assert {name for pair in sampled for name in pair if name} <= set(BY_COLUMN)


def reasons() -> set[str]:
    """What importers count as left out, as their code says it; "..." for what it fills in."""
    found = set()
    for file in Path(registry.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "refuse":
                text = call.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                found.add("".join(part.value if isinstance(part, ast.Constant) else "..." for part in parts))
    return found


def test_the_page_explains_every_reason_to_leave_something_out() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## What is left out")[1].split("## Limits")[0]
    explained = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert set(explained) - {"reason", "---"} == reasons()
    assert len(reasons()) > 40
