"""The Llama line with experts against `transformers`, from saved small models; patterns of layers; what trains."""

import jax
import numpy as np
import pytest

from goldens import small
from meshloom.core.spec import count, is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.moe import MODEL, Config, active
from meshloom.runner.run import stacks
from programs import gradient, same

SIZES = dict(layers=4, embed=8, heads=2, ffn=12, vocab=16, vocab_multiple=1, experts=4, top=2, expert_ffn=6)


@pytest.mark.parametrize("name", small.names("moe"))
def test_logits_equal_those_of_transformers_at_every_position(name: str) -> None:
    assert small.difference(name) < 1e-4


def test_layers_of_each_kind_lie_in_their_own_stack() -> None:
    c = Config(**SIZES, moe_layers=(False, True, False, True))
    specs = named_leaves(MODEL.specs(c), is_spec)
    assert specs["layers.dense.mlp.up"].shape == (2, 8, 12) and specs["layers.sparse.mlp.up"].shape == (2, 4, 8, 6)
    assert [s.repeat for s in stacks(MODEL.kinds(c))] == [2]
    whole = MODEL.specs(Config(**SIZES, moe_layers=(True,) * 4)).layers
    assert whole.dense is None and whole == MODEL.specs(Config(**SIZES)).layers


def test_what_a_token_goes_through_by_hand() -> None:
    c = Config(**SIZES)
    attention, norms, outer = 4 * 4 * 8 * 8, 4 * 2 * 8 + 8, 16 * 8
    assert count(MODEL.specs(c)) == attention + norms + outer + 4 * (8 * 4 + 4 * 3 * 8 * 6)
    through = sum(s.size * active(c, s) for s in named_leaves(MODEL.specs(c), is_spec).values())
    assert through == attention + norms + outer + 4 * (8 * 4 + 2 * 3 * 8 * 6)


@pytest.mark.parametrize("runner, remat", [("unroll", "none"), ("scan", "selective"), ("scan", "full")])
@pytest.mark.parametrize("name", ["moe", "moe_mixed"])
def test_every_runner_computes_the_same(name: str, runner: str, remat: str) -> None:
    same(gradient(name, "", 1, runner, remat), gradient(name, "", 1))


def test_the_loss_of_each_sequence_is_the_same_in_any_micro_batches() -> None:
    same(gradient("moe_mixed", "", 4), gradient("moe_mixed", "", 1))


def test_the_selections_bias_has_no_gradient() -> None:
    got = gradient("moe_mixed", "", 1).grads
    assert not got["layers.sparse.mlp.bias"].any() and got["layers.sparse.mlp.router"].any()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(got))


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(variant="mixtral", ffn=6, shared=1), "'mixtral' model cannot have shared = 1"),
        (dict(variant="mixtral", ffn=13), "cannot have expert_ffn = 6"),
        (dict(variant="qwen3_moe", score="sigmoid"), "'qwen3_moe' model cannot have score = 'sigmoid'"),
        (dict(variant="mixtral", ffn=6, moe_layers=(True, False, True, True)), "cannot have moe_layers"),
    ],
)
def test_what_a_variant_cannot_say_is_refused_before_training(more, message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SIZES, **more})
