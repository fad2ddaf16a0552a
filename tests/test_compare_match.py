"""Which kernel is which: equal, renamed, reshaped, new, vanished, and never guessed."""

from __future__ import annotations

import pytest

from nanalyze.analysis.compare.match import NEW, RELOCATED, RENAMED, RESHAPED, SAME, VANISHED, base_name, pairs
from nanalyze.analysis.compare.sample import KernelClass

GRID = (132, 1, 1, 256, 1, 1, 0, 0, 0)


def of(
    class_id: int,
    name: str,
    shape: tuple[int, ...] = GRID,
    resources: tuple[int, ...] = (32, 0, 0, 0),
    site: str | None = "step",
) -> KernelClass:
    return KernelClass(class_id, name, name, (*shape, *resources), site)


def matched(
    a: list[KernelClass], b: list[KernelClass], *, renamed: bool = True
) -> list[tuple[int | None, int | None, str]]:
    """(a, b, how), the classes in the order in which they are launched."""
    found = pairs(
        {k.kernel_class_id: k for k in a},
        {k.kernel_class_id: k for k in b},
        [k.kernel_class_id for k in a],
        [k.kernel_class_id for k in b],
        renamed=renamed,
    )
    return [(pair.a, pair.b, pair.how) for pair in found]


def test_equal_identifiers_are_the_same_kernel() -> None:
    assert matched([of(1, "x"), of(2, "y")], [of(2, "y"), of(1, "x")]) == [(1, 1, SAME), (2, 2, SAME)]


def test_what_is_on_one_side_only_is_new_or_vanished() -> None:
    a, b = [of(1, "x", (1,) * 9)], [of(2, "y", (2,) * 9)]
    assert matched(a, b) == [(1, None, VANISHED), (None, 2, NEW)]


def test_another_template_argument_is_a_renaming() -> None:
    a = [of(1, "void at::native::norm<float, 4>(float*, int)", resources=(32, 0, 0, 0))]
    b = [of(2, "void at::native::norm<__half, 8>(__half*, int)", resources=(40, 0, 0, 0))]
    assert matched(a, b) == [(1, 2, RENAMED)]


def test_a_generated_number_is_a_renaming() -> None:
    assert matched([of(1, "triton_poi_fused_add_3")], [of(2, "triton_poi_fused_add_17")]) == [(1, 2, RENAMED)]


def test_another_name_with_the_same_shape_resources_and_call_site_matches() -> None:
    assert matched([of(1, "old")], [of(2, "new")]) == [(1, 2, RELOCATED)]


@pytest.mark.parametrize(
    "other",
    [
        of(2, "new", (131, 1, 1, 256, 1, 1, 0, 0, 0)),
        of(2, "new", resources=(33, 0, 0, 0)),
        of(2, "new", resources=(32, 0, 1024, 0)),
        of(2, "new", site="other"),
    ],
)
def test_another_name_with_anything_else_different_does_not(other: KernelClass) -> None:
    assert [how for _, _, how in matched([of(1, "old")], [other])] == [VANISHED, NEW]


def test_another_grid_of_the_same_symbol_is_another_shape() -> None:
    b = of(2, "gemm", (264, 1, 1, 256, 1, 1, 0, 0, 0))
    assert matched([of(1, "gemm")], [b]) == [(1, 2, RESHAPED)]
    assert matched([of(1, "gemm", site="forward")], [b]) == [(1, None, VANISHED), (None, 2, NEW)]


def test_several_of_a_kind_match_in_the_order_of_their_launches() -> None:
    a = [of(1, "f<1>"), of(2, "f<2>"), of(3, "f<3>")]
    b = [of(11, "f<11>"), of(12, "f<12>"), of(13, "f<13>")]
    assert matched(a, b) == [(1, 11, RENAMED), (2, 12, RENAMED), (3, 13, RENAMED)]


def test_unequal_numbers_of_a_kind_are_not_guessed() -> None:
    found = matched([of(1, "f<1>"), of(2, "f<2>")], [of(11, "f<11>")])
    assert found == [(1, None, VANISHED), (2, None, VANISHED), (None, 11, NEW)]


def test_the_strictest_rule_goes_first() -> None:
    a = [of(1, "f<1>"), of(2, "g")]
    b = [of(12, "h"), of(11, "f<2>")]  # by shape and order alone f<1> would become h
    assert matched(a, b) == [(1, 11, RENAMED), (2, 12, RELOCATED)]


def test_ranges_of_one_run_match_by_identifier_only() -> None:
    assert matched([of(1, "old")], [of(2, "new")], renamed=False) == [(1, None, VANISHED), (None, 2, NEW)]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("void at::native::(anonymous namespace)::norm<float, std::array<char*, 2ul>>(int, float)", "norm"),
        ("gemm", "gemm"),
        ("triton_red_fused__softmax_12", "triton_red_fused__softmax"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("123", "123"),
        ("", ""),
        ("f<" * 5_000, "f"),
        ("a(b)<c>", "a"),
    ],
)
def test_the_base_name(name: str, base: str) -> None:
    assert base_name(name) == base
