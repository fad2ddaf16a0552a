"""Time of each term in each sample, against what a few lines of Python make of random launches and samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from trace import PROCESS, T0, Trace

import numpy as np
import pytest

import nanalyze.analysis as na
from nanalyze.analysis import attribution_design as design
from nanalyze.analysis import launch_reader
from nanalyze.analysis.launch_reader import Columns

TERMS = 4
Interval = tuple[int, int]


def made(seed: int) -> tuple[list[tuple[int, int, int]], list[Interval]]:
    """(start, end, term) of launches by start, some very long; samples by start, with holes, some that overlap."""
    chance = random.Random(seed)
    launches = []
    for _ in range(400):
        start = chance.randrange(100_000)
        length = chance.choice([1, 40, 300, chance.randrange(1, 5_000), 60_000])
        launches.append((start, start + (length if chance.random() < 0.2 else 30), chance.randrange(1, TERMS)))
    samples, at = [], 0
    while at < 90_000:
        length = chance.choice([100, 100, 700])
        if chance.random() < 0.9:
            samples.append((at, at + length))
        at += length if seed % 2 or chance.random() < 0.8 else length // 2
    return sorted(launches), sorted(samples)


def naive(launches: list[tuple[int, int, int]], sample: Interval) -> list[float]:
    """Milliseconds of each term in the sample, idle first."""
    first, last = sample
    inside = [(max(a, first), min(b, last), term) for a, b, term in launches if a < last and b > first]
    ran = [0.0] * TERMS
    for start, end, term in inside:
        ran[term] += end - start
    busy, until = 0, first
    for start, end, _ in sorted(inside):
        busy += max(end - max(start, until), 0)
        until = max(until, end)
    ran[0] = last - first - busy
    return [value / 1e6 for value in ran]


def handed(launches: list[tuple[int, int, int]], size: int) -> Iterator[Columns]:
    rows = np.array(launches, np.int64)
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        yield {"start_ns": part[:, 0], "end_ns": part[:, 1], "term": part[:, 2]}


@pytest.mark.parametrize("seed", range(6))
def test_the_time_of_each_term_in_each_sample(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, samples = made(seed)
    monkeypatch.setattr(design, "ROWS_AT_ONCE", 17)
    monkeypatch.setattr(design, "ENTRIES_AT_ONCE", 50)
    starts, ends = np.array(samples, np.int64).T
    given = design.Samples(np.arange(len(samples)), starts, ends)
    found = list(design.designs(given, handed(launches, 31), design.Layout(TERMS)))
    assert [part.which.start for part in found[1:]] == [part.which.stop for part in found[:-1]]
    matrix = np.concatenate([part.matrix for part in found])
    assert matrix.shape == (len(samples), TERMS)
    assert (matrix == np.concatenate([part.time_ms for part in found])).all()
    expected = np.array([naive(launches, sample) for sample in samples])
    expected[:, 0] = np.where(expected[:, 0] > 1e-6, expected[:, 0], 0)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)


def test_samples_without_any_launch_are_idle() -> None:
    samples = design.Samples(np.arange(2), np.array([0, 10]), np.array([10, 30]))
    (part,) = design.designs(samples, iter(()), design.Layout(TERMS))
    assert (part.which.start, part.which.stop) == (0, 2)
    assert part.matrix.tolist() == part.time_ms.tolist() == [[1e-5, 0, 0, 0], [2e-5, 0, 0, 0]]


def laid_out(layout: design.Layout, launches: list[tuple[int, int, int]], samples: list[Interval]) -> design.Design:
    start, end = np.array(samples, np.int64).T
    parts = list(design.designs(design.Samples(np.arange(len(start)), start, end), handed(launches, 100), layout))
    matrix, time_ms = (np.concatenate([getattr(part, name) for part in parts]) for name in ("matrix", "time_ms"))
    return design.Design(slice(0, len(start)), matrix, time_ms)


def test_profiles_are_the_integrals_of_legendre_polynomials_over_what_is_cut() -> None:
    owner, degree = np.array([[1, 1], [1, 2], [1, 3], [3, 1], [3, 2]]).T
    layout = design.Layout(4, owner, degree)
    assert layout.columns == 9
    assert [layout.column(n).tolist() for n in (1, 2, 3)] == [[-1, 0, -1, 3], [-1, 1, -1, 4], [-1, 2, -1, -1]]
    # Term 1 runs from 40 to 140, 2 from 150 to 260, 3 from 270 to 280: samples of 100 ns with a hole at the end.
    launches = [(40, 140, 1), (150, 260, 2), (270, 280, 3)]
    matrix = laid_out(layout, launches, [(0, 100), (100, 200), (200, 275)]).matrix

    def integral(degree: int, first: float, last: float) -> float:
        whole = np.polynomial.Legendre.basis(degree, domain=[0, 1]).integ()
        return float(np.sqrt(2 * degree + 1) * (whole(last) - whole(first)))

    expected = np.zeros((3, 5))
    expected[0, :3] = [100e-6 * integral(degree, 0, 0.6) for degree in (1, 2, 3)]
    expected[1, :3] = [100e-6 * integral(degree, 0.6, 1) for degree in (1, 2, 3)]
    expected[2, 3:] = [10e-6 * integral(degree, 0, 0.5) for degree in (1, 2)]
    np.testing.assert_allclose(matrix[:, 4:], expected, atol=1e-15)
    np.testing.assert_allclose(matrix[:, 4:7].sum(axis=0), 0, atol=1e-15)  # a whole launch has its mean rate


def test_a_launch_counts_as_the_mean_of_its_term_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(design, "AFTER_NS", 0)
    layout = design.Layout(3, np.array([1]), np.array([design.PACE]), np.array([0.0, 100.0, 0.0]))
    # Launches of term 1 of 50, 150 and 200 ns; a copy, term 2, counts by its time.
    launches = [(0, 50, 1), (60, 90, 2), (100, 250, 1), (250, 450, 1)]
    part = laid_out(layout, launches, [(0, 100), (100, 200), (200, 400), (400, 500)])
    np.testing.assert_allclose(part.time_ms[:, 1] * 1e6, [50, 100, 50 + 150, 50])
    np.testing.assert_allclose(part.matrix[:, 1] * 1e6, [100, 100 * 2 / 3, 100 / 3 + 75, 25])
    np.testing.assert_allclose(part.matrix[:, 3], part.time_ms[:, 1] - part.matrix[:, 1])
    np.testing.assert_allclose(part.matrix[:, 2] * 1e6, [30, 0, 0, 0])
    np.testing.assert_allclose(part.matrix[:, 0], part.time_ms[:, 0])


def test_what_a_launch_counts_ends_before_its_recorded_end() -> None:
    layout = design.Layout(2, np.array([1]), np.array([1]), np.array([0.0, 10_000.0]))
    # 10 us, of which the last 1 us counts nothing; 1 us, of which it is 0.3 us: both count as the mean, 10 us.
    part = laid_out(layout, [(0, 10_000, 1), (20_000, 21_000, 1)], [(0, 4_500), (4_500, 9_000), (9_000, 30_000)])
    np.testing.assert_allclose(part.time_ms[:, 1] * 1e3, [5, 5, 1])
    np.testing.assert_allclose(part.matrix[:, 1] * 1e3, [5, 5, 10])
    half = 10e-3 * np.sqrt(3) * (0.5**2 - 0.5)
    np.testing.assert_allclose(part.matrix[:, 2], [half, -half, 0], atol=1e-15)


def test_a_launch_has_the_term_of_its_class_and_mode() -> None:
    # Class 5 has modes from bins 10 and 300, class 9 one: terms 1, 2 and 3; all else is 4.
    terms = design.Terms(
        np.array([5, 9]), np.array([1, 3]), np.array([2, 3]), np.array([10, 300, 50]), 0.02, 4, {"HtoD": 5}
    )
    durations = np.exp(0.02 * np.array([10.5, 299.5, 300.5, 999.5, 0.5, 5.5, 700.5, 1.5]))
    classes = np.array([5, 5, 5, 5, 5, 9, 9, 7])
    assert terms.of(classes, durations).tolist() == [1, 1, 2, 2, 1, 3, 3, 4]


def test_launches_in_no_order_are_sorted_by_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(tmp_path)
    kernel, other = trace.kernel_class("a"), trace.kernel_class("b")
    for at in (70, 10, 50, 20, 90, 60):
        trace.kernel(kernel if at < 60 else other, at, 5)
    trace.kernel(kernel, 30, 5, device_id=1)
    trace.kernel(kernel, 35, 0)
    trace.copy("HtoD", 40, 7, 100)
    trace.copy("DtoH", 45, 7, 100)
    trace.write(shards=3)
    ids = np.array(sorted([kernel, other]))
    first = 1 + np.arange(2)
    terms = design.Terms(ids, first, first, np.zeros(2, np.int64), 0.02, 9, {"HtoD": 3})
    place = {int(class_id): number for number, class_id in enumerate(ids, 1)}
    expected = sorted(
        [(T0 + at, T0 + at + 5, place[kernel if at < 60 else other]) for at in (70, 10, 50, 20, 90, 60)]
        + [(T0 + 40, T0 + 47, 3)]
    )
    monkeypatch.setattr(launch_reader, "ROWS_AT_ONCE", 1)
    for most in (8, 3):  # from the shards, and sorted
        monkeypatch.setattr(launch_reader, "MOST_PENDING", most)
        with na.open(tmp_path) as run:
            run._views.make(run._connection)
            given = (run._connection.cursor(), [(PROCESS, 0)], run._catalog.shards, terms)
            found = [rows for chunk in design.in_order(*given) for rows in zip(*chunk.values(), strict=True)]
        assert [tuple(map(int, row)) for row in found] == expected
