"""Which parameters patterns freeze, what a step leaves of them, and what is refused."""

import jax
import numpy as np
import pytest

from meshloom.core.spec import is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.freeze import frozen, frozen_paths, trains
from programs import config


def paths(name: str, *patterns: str) -> set[str]:
    model, c = config(name)
    return set(frozen_paths(frozen(model, c, patterns).specs(c)))


def test_patterns_are_over_dotted_paths() -> None:
    assert paths("llama_plain", "embed") == {"embed"}
    assert paths("llama_plain", "layers.attn.*", "norm") == {*(f"layers.attn.{n}" for n in "qkvo"), "norm"}
    assert paths("gpt2", "*norm*bias") == {"layers.attn_norm.bias", "layers.mlp_norm.bias", "norm.bias"}
    model, c = config("gpt2")
    assert frozen(model, c, ()) is model and not frozen_paths(model.specs(c))


def test_only_the_mark_changes() -> None:
    model, c = config("gpt2")
    before, after = (named_leaves(m.specs(c), is_spec) for m in (model, frozen(model, c, ["layers.*"])))
    assert before.keys() == after.keys() and all(
        (a.shape, a.axes, a.init) == (after[n].shape, after[n].axes, after[n].init) for n, a in before.items()
    )
    assert all(trains(after[n]) == (not n.startswith("layers.")) for n in after)


def test_what_a_layer_would_settle_stays_where_it_is_frozen() -> None:
    """A router's bias moves by its load, without a gradient."""
    model, c = config("moe_mixed")
    params = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), model.specs(c), is_leaf=is_spec)
    bias = next(path for path, s in named_leaves(model.specs(c), is_spec).items() if s.role == "settled")
    load = np.arange(named_leaves(params)[bias].size, dtype=np.float32).reshape(-1, c.experts)
    moved = lambda m: np.abs(named_leaves(m.settle(c, params, {"load": load}))[bias]).max()
    assert moved(model) > 0 and moved(frozen(model, c, [bias])) == 0


@pytest.mark.parametrize(
    "patterns, why",
    [
        (["embd"], r"train.freeze has 'embd', which matches no parameter of the model. Did you mean 'embed'\?"),
        (["embed", "layers.atn.*"], r"'layers.atn.\*', which matches no .* Did you mean 'layers.attn.\*'\?"),
        (["layers.attn"], r"Did you mean 'layers.attn.\*'\?"),
        (["head"], r"'head', which matches no parameter"),
        (["zzz"], r"There is: embed, layers.attn.q"),
        (["embed", "layers.*", "norm"], r"freezes every parameter, and nothing is left to train. Leave some of them out"),
    ],
)
def test_refuses(patterns, why) -> None:
    model, c = config("llama_plain")
    with pytest.raises(ValueError, match=why):
        frozen(model, c, patterns)
