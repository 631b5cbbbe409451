"""Rows become global arrays, and each process asks only for its own."""

import jax
import numpy as np
import pytest

from meshloom.core.mesh import make_mesh
from meshloom.data.loader import Drawn as Rows
from meshloom.parallel.table import build
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.feed import Feed
from tiny import recipe

SEQ = 4


def feed(spelling: str, micro: int, rows: int, tmp_path, packed: bool = True) -> Feed:
    c = recipe(tmp_path).model.config
    layout = build(spelling, c, SEQ)
    return Feed(Plan(make_mesh(layout), layout, How(), micro, "float32", packed), rows, SEQ)


def rows(n: int) -> Rows:
    grid = np.arange(n * SEQ).reshape(n, SEQ)
    return Rows(
        grid.astype(np.int32),
        grid + 1,
        np.ones((n, SEQ), np.float32),
        np.ones((n, SEQ), np.int32),
        grid % SEQ,
        np.arange(n, dtype=np.int32),
    )


@pytest.mark.parametrize("spelling", ["", "data=4", "data=2 zero3=2 tensor=2"])
def test_put_keeps_every_row_in_order(spelling, tmp_path):
    """The global array is the rows, cut in micro-batches, whatever the layout."""
    f = feed(spelling, 2, 8, tmp_path)
    assert f.mine.tolist() == list(range(8)), "one process reads all"
    batch = f.put(rows(8))
    np.testing.assert_array_equal(np.asarray(batch.tokens), rows(8).tokens.reshape(2, 4, SEQ))
    np.testing.assert_array_equal(np.asarray(batch.samples), np.arange(8).reshape(2, 4))
    assert batch.tokens.sharding.is_equivalent_to(f.where.tokens, 3)


def test_rows_are_dealt_to_a_ring_and_padded(tmp_path):
    """Device r gets pieces r and 3 - r of each row; a row of 6 tokens is made 8 long, and its padding weighs nothing."""
    c = recipe(tmp_path).model.config
    layout = build("data=2 context=2", c, 6)
    f = Feed(Plan(make_mesh(layout), layout, How(), 1, "float32"), 2, 6)
    grid = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
    batch = f.put(Rows(grid, grid + 1, np.ones((2, 6), np.float32), np.ones((2, 6), np.int32), grid, np.arange(2, dtype=np.int32)))
    np.testing.assert_array_equal(batch.tokens[0], [[1, 2, 0, 0, 3, 4, 5, 6], [7, 8, 0, 0, 9, 10, 11, 12]])
    np.testing.assert_array_equal(batch.weights[0], [[1, 1, 0, 0, 1, 1, 1, 1]] * 2)
    np.testing.assert_array_equal(batch.targets[0, 0, :2], [2, 3])
    assert {s.data.shape for s in batch.tokens.addressable_shards} == {(1, 1, 4)}


def test_a_part_of_the_rows(tmp_path):
    """A process with the last two devices of four gets the last half of every micro-batch."""
    f = feed("data=4", 2, 8, tmp_path)
    f.first, f.last = 2, 4
    assert f.mine.tolist() == [2, 3, 6, 7]


def test_rows_without_borders_have_no_segments(tmp_path):
    assert feed("", 1, 2, tmp_path, packed=False).put(rows(2)).segments is None
    assert jax.tree.leaves(feed("", 1, 2, tmp_path).put(rows(2)).segments)
