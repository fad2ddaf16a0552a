"""The whole report: numbers against those worked out by hand, the page's safety, every odd run."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from trace import PROCESS, T0, Trace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

import nanalyze.analysis as na
from nanalyze import commands, queries
from nanalyze.analysis import report
from nanalyze.analysis.report import figures, palette

OTHER = "node0-1-101"
COPY = {
    "duration_ns": 200.0, "sm_clock_hz": 2e9, "compute_pct": 10.0, "memory_pct": 90.0, "dram_pct": 90.0, "l2_pct": 30.0,
    "l1_pct": 20.0, "occupancy_pct": 50.0, "dram_read_bytes": 5e5, "dram_write_bytes": 4e5, "thread_inst_fadd": 1e3,
    "thread_inst_fmul": 0.0, "thread_inst_ffma": 0.0,
}  # fmt: skip
# 132 SMs x 4096 FLOP x 2 GHz for 150 ns are 162,201,600 FLOP at the peak; 80 % of that.
GEMM = {
    "duration_ns": 150.0, "sm_clock_hz": 2e9, "compute_pct": 90.0, "memory_pct": 40.0, "pipe_tensor_pct": 90.0,
    "occupancy_pct": 25.0, "dram_read_bytes": 1e3, "dram_write_bytes": 0.0, "tensor_bf16_ops": 129_761_280.0,
}  # fmt: skip
HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    '=HYPERLINK("http://evil.example")',
    "$\\frac{1}{$ kernel _^{",
    "a\nb\r\x1b[31m\u202eevil\u2066",
    "x" * 10_000,
    "void f<" + "g<" * 2_000 + "int" + ">" * 2_001 + "(int)",
    "bytes \\xff\\xfe",
    "😀 مرحبا 日本",
    "{{ 7 * 7 }} {% raw %}",
    "]]>&amp;<!--",
    "",
]


class Page(HTMLParser):
    """What a browser would make of report.html: tags, attributes, visible text, table rows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.text: dict[str, str] = {}
        self._section = ""
        self._in_cell = self._in_style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_style = tag in ("style", "script")
        if tag == "section":
            self._section = dict(attrs).get("id") or ""
        elif tag == "tr":
            self.rows.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self._in_cell = True
            self.rows[self._section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            return
        data = data.replace("\u202f", " ")
        self.text[self._section] = self.text.get(self._section, "") + data
        if self._in_cell:
            self.rows[self._section][-1][-1] += data

    def attribute(self, tag: str, name: str) -> list[str]:
        return [attrs[name] or "" for found, attrs in self.tags if found == tag and name in attrs]


def build(run_dir: Path) -> Trace:
    """1,000 ns of kernel time: copy 600, gemm 300, tiny 100; the timeline spans 2,000 ns, 650 of them busy."""
    trace = Trace(run_dir)
    trace.device()
    copy = trace.kernel_class("void copy<float, 4>(float*)", (4096, 1, 1), (256, 1, 1), kernel_class_id=2**62 + 1)
    gemm = trace.kernel_class("gemm", (132, 2, 1), (384, 1, 1), cluster=(2, 1, 1), kernel_class_id=2**62 + 3)
    tiny = trace.kernel_class("tiny", kernel_class_id=5)
    trace.range("step", 0, 2_500, flops=None, bytes=1_300.0)
    trace.kernel(copy, 0, 200)
    trace.kernel(copy, 500, 200)
    trace.kernel(gemm, 1_000, 150)
    trace.kernel(tiny, 1_900, 100)
    trace.measure(copy, [COPY])
    trace.measure(gemm, [GEMM])
    trace.copy("HtoD", 300, 100, 1_000, source="pinned", destination="device")
    trace.state(10, sm_clock_hz=1_500_000_000)
    trace.state(1_500, sm_clock_hz=1_700_000_000)
    trace.event("note", "A note.", layer="exact")
    trace.write()
    return trace


def made(run_dir: Path, **options: Any) -> Path:
    """The report directory of a run."""
    with na.open(run_dir) as run:
        return report.write(run, **options).directory


def summary(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return content


def page(directory: Path) -> Page:
    return Page((directory / "report.html").read_text(encoding="utf-8"))


def table(directory: Path, name: str) -> list[dict[str, str]]:
    with open(directory / "tables" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots of one pixel, where a test is about something else: drawing takes most of a report's time."""
    pixel = io.BytesIO()
    Image.new("RGB", (1, 1)).save(pixel, "PNG")
    monkeypatch.setattr(figures, "render", lambda draw, look: pixel.getvalue())
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(figures, "render_svg", lambda draw, look, salt: drawing)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(build(tmp_path_factory.mktemp("report") / "run").run_dir)


# --- summary.json ------------------------------------------------------------------------------


def test_totals_are_those_worked_out_by_hand(directory: Path) -> None:
    assert summary(directory)["totals"] == {
        "launches": 6,
        "launches_untimed": 0,
        "launches_in_graphs": 0,
        "launches_measured": 2,
        "kernel_classes": 3,
        "classes_with_counters": 2,
        "kernel_ns": 1_000,
        "active_ns": 2_000,
        "recorded_ns": 10**12,
    }


def test_verdicts_add_up(directory: Path) -> None:
    content = summary(directory)
    assert content["verdicts"] == [
        {"bound": "memory", "kernel_classes": 1, "launches": 3, "total_ns": 600, "share": 0.6},
        {"bound": "compute", "kernel_classes": 1, "launches": 2, "total_ns": 300, "share": 0.3},
        {"bound": "launch", "kernel_classes": 1, "launches": 1, "total_ns": 100, "share": 0.1},
    ]
    assert [(row["bound"], row["level_or_pipe"]) for row in content["verdict_parts"]] == [
        ("memory", "DRAM"),
        ("compute", "tensor"),
        ("launch", None),
    ]


def test_kernels_carry_their_evidence(directory: Path) -> None:
    first = summary(directory)["kernels"][0]
    assert first["kernel_class_id"] == str(2**62 + 1)
    assert (first["kernel"], first["bound"], first["level_or_pipe"]) == (
        "void copy<float, 4>(float*)",
        "memory",
        "DRAM",
    )
    assert (first["total_ns"], first["launches"], first["mean_ns"]) == (600, 3, 200.0)
    assert (first["memory_pct"], first["compute_pct"], first["occupancy_pct"]) == (90.0, 10.0, 50.0)
    assert (first["method"], first["launches_measured"], first["over_peak"]) == ("exact", 1, False)
    assert first["shape"] == "grid 4096×1×1, block 256×1×1"


def test_utilisation_counts_time_with_a_kernel(directory: Path) -> None:
    (device,) = summary(directory)["utilisation"]
    assert device["active_ns"] == 2_000
    assert device["busy_ns"] == 650
    assert device["busy_share"] == 0.325
    assert (device["copy_ns"], device["copy_share"]) == (100, 0.05)
    assert device["label"] == f"GPU 0: NVIDIA H200 ({PROCESS})"


def test_the_rest_of_the_summary(directory: Path) -> None:
    content = summary(directory)
    assert content["summary_version"] == 1
    assert content["first_kernel_start"] == "2023-11-14T22:13:20.000000000Z"
    assert content["last_kernel_end"] == "2023-11-14T22:13:20.000002000Z"
    assert content["recording"] == {
        "cpu_ns": 1_000_000,
        "exact_launches": 2,
        "exact_ns": 2_000_000,
        "exact_passes": 1,
        "records_lost": 0,
        "losses": 0,
        "damage": 0,
    }
    assert content["thresholds"]["high_pct"] == 80
    assert content["other_kernels"] == {"kernel_classes": 0, "launches": 0, "total_ns": 0, "share": 0}
    assert content["copies"][0]["bytes_per_s"] == 1e10
    assert content["processes"][0]["cut_off"] is False
    assert content["headline"] == [
        "The recording lasted 16 min 40 s, GPU work spans 2.00 µs of it: 6 kernel launches of 3 kinds on 1 GPU "
        "(NVIDIA H200).",
        "A kernel was running 32.5 % of the time from the first to the last kernel.",
        "Of kernel time, 60.0 % is memory-bound (DRAM), 30.0 % is compute-bound (tensor pipe) and 10.0 % is in "
        "launches too short for their own overhead.",
    ]


def test_the_summary_lists_every_file(directory: Path) -> None:
    found = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    assert summary(directory)["files"] == found
    assert len(found) == 2 + report.PLOTS + 26


def test_its_shape_is_documented(directory: Path) -> None:
    documented = (Path(__file__).parent.parent / "docs" / "report.md").read_text(encoding="utf-8")
    content = summary(directory)
    assert {key for key in content if f"`{key}`" not in documented} == set()
    for key in ("totals", "recording", "sampling"):
        assert {name for name in content[key] if f"`{name}`" not in documented} == set()
    for key in ("kernels", "verdicts", "utilisation", "methods", "devices", "processes", "costs", "throttling"):
        assert {name for name in content[key][0] if f"`{name}`" not in documented} == set()
    for path in content["files"]:
        assert f"`{path}`" in documented


# --- the page ----------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(directory: Path) -> None:
    found = page(directory)
    assert not {tag for tag, _ in found.tags} & {"iframe", "object", "embed", "form", "base", "img", "image"}
    assert [attrs for tag, attrs in found.tags if tag == "script"] == [{}]
    # No bytes of L1 or L2 were counted, so the roofline by levels is left out.
    assert len(found.attribute("svg", "viewbox")) == 2 * (report.PLOTS - 1)
    hrefs = [href for tag in ("a", "link", "use") for href in found.attribute(tag, "href")]
    assert hrefs
    assert all(href.startswith(("#", "data:,")) for href in hrefs)
    html = (directory / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\((?!#)|@import", html)
    assert "default-src 'none'" in html


def test_the_policy_lets_the_one_script_run_and_no_other(directory: Path) -> None:
    html = (directory / "report.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.findall(r"script-src ([^\"]*)\"", html) == [f"'sha256-{digest}'"]


def test_every_id_is_there_once_and_every_reference_has_its_target(directory: Path) -> None:
    found = page(directory)
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    clips = [c[5:-1] for tag, attrs in found.tags for c in [attrs.get("clip-path")] if c]
    assert {href[1:] for tag in ("a", "use") for href in found.attribute(tag, "href")} | set(clips) <= set(ids)


def test_each_table_names_its_query_and_the_page_holds_the_text(directory: Path) -> None:
    found = page(directory)
    text = found.text["roofline"]
    assert "roofline_points.sql · tables/roofline.csv" in text
    assert {"#sql-roofline_points", "#sql-views-verdicts", "#sql-time_by_cause"} <= set(found.attribute("a", "href"))
    assert queries.query("roofline_points").sql in found.text["queries"]
    assert queries.view("verdicts").sql in found.text["queries"]


def test_drawings_follow_the_theme_and_name_their_kernels(directory: Path) -> None:
    html = (directory / "report.html").read_text(encoding="utf-8")
    assert "stroke: var(--ink)" in html
    assert not re.search("|".join(vars(palette.PAGE)[name] for name in ("ink", "muted", "line", "ground")), html)
    assert html.count("<title>1. void copy&lt;float, 4&gt;(float*)</title>") == 4  # bars and roofline, twice each


def test_links_lead_to_sections(directory: Path) -> None:
    found = page(directory)
    ids = {identifier for tag in ("section", "pre") for identifier in found.attribute(tag, "id")}
    assert {href.removeprefix("#") for href in found.attribute("a", "href")} <= ids


def test_the_page_answers_first(directory: Path) -> None:
    answer = page(directory).text["answer"]
    assert "A kernel was running 32.5 % of the time" in answer
    assert "copy<float, 4>: 60.0 % of kernel time, 600 ns in 3 launches; memory (DRAM): memory 90.0 % of peak" in answer
    assert "2 launches were replayed for exact counters, which took 2.00 ms" in answer


def test_the_table_of_kernels(directory: Path) -> None:
    header, first, second, third = page(directory).rows["kernels"]
    assert [heading[:7] for heading in header] == [
        "#", "Kernela", "Bound b", "Shareof", "Timelau", "Compute", "Memory%", "Occupan", "DRAMwhi",
    ]  # fmt: skip
    assert first[0] == "1"
    assert first[1] == (
        "copy<float, 4>grid 4096×1×1, block 256×1×1memory 90.0 % of peak (>= 80 %), DRAM 90.0 %; compute 10.0 %"
    )
    assert first[2:] == [
        "memoryDRAMexact, 1 launch", "60.0 %", "600 ns3 × 200 ns", "10.0 %", "90.0 %", "50.0 %", "4.50 TB/s",
    ]  # fmt: skip
    assert "cluster 2×1×1" in second[1]
    assert second[2] == "computetensor pipeexact, 1 launch"
    assert third[2:] == ["launchnot counted", "10.0 %", "100 ns1 × 100 ns", "–", "–", "–", "–"]


def test_a_dash_says_why(directory: Path) -> None:
    titles = [attrs.get("title") for tag, attrs in page(directory).tags if tag == "td"]
    assert titles.count("no launch of this kernel was counted: record with exact counters for it") == 4


def test_the_roofline_uses_each_kernel_s_own_roof(directory: Path) -> None:
    rows = page(directory).rows["roofline"][1:]
    assert [row[2:-1] for row in rows] == [
        # 1,000 FLOP and 900 kB in 200 ns: 5 GFLOP/s under 4.8 TB/s x 1000/900000 = 5.33 GFLOP/s.
        ["FP32", "0.0011", "5.00 GFLOP/s", "DRAM", "5.33 GFLOP/s", "93.8 %"],
        ["tensor FP16/BF16", "129,761", "865 TFLOP/s", "tensor FP16/BF16", "1.08 PFLOP/s", "80.0 %"],
    ]


def test_ranges_copies_and_use(directory: Path) -> None:
    found = page(directory)
    # 1,300 declared bytes over 650 ns.
    assert found.rows["ranges"][1] == ["step", "1", "2.50 µs", "4", "650 ns", "650 ns", "–", "2.00 GB/s"]
    assert found.rows["copies"][1] == ["HtoD", "pinned", "device", "1", "1.00 kB", "1.00 kB", "100 ns", "10.0 GB/s"]
    assert found.rows["utilisation"][1][1:] == ["32.5 %", "650 ns", "650 ns", "5.0 %", "1.50 GHz to 1.70 GHz"]


def test_a_whole_run_has_no_banner(directory: Path) -> None:
    assert "losses" not in page(directory).text


# --- plots and tables --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verdicts", "top_kernels", "roofline", "utilisation"])
def test_plots_are_images_with_something_on_them(directory: Path, name: str) -> None:
    image = Image.open(directory / "plots" / f"{name}.png")
    assert image.format == "PNG"
    assert 1_000 < image.width < 1_400
    assert image.height > 250
    lowest, highest = image.convert("L").getextrema()
    assert (lowest < 60, highest) == (True, 255)
    assert len(image.convert("RGB").getcolors(10**6)) > 20


def test_verdicts_as_csv(directory: Path) -> None:
    rows = table(directory, "verdicts")
    assert [row["kernel_class_id"] for row in rows] == [str(2**62 + 1), str(2**62 + 3), "5"]
    assert [row["bound"] for row in rows] == ["memory", "compute", "launch"]
    assert (rows[2]["compute_pct"], rows[2]["total_ns"]) == ("", "100")


def test_the_other_tables_as_csv(directory: Path) -> None:
    counters = {(row["kernel_class_id"], row["counter"]): row for row in table(directory, "counters")}
    assert float(counters[str(2**62 + 3), "tensor_bf16_ops"]["value"]) == 129_761_280.0
    assert table(directory, "ranges")[0]["kernel_ns"] == "650"
    assert table(directory, "copies")[0]["bytes"] == "1000"
    assert table(directory, "devices")[0]["sm_count"] == "132"
    assert table(directory, "processes")[0]["ended_ns"] == str(T0 + 10**12)
    assert table(directory, "events")[0]["message"] == "A note."
    assert table(directory, "damage") == []


# --- odd runs ----------------------------------------------------------------------------------


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device(name=HOSTILE[0], uuid=HOSTILE[1], peaks_source=HOSTILE[0])
    for i, name in enumerate(HOSTILE):
        kernel = trace.kernel_class(name, kernel_class_id=i + 1)
        trace.range(name, 1_000 * i, 1_000 * i + 900)
        trace.kernel(kernel, 1_000 * i, 900 - i)
        trace.event("loss", name, layer=name)
        trace.copy(name, 1_000 * i, 10, 10, source=name)
    trace.process_row(command=json.dumps(HOSTILE), layers=HOSTILE[0])
    trace.write()
    directory = made(trace.run_dir)
    found = page(directory)
    tags = {tag for tag, _ in found.tags}
    assert tags <= {
        "html", "head", "meta", "title", "link", "style", "body", "header", "h1", "h2", "h3", "p", "nav", "a", "main",
        "section", "ol", "ul", "li", "span", "bdi", "figure", "figcaption", "div", "table", "thead", "tbody", "tfoot",
        "tr", "th", "td", "i", "small", "strong", "code", "pre", "footer", "details", "summary", "script", "svg",
        "g", "path", "use", "text", "defs", "clippath", "rect", "pattern",
    }  # fmt: skip
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert len(found.attribute("svg", "viewbox")) == 2 * (report.PLOTS - 2)  # no counters, so no roofline
    html = (directory / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", html)
    assert "{{ 7 * 7 }}" in found.text["kernels"]
    assert len(html) < 3_000_000
    names = {row["kernel_class_id"]: row["kernel"] for row in table(directory, "verdicts")}
    assert names["1"] == HOSTILE[0]
    assert names["3"] == "'" + HOSTILE[2]
    assert names["6"] == HOSTILE[5]
    assert {row["kernel_class_id"]: row["kernel"] for row in summary(directory)["kernels"]}["5"] == HOSTILE[4]


@pytest.mark.usefixtures("without_plots")
def test_a_run_without_counters_says_what_is_missing(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device()
    trace.kernel(trace.kernel_class("long"), 0, 100_000)
    trace.write()
    found = page(made(trace.run_dir))
    assert "No counters were recorded, so what bounds most kernels is not known" in found.text["answer"]
    assert "Of kernel time, 100.0 % is undetermined." in found.text["answer"]
    assert "No kernel has operations or DRAM bytes counted" in found.text["roofline"]
    assert "No range was recorded" in found.text["ranges"]
    assert "No copy was recorded" in found.text["copies"]


def test_a_run_without_kernels(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.process_row()
    trace.write()
    directory = made(trace.run_dir)
    found, content = page(directory), summary(directory)
    assert "The recording lasted 16 min 40 s. No kernel launch was recorded." in found.text["answer"]
    assert found.attribute("svg", "viewbox") == []
    assert "No device was recorded" in found.text["devices"]
    assert (content["kernels"], content["verdicts"], content["utilisation"]) == ([], [], [])
    assert content["totals"]["kernel_ns"] is None
    assert content["first_kernel_start"] is None


@pytest.mark.usefixtures("without_plots")
def test_a_run_of_untimed_launches_has_no_shares(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.kernel(trace.kernel_class("k"))
    trace.write()
    directory = made(trace.run_dir)
    assert summary(directory)["kernels"][0]["share"] is None
    assert "1 launch has no known duration and count in no share" in page(directory).text["answer"]
    assert page(directory).rows["kernels"][1][3] == "–"


@pytest.mark.usefixtures("without_plots")
def test_losses_come_first(tmp_path: Path) -> None:
    trace = build(tmp_path / "run")
    shard = next((trace.run_dir / "kernels").rglob("*.parquet"))
    shard.write_bytes(b"damaged")
    directory = made(trace.run_dir)
    found, content = page(directory), summary(directory)
    assert "2 things are missing from this run." in found.text["losses"]
    assert "does not match the hash in its name" in found.text["losses"]
    assert "Launches that the process wrote are not in the run directory. (count: 6)" in found.text["losses"]
    assert "1 file or folder is missing or damaged" in found.text["answer"]
    assert content["recording"]["damage"] == 1
    assert len(content["losses"]) == content["recording"]["losses"] == 2
    assert table(directory, "damage")[0]["path"].startswith("kernels/")


@pytest.mark.usefixtures("without_plots")
def test_a_process_that_was_cut_off_is_flagged(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.kernel(trace.kernel_class("k"), 0, 100)
    trace.write(end=False)
    directory = made(trace.run_dir)
    found, content = page(directory), summary(directory)
    assert found.rows["processes"][1][3] == "cut off, or still running"
    assert content["processes"][0]["cut_off"] is True
    assert content["totals"]["recorded_ns"] is None
    assert content["headline"][0].startswith("GPU work spans 100 ns: 1 kernel launch of 1 kind")
    assert f"{PROCESS}: Did not end" in found.text["losses"]


@pytest.mark.usefixtures("without_plots")
def test_above_a_peak_is_flagged_and_never_plain(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device()
    kernel = trace.kernel_class("wrong")
    trace.kernel(kernel, 0, 200)
    trace.measure(kernel, [{**COPY, "memory_pct": 130.0, "dram_pct": 130.0, "dram_read_bytes": 5e6}])
    trace.write()
    directory = made(trace.run_dir)
    row = page(directory).rows["kernels"][1]
    assert row[6] == "130.0 %†"
    assert summary(directory)["kernels"][0]["over_peak"] is True
    html = (directory / "report.html").read_text(encoding="utf-8").replace("\u202f", " ")
    assert '<span class="over">130.0 %†</span>' in html


def test_two_devices_and_a_shared_one(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device()
    trace.device(OTHER)
    trace.device(OTHER, device_id=1, uuid="GPU-1")
    for process in (PROCESS, OTHER):
        trace.kernel(trace.kernel_class("k", process=process), 0, 100, process=process)
    trace.kernel(trace.kernel_class("k", process=OTHER), 100, 100, process=OTHER, device_id=1)
    trace.write()
    directory = made(trace.run_dir)
    content = summary(directory)
    assert [(row["label"], row["busy_share"]) for row in content["utilisation"]] == [
        ("GPU 0: NVIDIA H200 (2 processes)", 0.5),
        (f"GPU 1: NVIDIA H200 ({OTHER})", 0.5),
    ]
    assert content["devices"][0]["processes"] == [PROCESS, OTHER]
    assert "mean of 2 GPUs (50.0 % to 50.0 %)" in content["headline"][1]
    assert page(directory).rows["devices"][1][0] == "2 × NVIDIA H200"


@pytest.mark.usefixtures("without_plots")
def test_many_kernels_are_limited_and_the_rest_summed(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    for i in range(200):
        trace.kernel(trace.kernel_class(f"kernel<{i}>"), 1_000 * i, 100)
    trace.write()
    directory = made(trace.run_dir)
    rows = page(directory).rows["kernels"]
    assert len(rows) == 1 + 50 + 1
    assert rows[-1][1].startswith("150 further kernels: 75.0 % of kernel time, 15.0 µs in 150 launches.")
    assert len(summary(directory)["kernels"]) == 50
    assert summary(directory)["other_kernels"] == {
        "kernel_classes": 150,
        "launches": 150,
        "total_ns": 15_000,
        "share": pytest.approx(0.75),
    }
    assert len(table(directory, "verdicts")) == 200


@pytest.mark.usefixtures("without_plots")
def test_graphs_measured_whole_are_shown_apart(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.kernel(trace.kernel_class("k"), 0, 100, graph_id=7)
    trace.exact(
        {"gpu__time_duration.sum": 5_000.0, "sm__throughput.avg.pct_of_peak_sustained_elapsed": 33.0},
        scope="graph", graph_id=7, correlation_id=9,
    )  # fmt: skip
    trace.write()
    rows = page(made(trace.run_dir)).rows["kernels"]
    assert rows[-1] == [f"graph 7 in {PROCESS}", "1", "5.00 µs", "33.0 %", "–", "–"]


def test_the_same_run_gives_the_same_report(tmp_path: Path) -> None:
    run_dir = build(tmp_path / "run").run_dir
    first = {p.name: p.read_bytes() for p in made(run_dir).rglob("*") if p.is_file()}
    second = {p.name: p.read_bytes() for p in made(run_dir).rglob("*") if p.is_file()}
    assert first == second


def test_the_user_s_matplotlibrc_changes_nothing(tmp_path: Path, directory: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"axes.linewidth": 9, "xtick.major.size": 30, "text.parse_math": True}):
        other = made(build(tmp_path / "run").run_dir)
    for name in ("verdicts", "top_kernels"):
        assert (other / "plots" / f"{name}.png").read_bytes() == (directory / "plots" / f"{name}.png").read_bytes()


@pytest.mark.usefixtures("without_plots")
def test_steps_are_as_many_as_announced(tmp_path: Path) -> None:
    seen: list[str] = []
    made(build(tmp_path / "run").run_dir, step=seen.append)
    assert len(seen) == len(set(seen)) == report.STEPS


# --- the command -------------------------------------------------------------------------------


def nanalyze(*arguments: object) -> Result:
    return CliRunner().invoke(commands.main, [str(argument) for argument in arguments])


@pytest.mark.usefixtures("without_plots")
def test_the_command_says_where_the_report_is_and_what_is_next(tmp_path: Path) -> None:
    run_dir = build(tmp_path / "a run").run_dir
    result = nanalyze("report", run_dir)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == [
        f"Report: {run_dir}/report/report.html",
        f"Ask more: nanalyze sql '{run_dir}' \"SELECT kernel, share, bound, reason FROM verdicts\"",
    ]
    assert "Reporting" not in result.output  # no progress bar where there is no terminal
    assert nanalyze("report", run_dir).exit_code == 0  # refreshed without --force


@pytest.mark.usefixtures("without_plots")
def test_the_command_refuses_what_is_in_the_way(tmp_path: Path) -> None:
    run_dir = build(tmp_path / "run").run_dir
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    result = nanalyze("report", run_dir, "-o", tmp_path / "mine")
    assert result.exit_code == 1
    assert result.output == (
        f"nanalyze: error: {tmp_path}/mine: holds something else than a report of nanalyze. "
        "Choose another place with -o, or pass --force to write into it.\n"
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert nanalyze("report", run_dir, "-o", tmp_path / "mine", "--force").exit_code == 0
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_read_only_run_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = build(tmp_path / "run").run_dir

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = nanalyze("report", run_dir)
    assert result.exit_code == 1
    assert result.output == (
        f"nanalyze: error: {run_dir}/report: cannot write the report there: Permission denied. "
        "Name a directory you can write to with -o.\n"
    )


@pytest.mark.usefixtures("without_plots")
def test_a_full_disk_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = build(tmp_path / "run").run_dir

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = nanalyze("report", run_dir)
    assert result.exit_code == 1
    assert "report: cannot write the report there: No space left on device. Name a directory" in result.output
    assert not [path for path in run_dir.iterdir() if "report" in path.name]


def test_help_has_an_example() -> None:
    assert "nanalyze report run_dir -o ~/reports/tuesday" in nanalyze("report", "--help").output
    assert io.StringIO(nanalyze("report", "--help").output).readline().startswith("Usage: ")
