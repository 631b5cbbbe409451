"""The step: skipping, averaging, precision, the loss scale, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.core.tree import named_leaves
from meshloom.objectives.lm import lm
from meshloom.recipes import launch
from meshloom.train.feed import Feed
from meshloom.train.schedule import make_schedule
from meshloom.train.step import make_step
from tiny import recipe


def program(tmp_path, **over):
    config = recipe(tmp_path, **over)
    chosen = launch.choose(config)
    schedule = make_schedule(config.schedule, config.optimizer.lr, 10)
    step = make_step(chosen.model, chosen.config, chosen.plan, lm(config.train.z_loss), config.optimizer, schedule, config.train, 0, 1)
    data = launch.prepare(config, chosen.config.vocab, progress=False).sets.train
    batch = next(Feed(chosen.plan, config.batch.sequences, config.data.seq).train(data, 0))
    return step, batch


def arrays(tree) -> dict[str, np.ndarray]:
    return {name: np.array(a) for name, a in named_leaves(tree).items()}


def test_average_of_weights(tmp_path):
    """ema is decay * ema + (1 - decay) * new, from the first weights on."""
    step, batch = program(tmp_path, train={"ema": 0.75})
    state = step.start(None)
    before = arrays(state.params)
    state, _ = step.run(state, batch)
    after, ema = arrays(state.params), arrays(state.ema)
    for name in before:
        np.testing.assert_allclose(ema[name], 0.75 * before[name] + 0.25 * after[name], rtol=1e-5, atol=1e-7)
    assert any(np.abs(after[name] - before[name]).max() > 1e-3 for name in before)


def test_non_finite_step_changes_nothing_and_is_counted(tmp_path):
    """C58: weights, moments and average stay bit for bit; the counter goes up; the next good step works."""
    step, batch = program(tmp_path, train={"ema": 0.9})
    state = step.start(None)
    state, _ = step.run(state, batch)
    before = arrays((state.params, state.opt, state.ema))
    bad = jax.tree.map(lambda a: a, batch)
    bad = type(batch)(**{**batch.__dict__, "weights": batch.weights * jnp.inf})
    state, told = step.run(state, bad)
    after = arrays((state.params, state.opt, state.ema))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert int(told["skipped"]) == 1 and int(told["consecutive"]) == 1 and int(state.step) == 2
    state, told = step.run(state, batch)
    assert int(told["skipped"]) == 1 and int(told["consecutive"]) == 0 and np.isfinite(float(told["norm"]))


def test_all_stages_of_a_pipeline_skip_a_step_that_overflows(tmp_path):
    """fp16, a scale so large that a gradient is infinite on some stage: no stage moves, the scale halves until all is finite, and the run goes on."""
    train = {"precision": "fp16", "ema": 0.9, "loss_scale": {"initial": 2.0**22, "maximum": 2.0**24, "hysteresis": 1}}
    step, batch = program(tmp_path, layout="pipe=2 zero1=2", batch={"micro_batches": 2}, train=train)
    state = step.start(None)
    before, scales = arrays((state.params, state.opt, state.ema)), []
    for _ in range(12):
        state, told = step.run(state, batch)
        scales.append(float(told["scale"]))
        if np.isfinite(float(told["norm"])):
            break
        after = arrays((state.params, state.opt, state.ema))
        assert all(np.array_equal(before[name], after[name]) for name in before)
    skipped = len(scales) - 1
    assert skipped > 0 and scales == [2.0 ** (22 - i) for i in range(len(scales))] and int(told["skipped"]) == skipped
    assert not np.array_equal(arrays(state.params)["embed"], before["0.embed"])


def test_clipping_by_the_norm_of_all_stages(tmp_path):
    """Clipped to a fiftieth of the norm, a step of gradient descent is that of one device, on every stage."""
    got = []
    for layout in ("", "pipe=2 zero2=2"):
        plain = {"kind": "sgd", "momentum": 0.0, "lr": 0.5}
        step, batch = program(tmp_path, layout=layout, batch={"micro_batches": 2}, train={"clip": 0.02}, optimizer=plain)
        state, told = step.run(step.start(None), batch)
        got.append((float(told["norm"]), arrays(state.params)))
    (norm, one), (other, pipe) = got
    assert other == pytest.approx(norm, rel=1e-6) and norm > 0.5
    for name, a in one.items():
        np.testing.assert_allclose(pipe[name], a, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions_learn_with_fp32_masters(precision, tmp_path):
    step, batch = program(tmp_path, train={"precision": precision})
    state = step.start(None)
    losses = []
    for _ in range(4):
        state, told = step.run(state, batch)
        losses.append(float(told["loss"] / told["tokens"]))
    assert losses[-1] < losses[0] - 0.3
    assert {str(a.dtype) for a in jax.tree.leaves((state.params, state.opt.mu))} == {"float32"}
    assert float(told["scale"]) == (2.0**16 if precision == "fp16" else 1.0)


def test_loss_scale_does_not_change_the_gradient(tmp_path):
    """The norm that is reported and clipped is that of the unscaled gradient."""
    norms = []
    for precision in ("fp32", "fp16"):
        step, batch = program(tmp_path, train={"precision": precision})
        _, told = step.run(step.start(None), batch)
        norms.append(float(told["norm"]))
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


def test_micro_batches_do_not_change_the_step(tmp_path):
    """Very unequal token counts in the parts, and the same loss, norm and weights."""
    got = []
    for micro in (1, 2, 4):
        step, batch = program(tmp_path, batch={"micro_batches": micro})
        state, told = step.run(step.start(None), batch)
        got.append((float(told["loss"]), float(told["norm"]), arrays(state.params)))
    for loss, norm, params in got[1:]:
        assert loss == pytest.approx(got[0][0], rel=1e-6) and norm == pytest.approx(got[0][1], rel=1e-5)
        for name, a in params.items():
            np.testing.assert_allclose(a, got[0][2][name], atol=2e-5, err_msg=name)


def test_weight_decay_spares_gains(tmp_path):
    """C05: with a gradient of zero, matrices shrink by lr x decay and gains stay bit for bit."""
    step, batch = program(tmp_path, optimizer={"kind": "sgd", "momentum": 0.0, "nesterov": True, "lr": 0.1, "weight_decay": 0.1})
    state = step.start(None)
    before = arrays(state.params)
    silent = type(batch)(**{**batch.__dict__, "weights": batch.weights * 0})
    state, _ = step.run(state, silent)
    for name, a in arrays(state.params).items():
        expected = before[name] if "norm" in name else before[name] * np.float32(0.99)
        np.testing.assert_allclose(a, expected, rtol=0 if "norm" in name else 1e-6, err_msg=name)


def test_the_selections_bias_moves_towards_an_even_load_and_by_no_gradient(tmp_path):
    """bias += rate x sign(mean load - load), of the step's own load; a skipped step leaves it."""
    sizes = {"family": "moe", "layers": 2, "experts": 5, "top": 2, "expert_ffn": 16, "score": "sigmoid", "bias": True, "bias_rate": 0.01}
    step, batch = program(tmp_path, model=sizes)
    state = step.start(None)
    assert not np.asarray(state.params.layers.sparse.mlp.bias).any()
    state, told = step.run(state, batch)
    load = np.asarray(told["load"])[:, :5]
    want = 0.01 * np.sign(load.mean(-1, keepdims=True) - load)
    np.testing.assert_allclose(state.params.layers.sparse.mlp.bias, want, rtol=1e-6)
    assert load.sum() == 2 * 2 * np.asarray(batch.segments > 0).sum(), "every token but padding, in both layers, to two experts"
    before = np.array(state.params.layers.sparse.mlp.bias)
    bad = type(batch)(**{**batch.__dict__, "weights": batch.weights * jnp.inf})
    state, _ = step.run(state, bad)
    np.testing.assert_array_equal(state.params.layers.sparse.mlp.bias, before)


@pytest.mark.parametrize("layout", ["", "zero1=2 pipe=2"])
def test_what_is_frozen_keeps_every_bit(tmp_path, layout):
    """Three steps of AdamW with weight decay and an average: the others move, and nothing is kept for what is frozen."""
    freeze = ["embed", "layers.attn.*"]
    more = dict(optimizer={"lr": 1e-2, "weight_decay": 0.1}, layout=layout, batch={"micro_batches": 2})
    step, batch = program(tmp_path, train={"ema": 0.9, "freeze": freeze}, **more)
    state = step.start(None)
    before = arrays(state.params)
    held = {name for name in before if name == "embed" or name.startswith("layers.attn.")}
    assert held and not any(name.endswith(tuple(held)) for name in arrays(state.opt))
    for _ in range(3):
        state, told = step.run(state, batch)
    after, ema = arrays(state.params), arrays(state.ema)
    assert {name for name in before if np.array_equal(before[name], after[name])} == held
    assert all(np.array_equal(before[name], ema[name]) for name in held)
    assert np.isfinite(float(told["norm"]))


@pytest.mark.parametrize("kind", ["adafactor", "muon", "lion", "sgd"])
def test_every_optimizer_moves_the_rest_as_if_all_trained(tmp_path, kind):
    """The first step of what trains is that of a run that freezes nothing: no clipping, and no optimizer joins parameters."""
    ran = []
    for freeze in ([], ["layers.mlp.*", "norm"]):
        step, batch = program(tmp_path, optimizer={"kind": kind}, train={"clip": 0.0, "freeze": freeze})
        state = step.start(None)
        before = arrays(state.params)
        ran.append((before, arrays(step.run(state, batch)[0].params)))
    (before, every), (_, some) = ran
    for name in before:
        want = before if name.startswith("layers.mlp.") or name == "norm" else every
        np.testing.assert_allclose(some[name], want[name], rtol=1e-5, atol=1e-7, err_msg=name)
