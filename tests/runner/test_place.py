"""Which layer runs where."""

import itertools

import numpy as np
import pytest

from meshloom.models.base import Kind
from meshloom.runner.place import place

D, S = Kind(stack="dense"), Kind(stack="sparse", tells=True)
WIDE, NEAR = Kind(), Kind(window=4)


@pytest.mark.parametrize("stages, chunks, layers", [*itertools.product((1, 2, 3, 4), (1, 2, 3), (12, 13, 25))])
def test_every_layer_runs_once_in_order_and_on_a_slot_of_its_kind(stages, chunks, layers) -> None:
    for kinds in ((WIDE,) * layers, (D, D, D) + (S,) * (layers - 3), tuple((WIDE, NEAR)[i % 2] for i in range(layers))):
        where = place(kinds, stages, chunks)
        order = where.layers.swapaxes(0, 1).reshape(-1)  # part chunk * stages + stage
        assert [int(i) for i in order if i >= 0] == list(range(layers))
        for row in where.layers.reshape(-1, len(where.kinds)):
            assert all(kinds[i] == where.kinds[slot] for slot, i in enumerate(row) if i >= 0)
        for name, ranks in where.ranks.items():
            numbers = np.array([i for i, kind in enumerate(kinds) if kind.stack == name])
            mine = [i for i, kind in enumerate(where.kinds) if kind.stack == name]
            there = where.layers[:, :, mine].reshape(stages, -1)
            assert (np.where(ranks < 0, -1, numbers[ranks]) == there).all()


def test_no_slot_is_wasted_where_layers_divide() -> None:
    for kinds in ((WIDE,) * 8, (WIDE, NEAR) * 4):
        assert place(kinds, 2, 2).masked == 0 and place(kinds, 4, 1).masked == 0
    assert not place((WIDE,) * 8, 4, 2).said()


def test_few_slots_where_they_do_not() -> None:
    assert len(place((WIDE,) * 7, 4, 1).kinds) == 2
    assert place((D, D, D) + (S,) * 58, 4, 1).kinds == (D,) * 3 + (S,) * 15, "58 in 4 parts are 15 each, and the 3 others once"
    assert place((WIDE,) * 7, 4, 1).said(skip=True).endswith("1 of 8 slots hold no layer and are left out")
    said = place((WIDE,) * 7, 4, 1).said()
    assert "7 layers on 4 stages of 2 slots each; 1 of 8 slots" in said and "14% more work" in said


@pytest.mark.parametrize("stages, chunks, sizes", [(4, 1, (1, 5, 2, 4)), (2, 2, (4, 1, 1, 6)), (3, 1, (2, 9, 1))])
def test_stated_layers_are_where_they_are_stated(stages, chunks, sizes) -> None:
    for kinds in ((WIDE,) * 12, (D, D, D) + (S,) * 9, tuple((WIDE, NEAR)[i % 2] for i in range(12))):
        where = place(kinds, stages, chunks, sizes)
        parts = where.layers.swapaxes(0, 1).reshape(len(sizes), -1)
        starts = np.cumsum([0, *sizes])
        assert [[int(i) for i in row if i >= 0] for row in parts] == [list(range(a, b)) for a, b in itertools.pairwise(starts)]
        assert all(kinds[i] == where.kinds[slot] for row in parts for slot, i in enumerate(row) if i >= 0)
    assert len(place((WIDE,) * 12, stages, chunks, sizes).kinds) == max(sizes), "layers alike take the slots of the longest part"


def test_the_even_split_stated_is_the_default() -> None:
    for kinds in ((WIDE,) * 8, (WIDE, NEAR) * 4):
        assert (place(kinds, 4, 1, (2, 2, 2, 2)).layers == place(kinds, 4, 1).layers).all()
