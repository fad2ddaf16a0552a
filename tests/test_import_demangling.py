"""Readable names out of foreign files, the ones that would fill all memory among them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from nsys_files import Export

import nanalyze.analysis as na
from nanalyze.importers import demangling, registry
from nanalyze.importers.demangling import Demangler
from nanalyze.recorder.demangle import demangle


def doubling(times: int) -> str:
    """A name whose every part holds the one before twice: 2**times copies when it is written out."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "_Z1f1aIiiE" + "".join(f"S_IS{digits[at]}_S{digits[at]}_E" for at in range(times))


def test_names_are_demangled_with_and_without_references() -> None:
    many = "_Z1fN1a1bE" + "S0_" * 30
    with Demangler() as demangler:
        assert demangler.name("_Z1fi") == "f(int)"
        assert demangler.name("softmax_kernel") == "softmax_kernel"
        assert demangler.name("_Znonsense") == "_Znonsense"
        assert demangler.name(many) == demangle(many) == f"f({', '.join(['a::b'] * 31)})"
        assert demangler.name(many + "é") == many + "é"
        assert demangler.name(doubling(8)) == demangle(doubling(8))


def test_a_name_that_fills_all_memory_stays_mangled(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    with Demangler() as demangler:
        assert demangler.name(doubling(34)) == doubling(34)
        assert demangler.name(doubling(8)) == demangle(doubling(8))  # the next one is unharmed
    assert time.monotonic() - started < 30
    monkeypatch.setattr(demangling, "WAIT_S", 0.05)
    with Demangler() as demangler:
        assert [demangler.name(doubling(34)) for _ in range(5)] == [doubling(34)] * 5
        assert demangler._strikes == demangling.MOST_STRIKES
        assert demangler.name(doubling(8)) == doubling(8)  # no other is tried
        assert demangler.name("_Z1fi") == "f(int)"


def test_an_import_with_such_a_name_ends(tmp_path: Path) -> None:
    export = Export()
    export.kernel(0, 5, mangled=doubling(34), demangledName=None, shortName=None)
    path = export.sqlite(tmp_path / "r.sqlite")
    assert registry.import_files([path], tmp_path / "run").kernels == 1
    with na.open(tmp_path / "run") as run:
        names = run.sql("SELECT name, name_mangled FROM kernel_classes").to_numpy().tolist()
    assert names == [[doubling(34)] * 2]
