"""What is refused, and in which words; what a plan knows of every way of training."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

import workers
from meshloom.core.config import ConfigError, load, merge
from meshloom.core.layout import Layout
from meshloom.core.spec import is_spec, spec
from meshloom.core.tree import named_leaves
from meshloom.recipes import launch
from meshloom.train import metrics
from meshloom.train.config import OptimizerConfig, OuterConfig, TrainConfig
from meshloom.train.method import COMPRESSED, RULES, Method, check, plain, rule, shape
from meshloom.train.optimizer import OPTIMIZERS
from meshloom.train.outer import BUFFERS, OUTER
from meshloom.weights.opened import open_model
from tiny import recipe

DATA, ZERO = Layout({"data": 2}, acts={"batch": ("data",)}), Layout({"zero3": 4}, acts={"batch": ("zero3",)})


def method(steps: int = 0, outer: dict | None = None, **optimizer) -> Method:
    return Method(OptimizerConfig(**optimizer), OuterConfig(**(outer or {})), TrainConfig(steps=100), steps)


REFUSED = [
    (
        method(kind="onebit_adam"),
        ZERO,
        r"optimizer.kind: onebit_adam works between replicas along mesh axis 'data', and the layout has none \(zero3=4\)",
    ),
    (method(outer={"kind": "diloco"}), ZERO, r"outer.kind: diloco works between replicas along mesh axis 'data'"),
    (method(adascale=True), ZERO, r"optimizer.adascale: true works between replicas along mesh axis 'data'"),
    (
        method(kind="onebit_adam", outer={"kind": "diloco"}),
        DATA,
        r"outer.kind: diloco runs an optimizer inside every replica, and onebit_adam is not one",
    ),
    (method(kind="lamb", outer={"kind": "local_sgd"}), DATA, r"lamb is not one that can"),
    (method(kind="onebit_lamb", adascale=True), DATA, r"optimizer.adascale compares .* and onebit_lamb does not bring them together"),
    (method(adascale=True, outer={"kind": "slowmo", "lr": 1.0}), DATA, r"optimizer.adascale compares .* and slowmo does not"),
    (method(100, kind="zero_one_adam", freeze_step=100), DATA, r"freeze_step 100 leaves nothing of a run of 100 steps .* about 20"),
    (method(5, kind="onebit_adam"), DATA, r"optimizer.freeze_step 100 leaves nothing of a run of 5 steps"),
]


@pytest.mark.parametrize("m, lay, why", REFUSED)
def test_what_cannot_be_is_refused(m, lay, why):
    with pytest.raises(ValueError, match=why):
        check(m, lay, workers.specs())


def test_matrices_that_replicas_cannot_share_out_are_refused():
    with pytest.raises(ValueError, match="no axis that 3 replicas divide"):
        check(
            method(kind="onebit_adam"),
            Layout({"data": 3}, acts={"batch": ("data",)}),
            {"w": spec({"vocab": 25, "embed": 8}, "vocab embed")},
        )


def test_parameters_without_a_gradient_are_refused():
    """A router's biases, which the step moves by the load."""
    told = {"bias": replace(spec({"embed": 8}, "embed"), role="settled")}
    for m in (method(kind="lamb"), method(outer={"kind": "diloco"})):
        with pytest.raises(ValueError, match="moves parameters by gradients alone, and bias has none"):
            check(m, DATA, told)
    check(method(), DATA, told)


def test_what_keeps_something_of_every_gradient_is_refused_beside_frozen_parameters():
    specs = {"w": replace(spec({"embed": 8, "ffn": 8}, "embed ffn"), frozen=True), "b": spec({"ffn": 8}, "ffn")}
    for m, name in ((method(kind="lamb"), "optimizer.kind: lamb"), (method(outer={"kind": "diloco"}), "outer.kind: diloco")):
        with pytest.raises(
            ValueError, match=f"{name} keeps something of every parameter's gradient, and train.freeze leaves w without one"
        ):
            check(m, DATA, specs)
    with pytest.raises(ValueError, match="passes panel by panel .* Leave option stream out of the layout"):
        check(method(), Layout({"rows": 2, "cols": 2}, options={"rows": ("stream",), "cols": ("stream",)}), specs)
    check(method(), DATA, specs)


def test_what_can_be_is_not():
    for m in (method(kind=kind) for kind in COMPRESSED):
        check(m, DATA, workers.specs())
        check(m, workers.LAYOUTS[2], workers.specs())
        check(m, Layout(), workers.specs())
    check(method(kind="lamb"), ZERO, workers.specs())
    check(method(), ZERO, workers.specs())


@pytest.mark.parametrize(
    "kind, given, why",
    [
        (OuterConfig, {"kind": "diloco", "every": 0}, r"every must be at least 1; you gave 0"),
        (OuterConfig, {"kind": "dilocco"}, r"Did you mean 'diloco'\?"),
        (OuterConfig, {"kind": "none", "every": 3}, r"[Oo]uter none does not read every; local_sgd, slowmo and diloco would"),
        (OuterConfig, {"kind": "local_sgd", "momentum": 0.5}, r"[Oo]uter local_sgd does not read momentum; slowmo and diloco would"),
        (OptimizerConfig, {"kind": "onebit_adan"}, r"Did you mean 'onebit_adam'\?"),
        (OptimizerConfig, {"kind": "onebit_adam", "freeze_step": 0}, r"freeze_step must be at least 1"),
        (
            OptimizerConfig,
            {"kind": "adamw", "freeze_step": 5},
            r"adamw does not read freeze_step; onebit_adam, onebit_lamb and zero_one_adam would",
        ),
        (OptimizerConfig, {"kind": "lamb", "min_coeff": 3.0, "max_coeff": 2.0}, r"[Mm]in_coeff 3.0 is more than max_coeff 2.0"),
        (OptimizerConfig, {"kind": "onebit_lamb", "factor_min": 5.0}, r"[Ff]actor_min 5.0 is more than factor_max 4.0"),
    ],
)
def test_settings_are_refused_in_sentences(kind, given, why):
    with pytest.raises(ConfigError, match=why):
        load(kind, given)


def test_layouts_are_compared_by_a_plain_optimizer():
    c = plain(OptimizerConfig(kind="onebit_lamb", lr=0.3, beta2=0.7, freeze_step=7))
    assert (c.kind, c.lr, c.beta2) == ("adamw", 0.3, 0.7)
    assert plain(OptimizerConfig(kind="sgd", adascale=True)) == OptimizerConfig(kind="sgd")


def test_every_kind_has_its_row():
    kinds = OptimizerConfig.model_fields["kind"].annotation.__args__
    assert set(kinds) == {*OPTIMIZERS, *RULES} and set(COMPRESSED) < set(RULES)
    assert set(OuterConfig.model_fields["kind"].annotation.__args__) == {*OUTER, "none"}
    assert set(OuterConfig.model_fields["buffers"].annotation.__args__) == set(BUFFERS)


def test_plain_training_has_no_rule_and_one_phase():
    p = workers.plan(2)
    assert rule(method(), p, workers.specs(), lambda done: done, 1) is None
    assert list(shape(method(), p, workers.specs()).moves) == [""]


@pytest.mark.parametrize(
    "m", [method(kind=kind) for kind in RULES] + [method(outer={"kind": kind}) for kind in OUTER] + [method(adascale=True)]
)
def test_all_that_is_kept_has_a_name_in_the_plan(m):
    p = workers.plan(4)
    found = shape(m, p, workers.specs())
    whole = sum(s.nbytes for s in named_leaves(found.state.opt, is_spec).values())
    named = sum(s.nbytes for tree in found.kinds.values() for s in named_leaves(tree, is_spec).values())
    assert named == whole, "an array of the state is in no part that the plan counts"


WHOLE_RUNS = {
    "onebit_adam": {"optimizer": {"kind": "onebit_adam", "freeze_step": 2, "lr": 1e-3}},
    "zero_one_adam": {"optimizer": {"kind": "zero_one_adam", "freeze_step": 1, "local_scaler": 1, "local_clip": 4, "lr": 1e-3}},
    "diloco": {"optimizer": {"lr": 1e-3}, "outer": {"kind": "diloco", "every": 3}},
    "adascale": {"optimizer": {"kind": "sgd", "lr": 1e-2, "adascale": True}, "train": {"steps": 9, "runner": "scan"}},
}


@pytest.mark.parametrize("way", WHOLE_RUNS)
def test_a_run_resumes_bit_for_bit_and_exports_the_shared_weights(way, tmp_path, capsys):
    """Every way of training from a recipe: the plan, training, checkpoints in the middle of an interval, metrics, evaluation, export."""
    more = {
        "layout": "data=2",
        "eval": {"every": 3},
        "train": {"steps": 6, "runner": "scan", "ema": 0.9},
        "log": {"every": 1, "tensorboard": False, "plot": False},
    }
    config = recipe(tmp_path, **merge(more, WHOLE_RUNS[way]))
    assert "errors" in "\n".join(launch.describe_plan(config, launch.choose(config))) or way in ("diloco", "adascale")
    first, again = tmp_path / "first", tmp_path / "again"
    outcome = launch.train(config, first)
    kept = sorted(int(p.name) for p in (first / "checkpoints").iterdir() if p.name.isdecimal())
    assert kept[-1] == outcome.step and (outcome.step < 9 if way == "adascale" else outcome.step == 6)
    shutil.copytree(first, again)
    for step in kept[1:]:
        shutil.rmtree(again / "checkpoints" / str(step))
    back = launch.train(config, again, resume=True)
    assert back.step == outcome.step and (first / "metrics.jsonl").read_bytes() == (again / "metrics.jsonl").read_bytes()
    for (name, a), b in zip(named_leaves(outcome.state).items(), named_leaves(back.state).values()):
        assert np.array_equal(np.asarray(a), np.asarray(b)), name
    read = open_model(first).weights(None)
    for a, b in zip(named_leaves(read).values(), named_leaves(outcome.state.params).values()):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    exported = open_model(first / "hf").weights(None)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(named_leaves(read).values(), named_leaves(exported).values()))
    lines = metrics.read(first, "train")
    assert ("adascale_gain" in lines[0]) == (way == "adascale") and lines[-1]["step"] == outcome.step
    if way == "adascale":
        assert all(1 <= line["adascale_gain"] <= 2 for line in lines) and lines[-2]["scaled_steps"] < 9 <= lines[-1]["scaled_steps"]
    if way == "diloco":
        one = recipe(tmp_path, **merge(more, {**WHOLE_RUNS[way], "layout": "", "train": {"steps": 7}}))
        with pytest.raises(ValueError, match=r"replicas"):
            launch.train(one, again, resume=True)
