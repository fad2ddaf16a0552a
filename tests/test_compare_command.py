"""`nanalyze compare`: what it prints and writes, its exit codes, and names that would break out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from PIL import Image
from variants import EAGER, FUSED, Kernel, Variant, write

from nanalyze import commands
from nanalyze.analysis.compare import markdown

HOSTILE = "a|b`c`<script>alert(1)</script>\n| x | @everyone ![i](http://evil.example) \u202e\x1b[31m]]>&amp;\x00\ud800"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands.main, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `before`, `same`, `after` (3 % slower), `other` (another GPU model) and `both` (two ranges).

    Each but the last also as a baseline, `before.base`, which is quicker to read.
    """
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "before", [EAGER], seed=1)
    write(folder / "same", [EAGER], seed=2)
    write(folder / "after", [EAGER.slower(0.03)], seed=3)
    write(folder / "other", [EAGER], seed=4, name="NVIDIA H100")
    write(folder / "both", [EAGER, FUSED], seed=5)
    for name in ("before", "same", "after", "other"):
        assert run(folder / name, "--save-baseline", folder / f"{name}.base").exit_code == 0
    return folder


def lines(text: str) -> list[str]:
    return [re.sub(r" {2,}", "  ", line).strip() for line in text.splitlines()]


# --- what it says ------------------------------------------------------------------------------


def test_ranges_are_compared(folder: Path) -> None:
    result = run(folder / "both", "--ranges", "eager, fused")
    assert result.exit_code == 0, result.output
    found = lines(result.output)
    assert found[:2] == ["A: eager (30 repetitions of eager)", "B: fused (30 repetitions of fused)"]
    assert re.fullmatch(r"fused is faster: eager takes 2\.2\d\d times as long \(2\.2\d\d to 2\.2\d\d\)\.", found[3])
    assert "launches  3  1  -2  -66.7 %" in found
    assert "gaps between kernels  4.00 µs  0.00 ns  -4.00 µs  –" in found
    assert "DRAM bytes  600 MB  300 MB  -300 MB  -50.0 %" in found
    assert "verdicts B: memory (DRAM) 100.0 %" in found


def test_only_what_lies_within_a_range_is_compared(folder: Path) -> None:
    result = run(folder / "both", "--ranges", "eager,fused", "--within", "size=3")
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "no repetition of eager" in result.output


def test_runs_are_compared(folder: Path) -> None:
    result = run(folder / "before", folder / "after")
    assert result.exit_code == 0, result.output
    assert "B is slower: it takes 1.03" in result.output
    assert re.search(r"bias +same +\S+ µs +10[23]\S* µs +\+[23]\.\d % \(\+2\.\d to \+3\.\d\) \*", result.output)


def test_several_runs_of_each_side(folder: Path) -> None:
    result = run("--a", folder / "before", "--a", folder / "same", "--b", folder / "after")
    assert result.exit_code == 0, result.output
    assert f"A: {folder / 'before'}, {folder / 'same'} (2 runs, 60 repetitions of eager)" in result.output


def test_identical_sides_show_no_difference(folder: Path) -> None:
    result = run(folder / "before", folder / "same")
    assert "No difference is shown: A takes " in result.output
    assert " *" not in result.output.replace("* certain", "")


# --- gates and exit codes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "options", "code"),
    [
        ("same", ["--fail-if", "total_ns>+1%"], 0),
        ("after", ["--fail-if", "total_ns>+1%"], 3),
        ("after", ["--fail-if", "total_ns>+1%", "--fail-if", "launches>+0"], 3),
        ("after", ["--fail-if", "total_ns>+3%"], 0),
        ("after", ["--fail-if", "total_ns>+3%", "--strict"], 4),
        ("same", ["--fail-if", "kernel:typo.mean_ns>+3%"], 4),
        ("other", [], 4),
        ("other", ["--fail-if", "total_ns>-50%"], 4),
        ("other", ["--allow-different"], 0),
        ("other", ["--allow-different", "--fail-if", "total_ns>-50%"], 3),
        ("missing", [], 1),
        ("same", ["--fail-if", "speed>3"], 1),
        ("same", ["--step", "nothing"], 1),
    ],
)
def test_exit_codes(folder: Path, b: str, options: list[str], code: int) -> None:
    result = run(folder / "before.base", folder / f"{b}.base", *options)
    assert result.exit_code == code, result.output
    if code == 1:
        assert result.stderr.startswith("nanalyze: error: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Give the runs to compare"),
        (["a"], "One run compares with nothing"),
        (["a", "b", "c"], "More than two runs"),
        (["a", "--b", "b"], "not both"),
        (["a", "b", "--ranges", "x,y"], "--ranges compares within one run"),
        (["a", "--ranges", "x"], "--ranges takes two names"),
        (["a", "--ranges", "x,x"], "--ranges takes two names"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, says in result.output) == (2, True)


# --- files -------------------------------------------------------------------------------------


def test_files_are_written_and_not_overwritten(folder: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "markdown", "junit", "plot")}
    options = [item for name, file in files.items() for item in (f"--{name}", file)]
    arguments = (
        folder / "before.base",
        folder / "after.base",
        "--fail-if",
        "total_ns>+1%",
        "--fail-if",
        "gap_ns>+1%",
        *options,
    )
    assert run(*arguments).exit_code == 3
    content = json.loads(files["json"].read_text())
    assert [gate["status"] for gate in content["gates"]] == ["failed", "passed"]
    suite = ElementTree.parse(files["junit"]).getroot()
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3", "failures": "1", "errors": "0", "skipped": "0",
    }  # fmt: skip
    failure = suite.find("testcase[@name='total_ns>+1%']/failure")
    assert failure is not None
    assert re.match(r"\+[23]\.\d\d % \(\+2\.\d\d to \+3\.\d\d\): the whole interval", failure.get("message", ""))
    assert "| `total_ns>+1%` | `total_ns` | +" in files["markdown"].read_text()
    with Image.open(files["plot"]) as image:
        assert image.width == 1140
    again = run(*arguments)
    assert again.exit_code == 1
    assert "exists. Use --force to overwrite it." in again.stderr
    assert run(*arguments, "--force").exit_code == 3


def test_json_goes_to_standard_output_alone(folder: Path) -> None:
    result = run(folder / "before.base", folder / "same.base", "--json", "-")
    assert json.loads(result.stdout)["b"]["repetitions"] == 30


def test_a_file_that_cannot_be_written_is_one_line(folder: Path, tmp_path: Path) -> None:
    result = run(folder / "before.base", folder / "same.base", "--json", tmp_path / "no" / "file")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_a_baseline_stands_for_its_run(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "main.baseline"
    saved = run(folder / "before", "--save-baseline", file)
    assert saved.exit_code == 0, saved.output
    assert file.stat().st_size < 20_000
    gate = ("--fail-if", "total_ns>+1%")
    assert [run(file, folder / b, *gate).exit_code for b in ("same", "after", "other")] == [0, 3, 4]
    assert run(file, folder / "same", "--step", "other").exit_code == 1
    assert "A: " + str(file) in run(file, folder / "same").output


# --- names of others ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = HOSTILE.encode("utf-8", "replace").decode()
    variant = Variant("step", (replace(EAGER.kernels[0], name=name), Kernel("x" * 10_000, 9_000)))
    return write(tmp_path_factory.mktemp("hostile") / "run", [variant])


def test_names_stay_inside_their_cells(hostile: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "markdown", "junit", "plot")}
    options = [item for name, file in files.items() for item in (f"--{name}", file)]
    result = run(hostile, hostile, "--fail-if", "each:.*.mean_ns>+1%", *options)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output
    text = files["markdown"].read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (5, 6) for row in rows)
    outside = re.sub(r"`[^`\n]*`", "", text)
    for word in ("<script", "@everyone", "evil.example", "x" * 20):
        assert word not in outside
    assert text.isprintable() or {c for c in text if not c.isprintable()} <= {"\n", "\u202f", "\ufe0f"}
    suite = ElementTree.parse(files["junit"]).getroot()
    assert len(suite.findall("testcase")) == 3
    assert json.loads(files["json"].read_text())["kernels"][0]["kernel"].startswith("a|b`c`<script>")


@pytest.mark.parametrize("name", [HOSTILE, "", "`", "|||", "\\|", "a\\"])
def test_a_code_span_cannot_be_left(name: str) -> None:
    span = markdown.code(name)
    assert span[0] == span[-1] == "`"
    assert not set("`|\n\r\x1b\u202e") & set(span[1:-1])
    assert span[1:-1].strip()


def test_the_page_s_example_is_what_the_command_prints() -> None:
    repository = Path(__file__).parents[1]
    page = (repository / "docs/compare.md").read_text(encoding="utf-8")
    block = page[page.index("    $ nanalyze compare examples/h200-sample") :].split("\n\nBoth read")[0]
    sample = repository / "examples/h200-sample"
    done = run(sample, "--ranges", "softmax,triton_softmax")
    assert done.exit_code == 0, done.output
    printed = [" ".join(line.split()) for line in done.output.splitlines()]
    shown = [" ".join(line.split()) for line in block.splitlines()[1:] if line.strip()]
    assert len(shown) == 11
    assert [line for line in shown if line not in printed] == []
