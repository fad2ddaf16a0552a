"""Symbol names as people read them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanalyze.recorder import demangle as module
from nanalyze.recorder.demangle import demangle


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_Z6scaledILi3EdEvPT0_i", "void scaled<3, double>(double*, int)"),
        ("_ZN2at6native11elementwiseILi4EEEvi", "void at::native::elementwise<4>(int)"),
        ("_Z1fv", "f()"),
        ("plain", "plain"),
        ("", ""),
        ("_Z", "_Z"),
        ("_Zrubbish", "_Zrubbish"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("_Z6scaledILi3EdEvPT0_i trailing", "_Z6scaledILi3EdEvPT0_i trailing"),
    ],
)
def test_names(mangled: str, name: str) -> None:
    assert demangle(mangled) == name


def test_a_name_that_cannot_be_a_symbol_is_left_alone() -> None:
    hostile = "_Z\\xff<script>'\"\udcff"
    assert demangle(hostile) == hostile


def test_a_symbol_of_a_thousand_characters_is_demangled_and_a_hostile_one_is_not() -> None:
    long = "a" * 1000  # libstdc++ gives up beyond about 1,020
    assert demangle(f"_Z1000{long}v") == f"{long}()"
    longer = "_Z99999" + "a" * 99_999 + "v"
    assert demangle(longer) == longer


def test_a_symbol_that_expands_without_end_is_bounded() -> None:
    nested = "_Z1f" + "P" * 16_000 + "i"
    assert demangle(nested) in (nested, "f(int" + "*" * 16_000 + ")")


@given(st.text(max_size=60))
def test_any_text_gives_text(text: str) -> None:
    assert isinstance(demangle("_Z" + text), str)
    if not text.startswith("_Z"):
        assert demangle(text) == text


@pytest.fixture
def _forget_runtime() -> Iterator[None]:
    module._runtime.cache_clear()
    yield
    module._runtime.cache_clear()


@pytest.mark.usefixtures("_forget_runtime")
def test_without_a_cpp_runtime_names_stay_mangled(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str | None) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert demangle("_Z1fv") == "_Z1fv"
