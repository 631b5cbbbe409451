import numpy as np
import pytest

from meshloom.data.sampler import held_out, key, order, permute

GOLDEN = [3, 4, 9, 8, 1, 2, 6, 5]
HELD = [14, 25, 50, 59, 71]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 64, 65, 1000, 4097])
def test_permute_is_a_permutation(size):
    assert sorted(permute(np.arange(size), size, key(1, 2, 3))) == list(range(size))


def test_an_index_needs_no_other():
    whole = permute(np.arange(1000), 1000, key(7))
    for i in (0, 1, 500, 999):
        assert permute(np.array([i]), 1000, key(7))[0] == whole[i]


def test_every_sample_once_an_epoch_in_a_new_order():
    n = 101
    epochs = [order(0, 0, np.arange(e * n, (e + 1) * n), n) for e in range(4)]
    assert all(sorted(e) == list(range(n)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    mixed = order(0, 0, np.arange(n - 5, n + 5), n)  # an index array over the border of two epochs
    assert mixed.tolist() == [*epochs[0][-5:], *epochs[1][:5]]


def test_seed_and_source_change_the_order():
    n = np.arange(50)
    orders = [order(seed, source, n, 50).tolist() for seed, source in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(o) for o in orders}) == 3


def test_without_shuffle_it_is_the_stores_order():
    assert order(0, 0, np.arange(7), 5, shuffle=False).tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_places_are_spread_evenly():
    """Where sample 0 of 16 goes over many keys: chi-square of 16 cells, 15 degrees of freedom; 45 is exceeded once in 10,000."""
    got = permute(np.zeros(8000, np.int64), 16, key(5, np.arange(8000)))
    expected = 8000 / 16
    assert ((np.bincount(got, minlength=16) - expected) ** 2 / expected).sum() < 45


def test_neighbours_do_not_stay_neighbours():
    p = permute(np.arange(10000), 10000, key(3))
    assert (np.abs(np.diff(p)) == 1).sum() < 20  # 2 are expected by chance


def test_the_order_is_fixed_for_ever():
    """A change of these numbers would silently break the resume of every run that exists."""
    assert order(1, 0, np.arange(8), 10).tolist() == GOLDEN
    assert np.flatnonzero(held_out(0, 100, 0.05)).tolist() == HELD


def test_huge_sets_cost_nothing():
    p = permute(np.arange(100) * 10**12, 10**15 + 7, key(0))
    assert len(set(p.tolist())) == 100 and p.min() >= 0 and p.max() < 10**15 + 7


def test_held_out_is_a_function_of_the_document_alone():
    whole = held_out(0, 10000, 0.02)
    assert 140 < whole.sum() < 260
    assert (held_out(0, 5000, 0.02) == whole[:5000]).all()
    assert (held_out(1, 10000, 0.02) != whole).any()
    assert held_out(0, 10000, 0.02)[held_out(0, 10000, 0.01)].all()  # a larger fraction only adds documents
    assert not held_out(0, 1000, 0.0).any()
