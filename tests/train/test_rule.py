"""Whole steps of every way of training: the traffic of each phase against its formula, what is stored, skipping, averaging, and one replica."""

import functools

import jax
import numpy as np
import pytest

from meshloom.core.mesh import make_mesh
from meshloom.core.tree import named_leaves
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.cost import compare, shapes
from meshloom.plan.hlo import collectives
from meshloom.plan.memory import counted, stored
from meshloom.plan.plan import Plan
from meshloom.recipes.verify import QUICK
from meshloom.runner.run import How
from meshloom.train.config import OptimizerConfig, OuterConfig, ScheduleConfig, TrainConfig
from meshloom.train.method import Method, make_step, shape
from meshloom.train.schedule import make_schedule
from programs import SEQ, config, rows, weights

WAYS = {
    "onebit_adam": (OptimizerConfig(kind="onebit_adam", freeze_step=2, lr=1e-3), OuterConfig()),
    "onebit_lamb": (OptimizerConfig(kind="onebit_lamb", freeze_step=2, lr=1e-3), OuterConfig()),
    "zero_one_adam": (
        OptimizerConfig(kind="zero_one_adam", freeze_step=2, variance_scaler=1, local_scaler=1, local_clip=2, lr=1e-3),
        OuterConfig(),
    ),
    "lamb": (OptimizerConfig(kind="lamb", lr=1e-3), OuterConfig()),
    "local_sgd": (OptimizerConfig(kind="adamw", lr=1e-3), OuterConfig(kind="local_sgd", every=2)),
    "diloco": (OptimizerConfig(kind="adamw", lr=1e-3), OuterConfig(kind="diloco", every=2)),
    "adascale": (OptimizerConfig(kind="sgd", lr=1e-3, adascale=True), OuterConfig()),
    "plain": (OptimizerConfig(kind="adamw", lr=1e-3), OuterConfig()),
}


@functools.cache
def built(way: str, spelling: str, ema: float = 0.0, precision: str = "fp32"):
    """(plan, method, step) of a small model."""
    model, c = config("llama")
    lay = build(spelling, c, SEQ)
    dtype = {"fp32": "float32", "fp16": "float16"}[precision]
    plan = Plan(make_mesh(lay), lay, How("scan"), 1, dtype)
    m = Method(*WAYS[way], TrainConfig(steps=8, ema=ema, precision=precision), 8)
    schedule = make_schedule(ScheduleConfig(kind="constant"), m.optimizer.lr, 8)
    return plan, m, make_step(m, model, c, plan, lm(), schedule, 0, 1)


@functools.cache
def compiled(way: str, spelling: str, phase: str):
    _plan, _, step = built(way, spelling)
    state = step.start(None)
    batch = jax.tree.map(jax.device_put, rows(8, 1), step.batch_shardings)
    return step.programs[phase].lower(state, batch).compile(compiler_options=QUICK)


CASES = [
    (way, spelling, phase)
    for way, spelling, phases in (
        ("onebit_adam", "data=4 tensor=2", ("one bit",)),
        ("onebit_adam", "data=2 zero3=4", ("one bit",)),
        ("zero_one_adam", "data=2 zero2=2 tensor=2 sequence", ("full", "one bit", "local")),
        ("diloco", "data=4 zero3=2", ("alone", "together")),
        ("local_sgd", "data=4", ("alone",)),
        ("adascale", "data=2 zero1=2 tensor=2", ("adascale",)),
    )
    for phase in phases
]


@pytest.mark.parametrize("way, spelling, phase", CASES)
def test_a_phase_moves_what_its_formula_says(way, spelling, phase):
    """Every collective of the whole compiled step, to the byte."""
    plan, m, _step = built(way, spelling)
    model, c = config("llama")
    found = collectives(compiled(way, spelling, phase).as_text(), plan.layout.sizes)
    formula = shape(m, plan, model.specs(c)).moves[phase](spelling, shapes(model, c, plan.layout, SEQ, 8, 1, plan.how, "float32"))
    lines = compare(found, formula)
    assert lines and all(line.equal for line in lines), [line for line in lines if not line.equal]


def test_lamb_moves_between_replicas_what_its_formula_says():
    """The norms of weights that are split inside a replica are the compiler's choice: a few numbers, which it may sum over all devices."""
    plan, m, _ = built("onebit_lamb", "data=2 tensor=2")
    model, c = config("llama")
    found = collectives(compiled("onebit_lamb", "data=2 tensor=2", "one bit").as_text(), plan.layout.sizes)
    formula = shape(m, plan, model.specs(c)).moves["one bit"](
        "data=2 tensor=2", shapes(model, c, plan.layout, SEQ, 8, 1, plan.how, "float32")
    )
    between = [[f for f in side if f.axes == ("data",)] for side in (found, formula)]
    lines = compare(*between)
    assert lines and all(line.equal for line in lines), [line for line in lines if not line.equal]
    assert sum(f.bytes for f in found if f.axes == ("data", "tensor")) < 1000


@pytest.mark.parametrize("way", ["onebit_lamb", "zero_one_adam", "diloco", "adascale"])
def test_what_is_stored_is_what_the_plan_says(way):
    spelling = "data=2 zero3=2"
    plan, m, step = built(way, spelling, 0.9)
    model, c = config("llama")
    state, found = step.start(None), shape(m, plan, model.specs(c))
    assert counted(state.opt) == sum(stored(found.layout, specs) for specs in found.kinds.values())
    assert jax.tree.map(lambda a: a.shape, state) == jax.tree.map(lambda s: s.shape, step.specs, is_leaf=lambda s: hasattr(s, "used"))


def walk(way: str, spelling: str, steps: int, ema: float = 0.0, precision: str = "fp32", spoil: int = -1):
    """Trains some steps from the same odd weights: (state, told) after each."""
    _plan, _, step = built(way, spelling, ema, precision)
    state = step.start(jax.tree.map(lambda a, s: jax.device_put(a, s), weights("llama"), step.shardings.params))
    for done in range(steps):
        batch = rows(8, 1)
        if done == spoil:
            batch = type(batch)(**{**batch.__dict__, "weights": batch.weights * np.inf})
        state, told = step.at(done)(state, jax.tree.map(jax.device_put, batch, step.batch_shardings))
        yield {n: np.asarray(a) for n, a in named_leaves(state).items()}, {n: float(a) for n, a in told.items()}


def test_the_average_of_weights_moves_where_the_weights_do():
    """Replicas alone: not at all. An outer step after two steps: decay squared."""
    states = [state for state, _ in walk("diloco", "data=2", 4, ema=0.9)]
    name = "layers.attn.q"
    start = weights("llama")["layers"]["attn"]["q"] if isinstance(weights("llama"), dict) else named_leaves(weights("llama"))[name]
    want = np.asarray(start)
    for done, state in enumerate(states):
        if done % 2:
            want = want + (1 - 0.9**2) * (state[f"params.{name}"] - want)
        np.testing.assert_allclose(state[f"ema.{name}"], want, atol=1e-6)
    assert np.abs(states[1][f"ema.{name}"] - states[0][f"ema.{name}"]).max() > 0


@pytest.mark.parametrize("way", ["zero_one_adam", "adascale"])
def test_a_step_that_is_not_finite_is_skipped_by_all_replicas(way):
    out = list(walk(way, "data=2", 5, precision="fp16", spoil=3))
    before, after = out[2][0], out[3][0]
    for name, a in after.items():
        if not name.startswith(("step", "scale")):
            assert np.array_equal(a, before[name]), name
    assert out[3][1]["skipped"] == 1 and out[4][1]["skipped"] == 1 and np.isfinite(out[4][1]["loss"]) and out[4][1]["scale"] > 1


def test_one_replica_is_the_optimizer_itself():
    """AdaScale and local SGD on one device are the plain optimizer."""
    plain = [state for state, _ in walk("plain", "", 4)]
    local = [state for state, _ in walk("local_sgd", "", 4)]
    for name in plain[3]:
        if name.startswith("params"):
            np.testing.assert_allclose(local[3][name], plain[3][name], atol=1e-6, err_msg=name)
    gains = [told["adascale_gain"] for _, told in walk("adascale", "", 3)]
    assert gains == [1.0] * 3
