"""A score does not depend on the batch, the layout, or the rows that fill the last batch up."""

import math

import jax
import pytest

from meshloom.core.mesh import shardings
from meshloom.core.spec import init
from meshloom.recipes import launch
from meshloom.train.feed import Feed
from meshloom.train.score import Score, make_score, score
from tiny import recipe


def test_mean_over_tokens():
    """C75: one token of 4.0 and three of 1.0: loss 1.75, perplexity 5.7546."""
    s = Score(4.0 + 3.0, 4, 1)
    assert s.loss == 1.75 and s.perplexity == pytest.approx(5.7546, abs=1e-4) and s.accuracy == 0.25


def test_nothing_scored_is_no_number():
    assert math.isnan(Score(0, 0, 0).loss)


def test_batch_and_layout_do_not_matter(tmp_path):
    got = {}
    for spelling, rows in (
        ("", 1),
        ("", 3),
        ("", 16),
        ("data=2", 4),
        ("zero3=4 tensor=2", 4),
        ("tensor3d=8", 4),
        ("pipe=2 tensor=2", 4),
        ("pipe=2:gpipe zero3=2", 12),
    ):
        config = recipe(tmp_path, layout=spelling)
        chosen = launch.choose(config)
        sets = launch.prepare(config, chosen.config.vocab, progress=False).sets
        plan = chosen.plan
        params = init(
            chosen.model.specs(chosen.config),
            jax.random.key(0),
            shardings(plan.mesh, plan.layout, "rest", chosen.model.specs(chosen.config)),
        )
        feed = Feed(plan, rows, config.data.seq, micro=1)
        got[spelling, rows] = score(make_score(chosen.model, chosen.config, plan), params, feed.once(sets.valid))
    first = got["", 1]
    assert first.tokens == sum(p.stream.ends[-1] - len(p.stream.ends) for p in sets.valid.parts), "all but each document's first token"
    for key, s in got.items():
        assert s.tokens == first.tokens and s.correct == first.correct, key
        assert s.loss == pytest.approx(first.loss, rel=1e-6), key
