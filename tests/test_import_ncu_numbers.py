"""Numbers and units as printed: a wrong reading is wrong by a thousand."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ncu_files import de, en

from nanalyze.importers.numbers import DE, EN, FORMATS, Evidence, clean, is_missing, parse, unit
from nanalyze.importers.options import ImportFailed

FILE = Path("trace.csv")


def decided(*texts: str, locale: str | None = None) -> str:
    evidence = Evidence()
    for text in texts:
        evidence.see(text)
    return evidence.decide(FILE, locale).name


# --- the format of a file ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (["1,234.50"], "en"),
        (["1.234,50"], "de"),
        (["1,234", "0.74"], "en"),  # the second tells
        (["1.234", "0,74"], "de"),
        (["1,234,567"], "en"),  # no number has two decimal commas
        (["1.234.567"], "de"),
        (["1234.567"], "en"),  # grouped, it would be 1.234.567
        (["1234,567"], "de"),
        (["0.123"], "en"),  # no group of thousands starts with 0
        (["0,123"], "de"),
        (["12.34"], "en"),
        (["12,34"], "de"),
        ([".5"], "en"),
        ([",5"], "de"),
        (["1.234e+05"], "en"),  # no one groups before an exponent
        (["1,234e5"], "de"),
        (["1 234.5"], "en"),
        (["1\u202f234,5"], "de"),
        (["1'234.50"], "en"),
        (["12", "406240"], "en"),  # nothing in doubt
        (["n/a", "", "CachePreferNone", "12 (5; 7)"], "en"),
        (["-1,234.5"], "en"),
        (["3.50 (1.25; 5.75)"], "en"),
    ],
)
def test_a_file_tells_how_it_writes_numbers(texts: list[str], name: str) -> None:
    assert decided(*texts) == name


@pytest.mark.parametrize("text", ["1,234", "1.234", "999.999", "12,345", "-1,234"])
def test_in_doubt_it_refuses_and_asks_for_the_locale(text: str) -> None:
    with pytest.raises(ImportFailed, match=r"trace\.csv: .* may be .* --locale en") as caught:
        decided(text, "17")
    assert repr(text) in str(caught.value)
    assert decided(text, locale="en") == "en"
    assert decided(text, locale="de") == "de"


def test_two_ways_in_one_file_are_refused() -> None:
    with pytest.raises(ImportFailed, match=r"two ways: '1\.234,5' \(1 such\) and '1,234\.5' \(2 such\)"):
        decided("1,234.5", "1.234,5", "7,000.25")
    assert decided("1,234.5", "1.234,5", locale="de") == "de"


@pytest.mark.parametrize("name", ["en", "de"])
@given(value=st.floats(min_value=0, max_value=1e15, allow_nan=False))
def test_what_is_printed_in_a_format_is_read_back(name: str, value: float) -> None:
    value = round(value, 2)
    text = en(value) if name == "en" else de(value)
    assert float(parse(text, FORMATS[name])) == pytest.approx(value, abs=0.005, rel=1e-12)


@given(values=st.lists(st.floats(min_value=0, max_value=1e9), min_size=1, max_size=20))
def test_a_file_in_one_format_is_never_read_in_the_other(values: list[float]) -> None:
    for name, write in (("en", en), ("de", de)):
        texts = [write(round(value, 2)) for value in values]
        found = decided_or_none(texts)
        assert found is None or [parse(t, FORMATS[found]) for t in texts] == [parse(t, FORMATS[name]) for t in texts]


def decided_or_none(texts: list[str]) -> str | None:
    try:
        return decided(*texts)
    except ImportFailed:
        return None


@pytest.mark.parametrize("text", ["321e999", "9" * 59 + "e999"])
def test_numbers_beyond_any_counter_prove_nothing(text: str) -> None:
    evidence = Evidence()
    evidence.see(text)
    evidence.see_value(text, Decimal(5))
    assert not evidence.proofs


def test_a_size_known_from_elsewhere_is_evidence() -> None:
    evidence = Evidence()
    evidence.see("1,024")
    evidence.see_value("1,024", Decimal(1024))
    assert evidence.decide(FILE, None) is EN
    other = Evidence()
    other.see("1.024")
    other.see_value("1.024", Decimal(1024))
    assert other.decide(FILE, None) is DE
    unrelated = Evidence()
    unrelated.see("1,024")
    unrelated.see_value("1,024", Decimal(7))
    with pytest.raises(ImportFailed):
        unrelated.decide(FILE, None)


# --- single numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"),
        ("1,205.00", "1205.00"),
        ("25,174,959,968", "25174959968"),
        ("-0.5", "-0.5"),
        ("1.5e-3", "0.0015"),
        ("(!) 12.5", "12.5"),
        ("4,096 (1; 2; 3)", "4096"),
        (" 7 ", "7"),
    ],
)
def test_parse(text: str, value: str) -> None:
    assert parse(text, EN) == Decimal(value)


@pytest.mark.parametrize("text", ["n/a", "N/A", "nan", "NaN", "-nan", "", "  ", "(!) n/a", "(!) nan", "inf", "no data"])
def test_no_value_is_none(text: str) -> None:
    assert is_missing(clean(text))
    assert parse(text, EN) is None
    assert parse(text, DE) is None


@pytest.mark.parametrize(
    "text",
    [
        "1,23",
        "1,2345",
        ",123",
        "12,34,567",
        "0,123",
        "1.2.3",
        "0x1f",
        "SIMT",
        "1e99999",
        "9" * 65,
        "1_000",
        "١٢٣",
        "--5",
    ],
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text, EN)


@settings(max_examples=300)
@given(st.text(max_size=80))
def test_any_text_is_a_number_none_or_refused(text: str) -> None:
    evidence = Evidence()
    evidence.see(text)
    for format_ in (EN, DE):
        try:
            value = parse(text, format_)
        except ValueError:
            continue
        assert value is None or math.isfinite(value)


# --- units ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("", 1),
        ("%", 1),
        ("byte", 1),
        ("Kbyte", 1000),
        ("Mbyte", 10**6),
        ("Gbyte", 10**9),
        ("Kibyte", 1024),
        ("Gbyte/s", 10**9),
        ("B", 1),
        ("KB", 1000),
        ("GB/s", 10**9),
        ("MiB", 2**20),
        ("Gbyte/second", 10**9),
        ("byte/block", 1),
        ("Kbyte/block", 1000),
        ("ns", 1),
        ("nsecond", 1),
        ("us", 1000),
        ("usecond", 1000),
        ("µs", 1000),
        ("ms", 10**6),
        ("msecond", 10**6),
        ("s", 10**9),
        ("second", 10**9),
        ("hz", 1),
        ("Ghz", 10**9),
        ("Mhz", 10**6),
        ("cycle/nsecond", 10**9),
        ("cycle/usecond", 10**6),
        ("cycle/second", 1),
        ("inst/cycle", 1),
        ("byte/cycle", 1),
        ("register/thread", 1),
        ("sector/s", 1),
        ("Gsector/s", 10**9),
        ("warp", 1),
        ("SM", 1),
        ("%/register", 1),
        ("[us]", 1000),
    ],
)
def test_units_become_base_units(text: str, factor: int) -> None:
    found = unit(text)
    assert found.factor == factor
    assert found.scaled == (factor != 1)


def test_a_word_that_is_no_unit_is_marked() -> None:
    assert (unit("furlong").factor, unit("furlong").known) == (1, False)
    assert unit("branches").known
    assert not unit("Gb/s").known  # bits


def test_conversion_does_not_lose_a_nanosecond() -> None:
    printed = [f"{n / 100:.2f}" for n in range(21_100, 21_300)]
    assert [float(parse(text, EN) * unit("us").factor) for text in printed] == [n * 10.0 for n in range(21_100, 21_300)]
