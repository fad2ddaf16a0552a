"""The report as Markdown, JSON and PDF, on several runs, and what keeps the page light."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from trace import Trace
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from PIL import Image
from test_report import HOSTILE, build

import nanalyze.analysis as na
from nanalyze import commands
from nanalyze.analysis import report
from nanalyze.analysis.report import collect, markdown, page, pdf, plots, several, summary, svg
from nanalyze.analysis.report.collect import Data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("formats") / "run").run_dir


def nanalyze(*arguments: object) -> Result:
    return CliRunner().invoke(commands.main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def data(run_dir: Path) -> Data:
    return collected(run_dir)


@pytest.fixture(scope="module")
def text(run_dir: Path) -> str:
    result = nanalyze("report", run_dir, "--format", "md")
    assert result.exit_code == 0, result.output
    return result.stdout.replace("\u202f", " ")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return collected(hostile(tmp_path_factory.mktemp("odd") / "run"))


def collected(path: Path) -> Data:
    with na.open(path) as run:
        return collect.collect(run, path.name, lambda name: None)


def hostile(folder: Path) -> Path:
    """Every name of HOSTILE as a kernel, and a few that are hostile to Markdown only."""
    trace = Trace(folder)
    trace.device(name=HOSTILE[0])
    names = [*HOSTILE, "a|b", "`code`", "@everyone #1", "[x](http://evil.example)", "</details>", "~~a~~ **b**"]
    for place, name in enumerate(names):
        kernel = trace.kernel_class(name, kernel_class_id=place + 1)
        trace.kernel(kernel, 1_000 * place, 900 - place)
        trace.range(name, 1_000 * place, 1_000 * place + 950)
    trace.write()
    return folder


# --- Markdown ----------------------------------------------------------------------------------


def test_markdown_answers_first_and_folds_the_rest(text: str) -> None:
    lines = text.splitlines()
    assert lines[0] == "### nanalyze report"
    assert lines[2].startswith("The recording lasted 16 min 40 s, GPU work spans 2.00 µs of it: 6 kernel launches")
    assert "| memory | DRAM | 60.0 % | 600 ns | 1 | 3 |" in lines
    assert "| 1 | `copy<float, 4>` | 60.0 % | 600 ns | 3 | memory (DRAM) | 10.0 % | 90.0 % |" in lines
    folded = re.findall(r"<details><summary>(.*?)</summary>", text)
    assert {"Roofline", "Time lost, by cause", "Utilisation"} <= set(folded)
    assert text.count("<details>") == text.count("</details>") == len(folded)


def test_markdown_tables_have_as_many_cells_as_heads(text: str) -> None:
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if re.fullmatch(r"\|(-+:?\|)+", line):
            cells = line.count("|")
            rows = [lines[place - 1]]
            for row in lines[place + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(row)
            assert len(rows) > 1
            assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {cells}


def test_hostile_names_cannot_leave_their_place_in_markdown(odd: Data) -> None:
    text = markdown.document([odd], ["run"], [])
    outside = re.sub(r"`[^`\n]*`", "", text)  # what is not in a code span
    assert not re.search(r"(?<!\\)<(?!/?(details|summary|br|sub|code)>)", outside)
    assert not re.search(r"(?<![\\!])\[[^\]\n]*\]\(", outside)
    assert not re.search("https?://|@everyone|#1\\b|[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f]", outside)
    assert text.count("<details>") == outside.count("</details>")
    assert len(text) <= markdown.MOST_CHARACTERS + 200


def test_markdown_that_is_too_long_is_cut_between_sections(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = markdown.document([data], ["run"], [])
    monkeypatch.setattr(markdown, "MOST_CHARACTERS", len(whole) - 300)
    cut = markdown.document([data], ["run"], [])
    assert cut.endswith(f"\nCut to {len(whole) - 300:,} characters: the rest is in report.html.\n")
    assert cut.count("<details>") == cut.count("</details>") > 0


# --- JSON --------------------------------------------------------------------------------------


def test_json_is_the_summary(run_dir: Path, data: Data) -> None:
    found = json.loads(nanalyze("report", run_dir, "--format", "json").stdout)
    assert found == json.loads(summary.encode(summary.of_runs([data], found["nanalyze_version"], [])))
    assert found["roofline"][0]["pipe"] == "fp32"
    assert found["roofline"][0]["kernel_class_id"] == str(2**62 + 1)
    assert {row["ceiling"] for row in found["ceilings"]} >= {"fp32", "dram_read"}


# --- PDF ---------------------------------------------------------------------------------------


def test_a_pdf_has_the_text_and_the_plots(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    assert nanalyze("report", run_dir, "--format", "pdf", "-o", path).stdout == f"Report: {path}\n"
    data = path.read_bytes()
    assert data.startswith(b"%PDF-1.")
    assert data.count(b"/Subtype /Image") == 4  # verdicts, time by cause, roofline, utilisation
    assert len(re.findall(rb"/Type /Page\b", data)) >= 2
    if shutil.which("pdftotext") is None:
        return
    text = subprocess.run(["pdftotext", "-layout", path, "-"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "Run run" in text
    assert "copy<float, 4>" in text
    assert "60.0" in text
    assert "The kernels that take the most time" in text


def pictures(data: Data) -> dict[str, bytes]:
    dot = io.BytesIO()
    Image.new("RGB", (20, 10)).save(dot, "PNG")
    return {plot.name: dot.getvalue() for plot in plots.plots(data)}


def test_the_same_run_gives_the_same_pdf_however_odd_its_names(odd: Data) -> None:
    first, second = (pdf.document([odd], [pictures(odd)], ["run"], [], "1") for _ in range(2))
    assert first == second
    assert first.startswith(b"%PDF")


def test_text_on_paper_is_broken_to_fit() -> None:
    text = f"words that {'W' * 200} end"
    lines = pdf._wrapped(text, 8, 200)
    assert all(pdf._width(line, 8) <= 200 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert pdf._wrapped("", 8, 200) == []


def test_columns_on_paper_fill_the_page_and_no_more() -> None:
    assert pdf._shared([10, 20], [10, 20], 100) == [10, 20]
    assert pdf._shared([100, 300], [20, 20], 200) == [
        pytest.approx(20 + 160 * 80 / 360),
        pytest.approx(20 + 160 * 280 / 360),
    ]
    assert sum(pdf._shared([100, 300], [100, 150], 200)) == pytest.approx(200)


# --- where documents go ------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["md", "json", "pdf"])
def test_a_file_is_replaced_only_if_forced(run_dir: Path, tmp_path: Path, format: str) -> None:
    path = tmp_path / f"report.{format}"
    path.write_text("mine")
    refused = nanalyze("report", run_dir, "--format", format, "-o", path)
    assert refused.exit_code == 1
    assert refused.output.endswith(f"{path}: exists. Choose another file with -o, or pass --force to replace it.\n")
    assert path.read_text() == "mine"
    if format == "md":
        assert nanalyze("report", run_dir, "--format", format, "-o", path, "--force").exit_code == 0
        assert path.read_text().startswith("### nanalyze report")
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_several_runs_need_a_place(run_dir: Path) -> None:
    for format in ("html", "pdf"):
        result = nanalyze("report", run_dir, run_dir, "--format", format)
        assert result.exit_code == 1
        assert "on several runs belongs to none of them: say with -o where it goes." in result.output


def test_steps_are_as_many_as_announced(run_dir: Path) -> None:
    seen: list[str] = []
    with na.open(run_dir) as run:
        report.to_markdown(run, step=seen.append)
    assert len(seen) == report.step_count("md") == report.step_count("md", 3) - 2 * report.READING


# --- several runs ------------------------------------------------------------------------------


def slower(run_dir: Path, factor: int, steps: int = 12) -> Path:
    """Steps of one kernel each, `factor` x 1 ms long with a jitter of 1 %."""
    trace = Trace(run_dir)
    trace.device()
    kernel = trace.kernel_class("work", (1320, 1, 1), (256, 1, 1))
    for place in range(steps):
        at = place * 20_000_000
        duration = factor * (1_000_000 + 10_000 * (place % 3))
        trace.range("step", at, at + duration)
        trace.kernel(kernel, at, duration)
    trace.write()
    return run_dir


def test_runs_are_set_side_by_side_with_the_speedup_of_compare(tmp_path: Path) -> None:
    paths = [slower(tmp_path / "before", 2), slower(tmp_path / "after", 1)]
    result = nanalyze("report", *paths, "-o", tmp_path / "both")
    assert result.exit_code == 0, result.output
    html = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert '<article id="run1-run"' in html
    assert re.search(r'title="95 % interval [12]\.\d+ to 2\.\d+: faster">2\.000<', html)
    content = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert [run["run"]["name"] for run in content["runs"]] == ["before", "after"]
    assert content["run"]["run_id"] == "+".join(run["run"]["run_id"] for run in content["runs"])
    assert "run2/tables/verdicts.csv" in content["files"]
    refused = nanalyze("report", *paths[::-1], "-o", tmp_path / "both")
    assert (refused.exit_code, "holds the report of another run" in refused.output) == (1, True)


def test_runs_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    empty = Trace(tmp_path / "empty")
    empty.process_row()
    empty.write()
    with na.open(build(tmp_path / "run").run_dir) as one, na.open(tmp_path / "empty") as other:
        found = several.against(one, other)
    assert found.speedup is None
    assert found.reason


def test_kernels_across_runs_are_matched_by_name_shape_and_resources(tmp_path: Path) -> None:
    runs = [collected(slower(tmp_path / "before", 2)), collected(slower(tmp_path / "after", 1))]
    grid = several.kernel_grid(runs)
    (row,) = grid.rows
    assert [cell.text.replace("\u202f", " ") for cell in row] == ["work", "24.2 ms", "12.1 ms", "-50.0 %"]
    assert row[1].below.replace("\u202f", " ") == "12 × 2.02 ms"


def part(data: Data, size: int) -> page.Part:
    drawn = {"verdicts": [{"style": "wide", "svg": "x" * size}]} if size else {}
    return page.Part(data, "run", "", drawn)


def test_a_page_of_many_runs_first_goes_without_plots_then_without_details(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = len(page.page([part(data, 0)] * 8, "1"))
    monkeypatch.setattr(page, "MOST_BYTES", light + 50_000)
    html = page.page([part(data, 20_000)] * 8, "1")
    assert len(html.encode()) <= page.MOST_BYTES
    assert html.count("x" * 20_000) == 2
    assert html.count("<article") == 8
    monkeypatch.setattr(page, "MOST_BYTES", light // 2)
    html = page.page([part(data, 20_000)] * 8, "1")
    assert html.count("<article") < 8
    assert "to keep the page light" in html
    side_by_side = html[html.index('id="side-by-side"') : html.index('id="kernels-across"')]
    assert side_by_side.count("<tr>") == 1 + 8  # every run all the same


def test_a_large_run_stays_below_3_mb(tmp_path: Path) -> None:
    """Long names, counters for all, many devices and ranges: what makes a page heavy."""
    trace = Trace(tmp_path / "run")
    for device in range(8):
        trace.device(device_id=device, uuid=f"GPU-{device}")
    for place in range(120):
        kernel = trace.kernel_class(f"k{place}<{'very_long_argument, ' * 100}>", (place + 1, 1, 1))
        trace.kernel(kernel, 1_000 * place, 900, device_id=place % 8)
        moved = 1e5 + place
        counters = {"duration_ns": 900.0, "compute_pct": 50.0, "memory_pct": 70.0, "dram_read_bytes": moved}
        counters |= {"dram_write_bytes": 0.0, "l2_bytes": 2 * moved, "l1_bytes": 4 * moved, "thread_inst_fadd": 0.0}
        trace.measure(kernel, [{**counters, "thread_inst_fmul": 0.0, "thread_inst_ffma": 1e6 * (place + 1)}])
        trace.range(f"range {place} {'x' * 500}", 1_000 * place, 1_000 * place + 950)
    trace.write()
    with na.open(tmp_path / "run") as run:
        written = report.write(run)
    assert written.page.stat().st_size < 3_000_000


# --- drawings ----------------------------------------------------------------------------------

SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{}</svg>'


def test_a_drawing_keeps_its_shapes_and_loses_everything_else() -> None:
    drawing = (
        '<metadata>who</metadata><defs><style type="text/css">*{fill: red}</style></defs>'
        '<g id="kernel-1" onclick="x()"><path d="M 1.23456 2 L 3.987654 4" style="stroke: #020301; clip: url(#c)"/></g>'
        '<g><use xlink:href="#m" x="1.0000001"/></g><text style="font: 8px \'DejaVu Sans\'">a &lt; b</text>'
    )
    text = svg.inline(SVG.format(drawing).encode(), "key", 'what "it" shows', {"kernel-1": "<b>name</b>"})
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == 'what "it" shows'
    group = root.find("g")
    assert group is not None
    assert group.attrib == {"id": "key-kernel-1"}
    assert [child.tag for child in group] == ["title", "path"]
    assert "<title>&lt;b&gt;name&lt;/b&gt;</title>" in text
    assert 'd="M 1.23 2 L 3.98 4"' in text
    assert "stroke: var(--ink); clip: url(#key-c)" in text
    assert 'href="#key-m"' in text
    assert 'style="font-size: 8px"' in text
    assert "a &lt; b" in text
    assert not re.search("who|red|onclick|http", text)


@pytest.mark.parametrize(
    "inside",
    ["<script>x</script>", "<foreignObject/>", "<image href='#x'/>", "<g><use xlink:href='http://evil/x'/></g>"],
)
def test_what_is_no_drawing_is_refused(inside: str) -> None:
    with pytest.raises(ValueError, match="does not go into the page"):
        svg.inline(SVG.format(inside).encode(), "key", "", {})
