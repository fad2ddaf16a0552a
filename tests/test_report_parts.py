"""The report's parts on their own: names, numbers, plots, and the directory it is written into."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from nanalyze.analysis.report import figures, kernels, names, output, palette, roofline_plot, values

FUNCTOR = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::CUDAFunctor_add<float> >"
    "(at::TensorIteratorBase&, at::native::CUDAFunctor_add<float> const&)::{lambda(int)#1}>(int, at::native::foo)"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton_poi_fused_gelu_0", "triton_poi_fused_gelu_0"),
        ("void foo<4, ns::Bar<float> >(int, float)", "foo<4, Bar<float>>"),
        (FUNCTOR, "elementwise_kernel<128, 4, gpu_kernel_impl<CUDAFunctor_add<float>>>"),
        ("void at::native::(anonymous namespace)::softmax<float>(float*)", "softmax<float>"),
        ("x\ny\x1b[31m\u202e", "x\\ny\\x1b[31m\\u202e"),
        ("$x^2$", "$x^2$"),
        ("<<<<", "<<<<"),
        ("", "[no name]"),
        (" \n", "[no name]"),
    ],
)
def test_names_are_folded(name: str, expected: str) -> None:
    assert names.shorten(name, 80) == expected


def test_deep_template_arguments_go_before_shallow_ones() -> None:
    assert names.shorten(FUNCTOR, 60) == ("elementwise_kernel<128, 4, gpu_kernel_impl<…>>")
    assert names.shorten(FUNCTOR, 30) == "elementwise_kernel<128, 4, …>"
    assert names.shorten(FUNCTOR, 22) == "elementwise_kernel<…>"


@pytest.mark.parametrize("name", ["a" * 10_000, "f<" * 5_000, "(" * 5_000, "n::" * 4_000, "\u202e" * 3_000, "😀" * 99])
def test_no_name_is_longer_than_asked(name: str) -> None:
    assert 0 < len(names.shorten(name, 64)) <= 64


def test_lone_surrogates_become_escapes() -> None:
    assert names.visible("run\udcff") == "run\\udcff"


def test_plots_get_ascii() -> None:
    assert names.ascii_only("gelu 😀…\n") == "gelu \\U0001f600...\\n"


def test_equal_labels_are_told_apart_by_their_shape() -> None:
    assert names.distinct(["a", "b", "a"], ["1x1", "2x1", "3x1"]) == ["a 1x1", "b", "a 3x1"]


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (0, "0.00 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (12_345, "12.3 µs"),
        (999_990, "1.00 ms"),
        (1_500_000_000, "1.50 s"),
        (119_000_000_000, "119 s"),
        (185_000_000_000, "3 min 5 s"),
        (7_500_000_000_000, "2 h 5 min"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_durations_have_the_unit_that_fits(ns: float | None, expected: str) -> None:
    assert values.duration(ns).replace(values.THIN, " ") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0.0 %"),
        (0.01, "< 0.1 %"),
        (99.96, "100.0 %"),
        (100.0, "100.0 %"),
        (100.01, "100.1 %†"),
        (250.0, "250.0 %†"),
        (math.nan, "–"),
        (math.inf, "–"),
        (pd.NA, "–"),
    ],
)
def test_percentages_above_a_peak_are_marked(value: float, expected: str) -> None:
    assert values.percent(value).replace(values.THIN, " ") == expected


def test_scaled_numbers() -> None:
    assert values.scaled(3.35e12, "B/s").replace(values.THIN, " ") == "3.35 TB/s"
    assert values.scaled(0, "B").replace(values.THIN, " ") == "0.00 B"


def test_integers_of_63_bits_stay_exact() -> None:
    assert values.integer(np.int64(2**62 + 1)) == 2**62 + 1
    assert values.iso(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123456789Z"


def test_ratio_refuses_to_divide_by_nothing() -> None:
    assert values.ratio(1, 0) is None
    assert values.ratio(1, math.nan) is None
    assert values.ratio(1, 4) == 0.25


def test_bars_of_kernels_that_look_alike_name_their_shapes() -> None:
    row = {"kernel": "void f<4>(int)", "share": 0.5, "bound": "memory", "total_ns": 1_000, "launches": 2}
    rows = [{**row, "kernel_class_id": 1}, {**row, "kernel_class_id": 2}, {**row, "share": None, "kernel_class_id": 3}]
    first, second = kernels.kernel_bars(rows, {1: "grid 1×1×1", 2: "grid 2×1×1"})
    assert (names.ascii_only(first.label), first.short) == ("1. f<4> [grid 1x1x1]", "1. f<4>")
    assert names.ascii_only(second.label) == "2. f<4> [grid 2x1x1]"
    assert first.remark.replace(values.THIN, " ") == "1.00 µs in 2 launches"


# plots

BARS = [figures.Bar("1. $x^2$ <b> \\frac{", 0.6, "memory", "1 s"), figures.Bar("2. tiny", 0.4, "compute")]
LINE = roofline_plot.Roofline(
    "GPU",
    4e12,
    (roofline_plot.Roof("fp32", 60e12), roofline_plot.Roof("fp64", 30e12)),
    (
        roofline_plot.Point(1, 1.0, 2e12, 0.5, "memory", "fp32", False),
        roofline_plot.Point(2, 1.0, 8e12, 0.1, "compute", "fp64", True),
    ),
)
TIMELINE = figures.Timeline("GPU 0", [0.0, 1.0, 2.0], [1.0, 0.5], [0.0, 0.25], [0.5, 1.5], [1.9e9, 1.8e9])


def _pixels(png: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"), dtype=float)


def _shows(png: bytes, colour: str) -> int:
    """How many pixels have exactly this colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=float)
    return int((np.abs(_pixels(png) - wanted).max(axis=2) == 0).sum())


def test_bars_are_as_long_as_their_shares() -> None:
    png = figures.render(lambda look: figures.ranked(BARS, look), figures.Look())
    blue, red = _shows(png, palette.BLUE), _shows(png, palette.VERMILLION)
    # The legend's two patches are equal and small beside the bars, so the areas go as 6 to 4.
    assert blue / red == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK])
def test_every_plot_in_every_look(theme: palette.Theme, narrow: bool) -> None:
    look = figures.Look(theme, narrow)
    for draw in (
        lambda k: figures.bars(BARS, k),
        lambda k: roofline_plot.roofline([LINE], k),
        lambda k: figures.utilisation([TIMELINE], k),
    ):
        pixels = _pixels(figures.render(draw, look))
        assert pixels.shape[1] == pytest.approx(look.width * figures.DPI, abs=1)
        assert pixels.std() > 10
        corner = [int(theme.ground[i : i + 2], 16) for i in (1, 3, 5)]
        assert pixels[0, 0].tolist() == corner


def test_a_point_above_its_roof_is_ringed() -> None:
    plain = roofline_plot.Roofline(LINE.device, LINE.bytes_per_s, LINE.roofs, LINE.points[:1])
    with_ring = figures.render(lambda look: roofline_plot.roofline([LINE], look), figures.Look())
    without = figures.render(lambda look: roofline_plot.roofline([plain], look), figures.Look())
    assert _shows(without, palette.VERMILLION) == 0
    assert _shows(with_ring, palette.VERMILLION) > 100


def test_the_same_data_gives_the_same_bytes() -> None:
    assert (
        len({figures.render(lambda look: roofline_plot.roofline([LINE], look), figures.Look()) for _ in range(2)}) == 1
    )


@pytest.mark.parametrize("draw", [figures.bars, figures.ranked, roofline_plot.roofline, figures.utilisation])
def test_a_plot_of_nothing_says_so(draw: object) -> None:
    pixels = _pixels(figures.render(lambda look: draw([], look), figures.Look()))  # type: ignore[operator]
    assert pixels.shape[0] == figures.DPI
    assert pixels.std() > 5


def test_equal_roofs_share_a_line() -> None:
    merged = roofline_plot._merged(
        [roofline_plot.Roof("fp64", 30e12), roofline_plot.Roof("fp32", 60e12), roofline_plot.Roof("int", 60.5e12)]
    )
    assert [roof.label for roof in merged] == ["int, fp32", "fp64"]


# the directory


def _summary(folder: Path, run_id: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"summary_version": 1, "run": {"run_id": run_id}}))


def _check(target: Path, force: bool = False) -> None:
    output.check_target(target, Path("/nowhere/run"), "abc", force)


def test_a_new_an_empty_and_an_own_directory_are_accepted(tmp_path: Path) -> None:
    _check(tmp_path / "new")
    _check(tmp_path)
    _summary(tmp_path / "own", "abc")
    _check(tmp_path / "own")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"summary_version": 1}', '{"run": {"run_id": "abc"}}', "\xff"])
def test_a_foreign_directory_is_refused_without_force(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content, encoding="latin-1")
    with pytest.raises(output.ReportError, match=r"holds something else than a report of nanalyze.*--force"):
        _check(tmp_path)
    _check(tmp_path, force=True)


def test_the_report_of_another_run_is_refused(tmp_path: Path) -> None:
    _summary(tmp_path / "other", "xyz")
    with pytest.raises(output.ReportError, match=r"other: holds the report of another run \(xyz\).*--force"):
        _check(tmp_path / "other")


def test_a_file_and_the_run_itself_are_refused_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(output.ReportError, match="file: is a file, not a directory"):
        _check(tmp_path / "file", force=True)
    with pytest.raises(output.ReportError, match="is the run directory itself"):
        output.check_target(tmp_path / "x" / "..", tmp_path, "abc", True)


def test_a_failed_write_leaves_the_old_report(tmp_path: Path) -> None:
    target = tmp_path / "report"
    _summary(target, "abc")

    def fail() -> None:
        with output.writing(target) as draft:
            (draft / "summary.json").write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(output.ReportError, match=r"report: cannot write the report there: No space left.*-o"):
        fail()
    assert json.loads((target / "summary.json").read_text())["run"]["run_id"] == "abc"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_refresh_keeps_files_that_are_not_the_report_s(tmp_path: Path) -> None:
    target = tmp_path / "report"
    _summary(target, "abc")
    (target / "notes.txt").write_text("mine")
    with output.writing(target) as draft:
        (draft / "plots").mkdir()
        (draft / "plots" / "a.png").write_bytes(b"x")
        (draft / "summary.json").write_text("new")
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()) == [
        "notes.txt",
        "plots/a.png",
        "summary.json",
    ]
    assert (target / "summary.json").read_text() == "new"


def test_an_unwritable_place_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(output.ReportError, match=r"cannot write the report there.*Name a directory.*-o"),
        output.writing(tmp_path / "file" / "report"),
    ):
        raise AssertionError("must not be reached")
