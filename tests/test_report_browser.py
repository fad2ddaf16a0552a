"""The page in a real browser: what it asks for, how it lays out, sorts, searches, prints, and looks in the dark.

Needs playwright and a Chromium (`NANALYZE_BROWSER`, else the system's); skipped where either is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from trace import Trace
from typing import Any

import pytest

import nanalyze.analysis as na
from nanalyze.analysis import report

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")

KERNELS, HOSTILE_AT = 40, 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
HOSTILE = "<img src=http://evil.example/x onerror=alert(1)>\u202e" + "W" * 300
LEAST_CONTRAST = 4.5  # WCAG 2.2, AA for text


def executable() -> str | None:
    return os.environ.get("NANALYZE_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = executable()
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is here, and NANALYZE_BROWSER names none")
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs a kernel feature that containers often lack; the page is our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def build(run_dir: Path, slower: int = 1) -> Path:
    """40 kernels of 1 us to 40 ms, half of them with counters of every level, and calibrated."""
    trace = Trace(run_dir)
    trace.device()
    at = 0
    for place in range(KERNELS):
        name = (
            HOSTILE
            if place == HOSTILE_AT
            else f"void space::kernel_{place}<{', '.join(['float'] * 12)}>(Argument{place}*)"
        )
        duration = slower * round(1_000 * 1.3123**place)
        kernel = trace.kernel_class(name, (132 * (place + 1), 1, 1), (256, 1, 1))
        trace.kernel(kernel, at, duration)
        at += duration + 500
        if place % 2:
            trace.measure(kernel, [counters(place, float(duration))])
    for name, unit, per_s in (("fp32", "FLOP/s", 6e13), ("dram_read", "bytes/s", 4.6e12), ("l2_read", "bytes/s", 9e12),
                              ("l1_read", "bytes/s", 3e13)):  # fmt: skip
        trace.add(
            "ceilings", device_id=0, ceiling=name, method="test", unit=unit, per_s=per_s, low_per_s=per_s,
            high_per_s=per_s, repetitions=9, is_partial=False, sm_clock_hz=1_900_000_000, measured_ns=1,
        )  # fmt: skip
    trace.range("step", 0, at)
    trace.copy("HtoD", 300, 100, 1_000, source="pinned", destination="device")
    trace.state(10, sm_clock_hz=1_500_000_000)
    trace.write()
    return run_dir


def counters(place: int, duration_ns: float) -> dict[str, float]:
    moved = 1_000.0 * duration_ns
    return {
        "duration_ns": duration_ns, "sm_clock_hz": 2e9, "compute_pct": 2.0 * place, "memory_pct": 90.0,
        "dram_pct": 90.0, "occupancy_pct": 50.0, "dram_read_bytes": moved, "dram_write_bytes": 0.0,
        "l2_bytes": 2 * moved,
        "l1_bytes": 5 * moved, "thread_inst_fadd": 0.0, "thread_inst_fmul": 0.0, "thread_inst_ffma": place * moved,
    }  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with na.open(build(tmp_path_factory.mktemp("browser") / "run")) as run:
        return report.write(run).page


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    build(folder / "before")
    build(folder / "after", slower=2)
    with na.open(folder / "before") as before, na.open(folder / "after") as after:
        return report.write([before, after], folder / "both").page


class Opened:
    """A page, and what happened while it was open."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light", **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.resolve().as_uri()
        self.page.goto(self.url)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()

    def column(self, section: str, place: int) -> list[str]:
        """What stands in the first line of a column's cells, of the rows that are shown."""
        found: list[str] = self.page.eval_on_selector_all(
            f"#{section} table.data >> nth=0",
            "(tables, place) => Array.from(tables[0].tBodies[0].rows).filter(row => !row.hidden)"
            ".map(row => row.cells[place].firstChild.textContent.trim())",
            place,
        )
        return found


@pytest.mark.parametrize(
    ("which", "width", "scheme"),
    [("written", 360, "light"), ("written", 1280, "dark"), ("several", 360, "dark"), ("several", 1280, "light")],
)
def test_it_asks_for_nothing_complains_of_nothing_and_fits_the_screen(
    browser: Any, which: str, width: int, scheme: str, request: pytest.FixtureRequest
) -> None:
    with Opened(browser, request.getfixturevalue(which), width, scheme) as opened:
        page = opened.page
        assert opened.messages == []
        assert [url for url in opened.requests if not url.startswith("data:")] == [opened.url]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shown = page.locator("figure .narrow svg" if width == 360 else "figure .wide svg")
        hidden = page.locator("figure .wide svg" if width == 360 else "figure .narrow svg")
        assert shown.count() == hidden.count() > 4
        assert shown.first.is_visible()
        assert not hidden.first.is_visible()
        # Only what scrolls by itself may be wider than the screen.
        wide = page.evaluate(
            "Array.from(document.querySelectorAll('body *')).filter(e => !e.closest('.scroll, pre, svg') && "
            "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className)"
        )
        assert wide == []


def test_it_opens_within_a_second(browser: Any, written: Path) -> None:
    times = []
    for _ in range(3):
        with Opened(browser, written) as opened:
            times.append(opened.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert 0 < min(times) < 1_000  # ms; the smallest, as other work on the machine only ever adds


def test_a_column_of_times_sorts_by_length_and_back(browser: Any, written: Path) -> None:
    with Opened(browser, written) as opened:
        before = opened.column("kernels", 4)
        assert before[0].endswith("ms")
        button = opened.page.locator("#kernels table.data >> nth=0").locator("th button").nth(4)
        head = opened.page.locator("#kernels table.data >> nth=0").locator("th").nth(4)
        button.click()
        assert head.get_attribute("aria-sort") == "descending"
        assert opened.column("kernels", 4) == before
        button.click()
        assert head.get_attribute("aria-sort") == "ascending"
        after = opened.column("kernels", 4)
        assert after == before[::-1]
        assert {time.split("\u202f")[1] for time in after} == {"µs", "ms"}  # so that units are told apart
        button.click()
        assert head.get_attribute("aria-sort") is None
        assert opened.column("kernels", 4) == before


def test_missing_values_stay_last_and_words_sort_by_the_alphabet(browser: Any, written: Path) -> None:
    with Opened(browser, written) as opened:
        table = opened.page.locator("#kernels table.data >> nth=0")
        for expected in ("descending", "ascending"):
            table.locator("th button").nth(5).click()
            assert table.locator("th").nth(5).get_attribute("aria-sort") == expected
            found = opened.column("kernels", 5)
            assert found.index("–") == KERNELS // 2
            assert set(found[KERNELS // 2 :]) == {"–"}
            numbers = [float(text.split("\u202f")[0]) for text in found[: KERNELS // 2]]
            assert numbers == sorted(numbers, reverse=expected == "descending")
        table.locator("th button").nth(1).press("Enter")
        names = opened.column("kernels", 1)
        numbered = [int(name.partition("<")[0].removeprefix("kernel_")) for name in names if name.startswith("kernel_")]
        assert numbered == [place for place in range(KERNELS) if place != HOSTILE_AT]  # 2 before 10
        assert table.locator("th").nth(1).get_attribute("aria-sort") == "ascending"


def test_the_search_finds_full_names_and_counts(browser: Any, written: Path) -> None:
    with Opened(browser, written) as opened:
        field = opened.page.locator("#kernels input[type=search]")
        field.fill("argument17*")  # only in the full name, which is a tooltip
        assert opened.page.locator("#kernels [role=status]").inner_text() == f"1 of {KERNELS}"
        (name,) = opened.column("kernels", 1)
        assert name.startswith("kernel_17<")
        field.fill("no such kernel")
        assert opened.column("kernels", 1) == []
        field.fill("")
        assert len(opened.column("kernels", 1)) == KERNELS


def test_a_link_to_a_query_opens_it(browser: Any, written: Path) -> None:
    with Opened(browser, written) as opened:
        text = opened.page.locator("#sql-roofline_points")
        assert not text.is_visible()
        opened.page.locator("#roofline .sources a").first.click()
        text.wait_for(state="visible")
        assert text.inner_text().startswith("-- roofline_points: where does each measured kernel stand")


def test_kernels_in_drawings_tell_their_full_name(browser: Any, written: Path) -> None:
    with Opened(browser, written) as opened:
        titles = opened.page.eval_on_selector_all(
            "#kernels figure .wide title", "found => found.map(title => title.textContent)"
        )
        assert len(titles) == 15
        assert titles[0].startswith(f"1. void space::kernel_{KERNELS - 1}<float, float")


CONTRASTS = """
() => {
  const parse = text => { const c = text.match(/[\\d.]+/g).map(Number); return c.length > 3 && c[3] === 0 ? null : c; };
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found) { return found; }
    }
    return [255, 255, 255];
  };
  const worst = {};
  const texts = "p, a, h1, h2, h3, td, th, small, li, figcaption, code, pre, summary, span, text";
  for (const node of document.querySelectorAll(texts)) {
    if (!node.textContent.trim() || !node.getClientRects().length) { continue; }
    const style = getComputedStyle(node);
    const ink = parse(node.tagName === "text" ? style.fill : style.color);
    const a = light(ink), b = light(ground(node));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    worst[node.tagName] = Math.min(worst[node.tagName] || 99, ratio);
  }
  return worst;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Any, written: Path, scheme: str) -> None:
    with Opened(browser, written, scheme=scheme) as opened:
        worst = opened.page.evaluate(CONTRASTS)
        ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 27, 34)"}[scheme]
    assert {"P", "TD", "TH", "A", "text", "FIGCAPTION"} <= set(worst)
    assert {tag: ratio for tag, ratio in worst.items() if ratio < LEAST_CONTRAST} == {}


def test_on_paper_there_is_what_paper_can_show(browser: Any, written: Path) -> None:
    with Opened(browser, written, scheme="dark") as opened:
        page = opened.page
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        for gone in ("nav", ".search", "#queries"):
            assert not page.locator(gone).first.is_visible()
        for there in ("#answer", "figure .wide svg", "#kernels table"):
            assert page.locator(there).first.is_visible()
        printed = page.pdf(format="A4")
        assert printed.startswith(b"%PDF")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_without_scripts_everything_is_there_as_text(browser: Any, written: Path) -> None:
    with Opened(browser, written, java_script_enabled=False) as opened:
        assert opened.page.locator("input").count() == opened.page.locator("button").count() == 0
        assert opened.page.locator("#kernels tbody tr").count() >= KERNELS
        opened.page.locator("#queries summary").first.click()
        assert opened.page.locator("#queries pre").first.is_visible()


def test_runs_stand_side_by_side_with_the_speedup(browser: Any, several: Path) -> None:
    with Opened(browser, several) as opened:
        assert opened.column("side-by-side", 0) == ["before", "after"]
        kernels = opened.page.locator("#kernels-across tbody tr")
        assert kernels.first.locator("td").last.inner_text() == "+100.0\u202f%"
        assert opened.page.locator("article").count() == 2
        opened.page.locator("#run2-run nav a", has_text="Roofline").click()
        assert opened.url + "#run2-roofline" == opened.page.url
