import numpy as np
import pytest

from meshloom.data.mixing import PERIOD, Mixture, Phase, constant, schedule, whole_parts

WEIGHTS = [
    (1.0,),
    (0.25, 0.75),
    (0.001, 0.999),
    (1, 1, 1),
    (0.1, 0.2, 0.7),
    (1 / 3, 2 / 3),
    (0.333, 0.1234567, 0.5),
    (1e-9, 1),
    (3.0, 5, 7, 11, 13),
    tuple(1 / i for i in range(1, 30)),
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_counts_are_within_one_at_every_prefix(weights):
    n = 3000
    source, count = constant(weights).draw(np.arange(n))
    share = np.array(whole_parts(weights)) / sum(whole_parts(weights))
    for s, w in enumerate(share):
        drawn = np.cumsum(source == s)
        assert np.abs(drawn - np.arange(1, n + 1) * w).max() <= 1
        assert (count[source == s] == np.arange(drawn[-1])).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_kept(weights):
    share = np.array(whole_parts(weights)) / sum(whole_parts(weights))
    assert np.abs(share - np.array(weights) / sum(weights)).max() <= len(weights) / PERIOD
    assert (np.array(whole_parts(weights)) >= 1).all()


def test_decimal_weights_are_exact():
    assert whole_parts((0.25, 0.75)) == [1, 3]
    assert whole_parts((0.001, 0.999)) == [1, 999]
    assert whole_parts((1 / 3, 2 / 3)) == [1, 2]


def test_the_draw_is_a_function_of_the_number():
    m = constant((0.1, 0.2, 0.7))
    source, count = m.draw(np.arange(5000))
    at = np.array([4321, 7, 10, 0])
    s, c = m.draw(at)
    assert s.tolist() == source[at].tolist() and c.tolist() == count[at].tolist()
    assert m.counts(4321).tolist() == [(source[:4321] == i).sum() for i in range(3)]
    far_source, far_count = m.draw(np.array([10**15]))
    assert far_count[0] == m.counts(10**15)[far_source[0]]


def test_change_of_weights_repeats_and_loses_nothing():
    """C50: A = 10, B = 20 documents, .25/.75, then .5/.5 from sample 500."""
    before = constant((0.25, 0.75))
    m = before.change(500, (0.5, 0.5))
    source, count = m.draw(np.arange(1500))
    assert source[:500].tolist() == before.draw(np.arange(500))[0].tolist()
    for s in (0, 1):
        assert count[source == s].tolist() == list(range((source == s).sum()))  # so no document repeats before its source is used up
        after = np.cumsum(source[500:] == s)
        assert np.abs(after - np.arange(1, 1001) * 0.5).max() <= 1
    assert m.counts(500).tolist() == [125, 375]
    assert m.counts(1500).tolist() == [625, 875]
    again = m.change(900, (0.25, 0.75))
    assert again.phases == (Phase(0, (0.25, 0.75)), Phase(500, (0.5, 0.5)), Phase(900, (0.25, 0.75)))
    assert again.draw(np.arange(900))[1].tolist() == count[:900].tolist()


def test_the_same_weights_are_no_change():
    m = constant((1.0, 2.0))
    assert m.change(10, (1.0, 2.0)) is m


def test_another_number_of_sources_is_refused():
    with pytest.raises(ValueError, match="had 2 sources and now has 3"):
        constant((1.0, 2.0)).change(10, (1.0, 2.0, 3.0))


def test_change_at_the_start_replaces():
    assert Mixture((Phase(0, (1.0, 2.0)),)).change(0, (2.0, 1.0)).phases == (Phase(0, (2.0, 1.0)),)


def test_many_sources():
    weights = tuple(float(w) for w in np.random.default_rng(0).exponential(size=200))
    plan = schedule(weights)
    assert len(plan.source) == plan.parts.sum() == PERIOD
