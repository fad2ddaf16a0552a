"""Columns of the normal equations that are added together: whichever way is taken, the sums are those of the terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from nanalyze.analysis.attribution_solve import Blocks

BLOCKS, SAMPLES, COLUMNS, COUNTERS = 3, 40, 7, 2


def blocks(seed: int = 0) -> tuple[Blocks, np.ndarray, np.ndarray]:
    """Blocks with the matrix (B, N, P) and the counters (B, N, C) that they are sums of, small integers."""
    random = np.random.default_rng(seed)
    x = random.integers(0, 50, (BLOCKS, SAMPLES, COLUMNS)).astype(float)
    y = random.integers(0, 50, (BLOCKS, SAMPLES, COUNTERS)).astype(float)
    ones = np.ones((BLOCKS, COUNTERS))
    made = Blocks(
        np.einsum("bnp,bnq->bpq", x, x), np.einsum("bnp,bnc->bpc", x, y), ones, ones, np.ones(BLOCKS), np.ones(BLOCKS)
    )
    return made, x, y


@pytest.mark.parametrize(
    "members",
    [
        [[n] for n in range(COLUMNS)],  # as they are
        [[n] for n in range(4)],  # the last ones left out
        [[0], [2], [5]],
        [[0, 4], [1, 5, 3], [2]],  # merged
        [[0, 4], [1, 5], [2], [3], [4], [5], [6]],  # added to others, and standing alone too
        [[0, 4, 6], [1, 5], [2], [3], [4], [5], [6]],
        [[1], [0]],
    ],
)
def test_merged_columns_are_sums(members: Sequence[Sequence[int]]) -> None:
    made, x, y = blocks()
    gram, moment = made.gram.copy(), made.moment.copy()
    owner = np.array([0], np.intp)
    found = made.merged(members, owner)
    merged = np.stack([x[:, :, list(terms)].sum(axis=2) for terms in members], axis=2)
    # Integers: equal to the last bit.
    assert np.array_equal(found.gram, np.einsum("bnp,bnq->bpq", merged, merged))
    assert np.array_equal(found.moment, np.einsum("bnp,bnc->bpc", merged, y))
    assert found.owner is owner
    assert np.array_equal(made.gram, gram)
    assert np.array_equal(made.moment, moment)


def test_every_other_block_is_taken_without_a_copy() -> None:
    made, _, _ = blocks()
    part = made.take(slice(0, None, 2))
    assert np.shares_memory(part.gram, made.gram)
    assert np.array_equal(part.gram, made.take(np.array([True, False, True])).gram)
