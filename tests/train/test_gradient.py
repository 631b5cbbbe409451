"""Loss, all gradients and norm under layouts against one device; traffic of each program against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.core.mesh import make_mesh, shardings
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.plan import Plan
from meshloom.plan.verify import limits
from meshloom.recipes.verify import QUICK, furthest
from meshloom.runner.forward import logits
from meshloom.runner.run import How
from meshloom.train.gradient import batch_shardings, make_gradient
from programs import config, equals_one_device, gradient, rows, same, same_trained, tree_of, weights

CASES = [
    # model, layout, micro-batches, runner, remat
    ("llama", "data=8", 1, "scan", "none"),
    ("llama", "zero2=2 tensor=4", 2, "scan", "none"),
    ("llama", "data=2 zero3=2 tensor=2 sequence", 2, "scan", "full"),
    ("llama_untied", "zero3=4 tensor=2", 2, "scan", "selective"),
    ("llama_untied", "zero1=2 tensor=4 sequence", 4, "unroll", "none"),
    ("gpt2", "zero3=2 tensor=2 sequence", 2, "scan", "none"),
    ("gpt2", "zero3=8", 1, "unroll", "full"),
    ("neox", "data=2 zero2=2 tensor=2 sequence", 2, "scan", "none"),
    ("llama", "zero1=2 zero3=4", 1, "scan", "none"),
    ("gpt2", "zero1=2 zero2=2", 2, "scan", "none"),
    ("neox", "zero2=2 zero3=2 tensor=2", 2, "scan", "full"),
    ("llama_untied", "zero1=2 zero2=2 zero3=2", 1, "unroll", "none"),
    ("llama_untied", "data=2 zero1=2 zero3=2", 1, "scan", "selective"),
]


FROZEN = [
    # model, layout, micro-batches, runner, remat, frozen
    ("llama", "zero3=4", 2, "scan", "none", ("layers.attn.*",)),
    ("llama", "data=2", 2, "scan", "none", ("layers.attn.*",)),
    ("llama", "tensor=2 sequence", 1, "unroll", "none", ("embed", "layers.mlp.up")),
    ("llama_untied", "zero2=2 data=2", 1, "unroll", "full", ("embed", "layers.mlp.*")),
    ("llama_untied", "zero3=2 tensor=2", 1, "scan", "full", ("embed", "layers.*")),
    ("neox", "zero3=2 data=2", 1, "scan", "none", ("layers.mlp.down_bias",)),
    ("llama_untied", "tensor3d=8", 1, "scan", "none", ("head", "layers.attn.*")),
]


@pytest.mark.parametrize("name, spelling, micro, runner, remat, freeze", FROZEN)
def test_what_trains_has_the_gradient_that_it_has_when_all_does(name, spelling, micro, runner, remat, freeze) -> None:
    """And nothing of the others moves: the traffic is that of the formula, which leaves them out."""
    got = gradient(name, spelling, micro, runner, remat, freeze=freeze)
    same_trained(got, gradient(name, "", 1))
    assert [line for line in got.lines if not line.equal] == []


@pytest.mark.parametrize("name, spelling, micro, runner, remat", CASES)
def test_layout_equals_one_device(name, spelling, micro, runner, remat) -> None:
    equals_one_device(name, spelling, micro, runner, remat)


BLOCKS = [
    ("llama", "zero3=8:qw8", 1, "scan", "none"),
    ("gpt2", "zero3=4:qw8,qg8", 2, "unroll", "none"),
    ("llama_untied", "zero2=2:qw8,qg4 tensor=2", 2, "scan", "full"),
    ("neox", "zero2=2 zero3=2:qw8,qg8", 2, "scan", "selective"),
    ("llama", "zero1=2:qw8,qg4 zero3=4:qw8,qg4", 1, "scan", "none"),
]


@pytest.mark.parametrize("name, spelling, micro, runner, remat", BLOCKS)
def test_blocks_move_what_they_say_and_stay_within_bounds(name, spelling, micro, runner, remat) -> None:
    got, one = gradient(name, spelling, micro, runner, remat), gradient(name, "", 1)
    assert [line for line in got.lines if not line.equal] == [] and got.lines
    near, apart = limits(spelling), furthest(got.grads, one.grads)[1]
    assert 1e-4 < apart < near["gradient"], "rounded, and not further than stated"
    assert abs(got.loss / one.loss - 1) < near["loss"] and abs(got.norm / one.norm - 1) < near["norm"]


def test_an_overflow_shows_behind_blocks() -> None:
    """fp16's loss scale looks at the norm: it has to be infinite where a gradient is, whatever carried it."""
    model, c = config("llama_plain")
    lay = build("zero3=4:qw8,qg8", c, 16)
    plan = Plan(make_mesh(lay), lay, How(), 1, "float16")
    params = jax.tree.map(jax.device_put, weights("llama_plain"), shardings(plan.mesh, lay, "rest", model.specs(c)))
    batch = jax.tree.map(jax.device_put, rows(8, 1), batch_shardings(plan))
    step = jax.jit(make_gradient(model, c, plan, lm()), compiler_options=QUICK)
    norms = [float(step(params, batch, None, jnp.float32(scale))[2]) for scale in (1.0, 1024.0, 2.0**31)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and not np.isfinite(norms[2])


def test_one_device_is_right_by_itself() -> None:
    """The loss is the mean of -log p over scored tokens, the norm that of all gradients, a gradient the slope of the loss."""
    model, c = config("llama")
    batch, w, one = rows(8, 1), weights("llama"), gradient("llama", "", 1)
    tokens, targets, scored, segments, positions = (getattr(batch, n)[0] for n in ("tokens", "targets", "weights", "segments", "positions"))

    @jax.jit
    def total(w):
        scores = jnp.asarray(logits(model, c, w, tokens, segments, positions), jnp.float32)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jnp.stack([(scored * (lse - jnp.take_along_axis(scores, targets[..., None], -1)[..., 0])).sum(), (scored * lse**2).sum()])

    nll, square = np.asarray(total(w), np.float64) / scored.sum()
    assert one.loss == pytest.approx(nll, rel=1e-5)
    assert one.norm == pytest.approx(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in one.grads.values())), rel=1e-5)
    step, unit = 2e-2, one.norm
    moved = [jax.tree.map(lambda p, g, s=s: p + s * step / unit * g, w, tree_of(one.grads, w)) for s in (1, -1)]
    up, down = (np.asarray(total(m), np.float64) @ (1, 1e-3) / scored.sum() for m in moved)
    assert (up - down) / (2 * step) == pytest.approx(one.norm, rel=2e-2), (nll, square)


@pytest.mark.parametrize("micro", [2, 4])
def test_micro_batches_change_nothing(micro) -> None:
    same(gradient("gpt2", "", micro), gradient("gpt2", "", 1))


def test_dropout_is_equal_in_all_layouts() -> None:
    more = (("dropout", 0.5), ("attention_dropout", 0.3))
    one = gradient("llama", "", 1, more=more)
    same(gradient("llama", "data=2 zero3=2 tensor=2 sequence", 2, remat="full", more=more), one)
    assert abs(one.loss / gradient("llama", "", 1).loss - 1) > 1e-3, "dropout changed nothing"


def test_padding_rows_of_the_vocabulary_have_no_gradient() -> None:
    for spelling in ("", "zero2=2 tensor=4"):
        rows = gradient("llama", spelling, 2 if spelling else 1).grads["embed"]
        assert rows.shape[0] > 257 and not rows[257:].any() and rows[:257].any()


def test_data_parallelism_sums_gradients_once_whatever_the_micro_batches() -> None:
    (line,) = gradient("llama", "data=8", 1).lines
    (cut,) = gradient("llama", "data=2", 4).lines
    assert line.found == cut.found


def test_tied_weights_get_the_sum_of_both_uses() -> None:
    tied, untied = gradient("llama", "", 1).grads, gradient("llama_untied", "", 1).grads
    assert "head" not in tied and np.abs(tied["embed"]).max() > 0 and np.abs(untied["head"]).max() > 0
