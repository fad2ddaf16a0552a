"""Which kernel of one side is which of the other.

The identifier of a kernel class is a hash of its symbol, shape and resources, so what did not change
matches by itself. What remains is matched by rules, the strictest first, and only where a rule leaves
one way to do it: a wrong pair would invent a change, a missed one shows as new and vanished.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from nanalyze.analysis.compare.sample import SHAPE, KernelClass

# How a pair was found, as reports call it.
SAME, RENAMED, RELOCATED, RESHAPED = "same", "other template", "other name", "other shape"
NEW, VANISHED = "new", "vanished"

_GRID = SHAPE.index("registers_per_thread")  # grid, block and cluster stand before it
EXAMINED = 20_000


@dataclass(frozen=True)
class Pair:
    """One kernel on both sides; one of the ids is None for a new or vanished kernel."""

    a: int | None
    b: int | None
    how: str


Key = Callable[[KernelClass], Hashable]


def pairs(
    a: Mapping[int, KernelClass],
    b: Mapping[int, KernelClass],
    order_a: Sequence[int],
    order_b: Sequence[int],
    *,
    renamed: bool = True,
) -> list[Pair]:
    """Every class of both sides once. `order_*` are the ids in the order in which a repetition launches them.

    Without `renamed` only equal identifiers match.
    """
    found = [Pair(class_id, class_id, SAME) for class_id in order_a if class_id in b]
    left_a = [class_id for class_id in order_a if class_id not in b]
    left_b = [class_id for class_id in order_b if class_id not in a]
    rules: tuple[tuple[str, Key], ...] = (
        (RENAMED, lambda k: (base_name(k.name), k.shape[:_GRID], k.range_name)),
        (RELOCATED, lambda k: (k.shape, k.range_name)),
        (RESHAPED, lambda k: (k.symbol, k.range_name)),
    )
    for how, key in rules if renamed else ():
        made = _unambiguous(a, b, left_a, left_b, key)
        found += [Pair(one, other, how) for one, other in made]
        left_a = [class_id for class_id in left_a if class_id not in {one for one, _ in made}]
        left_b = [class_id for class_id in left_b if class_id not in {other for _, other in made}]
    found += [Pair(class_id, None, VANISHED) for class_id in left_a]
    return found + [Pair(None, class_id, NEW) for class_id in left_b]


def _unambiguous(
    a: Mapping[int, KernelClass], b: Mapping[int, KernelClass], left_a: Sequence[int], left_b: Sequence[int], key: Key
) -> list[tuple[int, int]]:
    """Pairs of equal key: as many on one side as on the other, paired in the order of their launches."""
    groups_a, groups_b = _grouped(a, left_a, key), _grouped(b, left_b, key)
    return [
        pair
        for found, ids in groups_a.items()
        if len(groups_b.get(found, ())) == len(ids)
        for pair in zip(ids, groups_b[found], strict=True)
    ]


def _grouped(classes: Mapping[int, KernelClass], ids: Sequence[int], key: Key) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for class_id in ids:
        groups[key(classes[class_id])].append(class_id)
    return groups


def base_name(name: str) -> str:
    """The function's name without return type, namespaces, template arguments, parameters and trailing numbers.

    Compilers number what they generate (`triton_poi_fused_add_3`), so numbers at the end do not count.
    """
    text = name[:EXAMINED].removeprefix("void ").replace("(anonymous namespace)", "")
    plain, depth = [], 0
    for character in text:
        if character == "<":
            depth += 1
        elif character == ">":
            depth = max(0, depth - 1)
        elif depth == 0:
            if character == "(":
                break
            plain.append(character)
    last = "".join(plain).strip().rpartition("::")[2].split(" ")[-1]
    return re.sub(r"[\d_]+$", "", last) or last
