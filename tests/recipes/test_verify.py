"""The check of checks: five steps of an odd model under every layout, and what is said when something is wrong."""

import dataclasses

import jax
import numpy as np
import pytest

from meshloom.core.remat import words_of
from meshloom.parallel.table import build
from meshloom.plan.verify import LAYOUTS, refused, shrink
from meshloom.recipes import verify as own
from meshloom.recipes.load import load_recipe

ODD = (
    "model.variant=qwen3",
    "model.vocab=385",
    "model.kv_heads=2",
    "model.qkv_bias=true",
    "model.o_bias=true",
    "model.dropout=0.1",
    "batch.micro_batches=2",
    "train.ema=0.9",
)


@pytest.fixture(scope="module")
def odd():
    return own.case(load_recipe("quickstart", ODD))


@pytest.fixture(scope="module")
def rows(odd):
    return {row.spelling: row for row in own.check(odd, (*LAYOUTS, "tensor=3"), 5)}


def test_the_model_stays_odd(odd) -> None:
    c = odd.small
    assert c.vocab % 2 == 1 and c.vocab_padded > c.vocab and c.kv_heads == 2 and c.heads == 8 and c.qkv_bias and c.tied and odd.micro == 2


@pytest.mark.parametrize("spelling", LAYOUTS)
def test_layout_equals_one_device(rows, spelling) -> None:
    row = rows[spelling]
    assert row.wrong == [] and not row.refused
    assert {s.kind for s in row.stored} == {"params", "optimizer", "average"} and row.moved


def test_stated_layers_are_those_of_the_model(odd) -> None:
    """All its layers run where a layout says which stage has how many; for others the copy stays small."""
    deep = odd._replace(full=odd.full.model_copy(update={"layers": 7}))
    assert own.as_stated(deep, "pipe=2:1f1b,3+4 data=2").small.layers == 7
    assert own.as_stated(deep, "pipe=2 data=2") is deep and own.as_stated(deep, "zero3=2") is deep


def test_blocks_stay_within_their_bounds_and_train_as_well(odd) -> None:
    """Sixteen steps with 4-bit gradients and 8-bit weights, on random tokens."""
    one = own.run(odd, "", 16)
    got = own.run(odd, "zero3=4:qw8,qg4", 16)
    row = own.row("zero3=4:qw8,qg4", got, one, [])
    row = row._replace(differences={name: d for name, d in row.differences.items() if name != "weights"})
    assert row.wrong == [] and row.replicas and row.differences["gradient"] > 1e-3
    assert got.losses[-1] == pytest.approx(one.losses[-1], rel=1e-2)


def test_zero_stores_a_share(rows) -> None:
    whole, share = (rows[name].stored[0].found for name in ("data=8", "zero1=8"))
    assert share < 0.15 * whole


def test_a_pattern_of_remat_keeps_its_shares() -> None:
    """Over the shrunken model's layers, and over the slots of a pipeline's part; both ends stand for what is solved for at the recipe's size."""
    asked = lambda remat: own.case(load_recipe("quickstart", (f"train.remat={remat}",)))
    words = lambda x, spelling: words_of(own.how_in(x, build(spelling, x.small, 32)).remat, x.small.layers // (2 if spelling else 1))
    layers = load_recipe("quickstart").model.config.layers
    x = asked(f"'full {layers - 1}, none 1'")
    x = x._replace(small=shrink(x.model, x.full, 4))
    assert set(words(x, "")) <= {"full", "none"} and words(x, "")[0] == "full" and len(words(x, "pipe=2")) == x.small.layers // 2
    assert words(asked("auto"), "") == ("full", "none")


def test_a_refused_layout_says_why(rows) -> None:
    assert "8 heads cannot be split over tensor=3 devices" in rows["tensor=3"].refused and rows["tensor=3"].wrong == []


def test_unknown_layouts_are_the_callers_mistake(odd) -> None:
    with pytest.raises(ValueError, match="'tensr' in layout 'tensr=2' is not a strategy"):
        list(own.check(odd._replace(small=odd.small), ("tensr=2",), 1))


def test_a_difference_is_named(rows) -> None:
    good = rows["data=8"]
    bad = good._replace(
        differences={**good.differences, "gradient": 2e-3},
        start=False,
        replicas=False,
        stored=(good.stored[0]._replace(found=1),),
        moved=(),
    )
    said = "; ".join(bad.wrong)
    for words in (
        "gradient differs by 2.0e-03",
        "starting weights differ",
        "devices hold different copies",
        "params: 1 bytes stored, formula",
    ):
        assert words in said


def test_nothing_is_close_to_not_a_number() -> None:
    one = {"w": np.ones(3)}
    assert own.furthest({"w": np.array([1, np.nan, 1])}, one)[0] == "w"
    row = own.row("data=2", *(own.Outcome(one, one, [loss], [1.0], one, True, (), []) for loss in (float("nan"), 1.0)), [])
    assert row.wrong == ["loss differs by nan"]


def test_what_has_no_gradient_may_drift() -> None:
    make = lambda w, b: own.Outcome({}, {"w": np.ones(3), "b": np.array([1e-9, 0, 1])}, [1.0], [1.0], {"w": w, "b": b}, True, (), [])
    one = make(np.ones(3), np.ones(3))
    assert own.drift(make(np.ones(3), np.array([3.0, 7.0, 1.0])), one) == 0
    assert own.drift(make(np.ones(3), np.array([1.0, 1.0, 1.1])), one) > 0.05
    assert own.drift(make(np.full(3, 1.1), np.ones(3)), one) > 0.09
    other = one._replace(start={}, weights={"w": np.full(3, 1.1), "b": np.ones(3)})
    assert "weights" in own.row("data=2", other, one, []).differences and own.row("data=2", other, one, [], weights=False).wrong == []


def test_copies_that_differ_are_found() -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    parts = [jax.device_put(np.float32(v), d) for v, d in zip((1.0, 1.0 + 1e-7), jax.devices())]
    assert own.same_everywhere(jax.device_put(np.ones(4), where))
    assert not own.same_everywhere(jax.make_array_from_single_device_arrays((), where, parts))


def test_rows_hold_two_documents_and_padding(odd) -> None:
    rows = own.batch(odd, 3)
    assert rows.tokens.shape == (2, 8, 32) and set(np.unique(rows.segments)) == {0, 1, 2}
    assert dataclasses.asdict(rows)["positions"][0, 1].max() < 31


def test_prints_tables_and_returns_whether_all_agree(monkeypatch, capsys, rows) -> None:
    config = load_recipe("quickstart", ODD)
    monkeypatch.setattr(own, "check", lambda case, layouts, steps, say: iter([rows["data=8"], rows["tensor=3"]]))
    assert own.verify(config, ("data=8",), 5)
    assert "tensor=3 is refused: 8 heads cannot" in capsys.readouterr().out
    broken = rows["data=8"]._replace(start=False)
    monkeypatch.setattr(own, "check", lambda case, layouts, steps, say: iter([broken]))
    assert not own.verify(config, ("data=8",), 5)
    assert "data=8: starting weights differ" in capsys.readouterr().out


def test_no_steps_are_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="--steps is 0; at least 1 step is needed to compare"):
        own.verify(load_recipe("quickstart"), steps=0)


def test_nothing_but_refusals_is_no_agreement(monkeypatch) -> None:
    monkeypatch.setattr(own, "check", lambda case, layouts, steps, say: iter([refused("tensor=3", "why")]))
    with pytest.raises(ValueError, match="Not one layout could be compared: all that were asked for are refused"):
        own.verify(load_recipe("quickstart"), ("tensor=3",), 1)
