"""Pipelines against one device: loss, all gradients and norm, for schedules, families and what splits a stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.core.mesh import make_mesh
from meshloom.objectives.lm import lm
from meshloom.parallel.pipe import chunks_in
from meshloom.parallel.table import build
from meshloom.plan.plan import Plan
from meshloom.recipes.verify import QUICK
from meshloom.runner.run import How
from meshloom.train.gradient import batch_shardings, make_gradient
from programs import config, gradient, rows, same, same_trained, weights

CASES = [
    # model, layout, micro-batches, layers, runner, remat
    ("llama", "pipe=2", 4, 2, "scan", "none"),
    ("llama_untied", "pipe=4:gpipe data=2", 4, 8, "scan", "none"),
    ("gpt2", "pipe=2:interleaved2 tensor=2 zero1=2", 4, 4, "scan", "none"),
    ("llama", "pipe=2 tensor=2 sequence zero2=2", 2, 3, "scan", "selective"),
    ("gpt2", "pipe=2:interleaved2 zero3=2", 4, 7, "unroll", "full"),
    ("llama", "pipe=2 tensor2d=2x2", 2, 2, "scan", "none"),
    ("llama", "pipe=2 ulysses=2 zero3=2", 2, 2, "scan", "none"),
    ("neox", "pipe=2 context=2 data=2", 2, 4, "scan", "none"),
    ("moe", "pipe=2 expert=2 zero3=2", 2, 4, "scan", "none"),
    ("moe_mixed", "pipe=2:interleaved2 data=2", 2, 4, "scan", "none"),
    ("deepseek", "pipe=2 zero1=2", 2, 5, "scan", "none"),
    ("llama", "pipe=2:zb tensor=2 sequence", 4, 4, "scan", "none"),
    ("gpt2", "pipe=2:zb zero3=2", 2, 5, "scan", "full"),
    ("moe_mixed", "pipe=2:zb,1+3,skip data=2", 2, 4, "scan", "none"),
    ("llama", "pipe=4:1f1b,1+3+2+1,skip", 4, 7, "scan", "none"),
    ("llama", "pipe=2:zb,stash zero1=2", 4, 4, "scan", "none"),
    ("moe", "pipe=2:interleaved2,stash tensor=2", 2, 4, "scan", "selective"),
    ("gpt2", "pipe=2:1f1b,stash zero3=2", 2, 2, "unroll", "none"),
]


def parts(spelling: str, layers: int) -> int:
    """Parts of the layers that a stage runs one at a time, over all stages."""
    lay = build(spelling, config("moe" if "expert" in spelling else "llama", layers=layers)[1], 16)
    return lay.stages * chunks_in(lay)


@pytest.mark.parametrize("name, spelling, micro, layers, runner, remat", CASES)
def test_pipeline_equals_one_device(name, spelling, micro, layers, runner, remat) -> None:
    more = (("layers", layers),)
    got = gradient(name, spelling, micro, runner, remat, more=more)
    same(got, gradient(name, "", micro, more=more))
    straight, twice = runner == "unroll" or layers < 2 * parts(spelling, layers), ":zb" in spelling and remat != "none"
    if not (
        twice or (straight and "3=" in spelling) or (straight and "2d" in spelling)
    ):  # what XLA does there stands in plan/cost.py: shares
        assert [line for line in got.lines if not line.equal] == []
    assert got.lines


FROZEN = [
    # model, layout, frozen
    ("llama", "pipe=2:interleaved2", ("layers.attn.*",)),
    ("llama", "pipe=2:zb tensor=2 sequence", ("embed", "layers.attn.*")),
    ("llama", "pipe=2:zb,stash zero1=2", ("layers.*",)),
    ("llama_untied", "pipe=2 zero3=2", ("embed", "layers.mlp.*")),
]


@pytest.mark.parametrize("name, spelling, freeze", FROZEN)
def test_stages_keep_no_gradient_of_what_is_frozen(name, spelling, freeze) -> None:
    more = (("layers", 4),)
    got = gradient(name, spelling, 4, more=more, freeze=freeze)
    same_trained(got, gradient(name, "", 4, more=more))
    assert got.temp < gradient(name, spelling, 4, more=more).temp


def test_a_table_of_the_users_own_runs(tmp_path) -> None:
    """One operation a tick."""
    file = tmp_path / "mine.csv"
    file.write_text("F0,F1,,B0,,B1\n,F0,B0,F1,B1,\n")
    same(gradient("llama_plain", f"pipe=2:{file}", 2), gradient("llama_plain", "", 2))


def test_dropout_is_the_same_on_any_stage() -> None:
    more = (("layers", 4), ("dropout", 0.2), ("attention_dropout", 0.1))
    one = gradient("gpt2", "", 2, more=more)
    same(gradient("gpt2", "pipe=2:interleaved2 data=2", 2, more=more), one)
    assert abs(one.loss - gradient("gpt2", "", 2, more=(("layers", 4),)).loss) > 1e-3, "nothing was dropped"


def test_micro_batches_of_unequal_token_counts_weigh_by_their_tokens() -> None:
    """One micro-batch has 2 scored tokens, another all of its: the gradient is that of the batch as one."""
    model, c = config("llama_plain", layers=4)
    key, found = None, []
    for spelling, micro in (("", 1), ("pipe=4", 4), ("pipe=2:interleaved2", 4)):
        lay = build(spelling, c, 16)
        plan = Plan(make_mesh(lay), lay, How(), micro, "float32")
        batch = rows(8, micro)
        few = np.asarray(batch.weights).reshape(8, -1).copy()
        few[:2] = 0
        few[0, :2] = 1
        batch = jax.tree.map(jax.device_put, _with(batch, few.reshape(batch.weights.shape)), batch_shardings(plan))
        step = jax.jit(make_gradient(model, c, plan, lm()), compiler_options=QUICK)
        _, sums, norm = step(_weights(model, c, plan), batch, key, jnp.float32(1))
        found.append((float(sums["loss"]), float(sums["tokens"]), float(norm)))
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)


def test_a_loss_scale_is_undone() -> None:
    model, c = config("llama_plain")
    lay = build("pipe=2", c, 16)
    plan = Plan(make_mesh(lay), lay, How(), 2, "float32")
    batch = jax.tree.map(jax.device_put, rows(8, 2), batch_shardings(plan))
    step = jax.jit(make_gradient(model, c, plan, lm()), compiler_options=QUICK)
    norms = [float(step(_weights(model, c, plan), batch, None, jnp.float32(scale))[2]) for scale in (1.0, 1024.0)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def _with(batch, weights):
    from dataclasses import replace

    return replace(batch, weights=weights)


def _weights(model, c, plan):
    from meshloom.core.mesh import shardings

    return jax.tree.map(
        jax.device_put, weights("llama_plain", (("layers", c.layers),)), shardings(plan.mesh, plan.layout, "rest", model.specs(c))
    )


def test_a_stash_keeps_what_is_not_computed_again() -> None:
    """Of a layer computed again in full, its input; else all that its backward pass reads."""
    temp = [
        gradient("llama_plain", "pipe=2:1f1b,stash", 4, "scan", remat, more=(("layers", 4),)).temp
        - gradient("llama_plain", "pipe=2", 4, "scan", remat, more=(("layers", 4),)).temp
        for remat in ("full", "none")
    ]
    assert temp[0] < temp[1], "more is kept where nothing is computed again"
