"""A run whose layout changes on the way, into a pipeline, out of it, and from one to another: the same bits, and the same curve. What the model of a
pipeline scores and writes is what it does on one device."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from meshloom.core.mesh import shardings
from meshloom.core.spec import abstract
from meshloom.core.tree import named_leaves
from meshloom.recipes import launch
from meshloom.recipes.evaluate import evaluate
from meshloom.recipes.load import load_recipe
from meshloom.serve.generate import generate_text
from meshloom.serve.sampling import Sampling
from meshloom.train.metrics import read
from meshloom.weights.checkpoint import Checkpoints, load
from tiny import recipe

PIPE = load_recipe("quickstart-pipe").layout
STEPS, PROMPT = 6, "the sea"


def config(folder: Path, layout: str, **over):
    train = {"steps": STEPS, "ema": 0.9, "clip": 0.5, "runner": "scan"} | over.pop("train", {})
    return recipe(folder, model={"layers": 4}, batch={"sequences": 8}, layout=layout, train=train, log={"every": 1}, **over)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of the shipped recipe's layout that never stops: its folder's parent and its outcome."""
    base = tmp_path_factory.mktemp("pipe")
    sample = {"prompts": [PROMPT], "tokens": 4, "temperature": 0, "every": STEPS}
    return base, launch.train(config(base, PIPE, sample=sample), base / "run")


def test_a_run_leaves_its_pipeline_and_comes_back(whole_run, tmp_path):
    """Steps 1 and 2 in the pipeline, 3 and 4 under ZeRO-3 on one stage, 5 and 6 in the pipeline: every line of the log as if nothing had been."""
    base, outcome = whole_run
    shutil.copytree(base / "run", tmp_path / "run", ignore=shutil.ignore_patterns("4", "6"))
    launch.train(config(base, "zero3=8", train={"steps": 4}), tmp_path / "run", resume=True)
    again = launch.train(config(base, PIPE), tmp_path / "run", resume=True)
    one, other = read(base / "run", "train"), read(tmp_path / "run", "train")
    assert [(line["step"], line["tokens"]) for line in one] == [(line["step"], line["tokens"]) for line in other]
    for a, b in zip(one, other):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
    for name, a in named_leaves(outcome.state.params).items():
        np.testing.assert_allclose(np.array(named_leaves(again.state.params)[name]), np.array(a), atol=1e-4, err_msg=name)


def test_every_layout_reads_and_writes_the_same_bits(whole_run, tmp_path):
    """Parameters, moments and average go from the pipeline through others and none, and each reads what the one before has written."""
    base, outcome = whole_run
    first = {name: np.array(a) for name, a in named_leaves(outcome.state).items()}
    model, c, _ = launch.model_of(config(base, ""))
    path = base / "run" / "checkpoints" / str(STEPS)
    for i, spelling in enumerate(("zero3=8", "pipe=4", "pipe=2 data=2", "pipe=2:interleaved2 zero1=4", "", PIPE)):
        chosen = launch.choose(config(base, spelling))
        found = launch.shape(launch.method(config(base, spelling)), chosen.plan, model.specs(c)).state
        where = shardings(chosen.plan.mesh, chosen.plan.layout, "rest", found)
        wanted = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract(found), where)
        got = load(path, wanted)
        for name, a in named_leaves(got).items():
            assert np.array_equal(np.array(a), first[name]) and a.sharding == named_leaves(where)[name], (spelling, name)
        checkpoints = Checkpoints(tmp_path / str(i))
        checkpoints.save(STEPS, got, {})
        checkpoints.close()
        path = tmp_path / str(i) / str(STEPS)


def test_scores_and_text_are_those_of_one_device(whole_run):
    base, outcome = whole_run
    one = evaluate(str(base / "run"))
    assert outcome.loss == pytest.approx(one.loss, rel=1e-6), "the last evaluation in the run"
    found = evaluate(str(base / "run"), layout="pipe=4:gpipe", sequences=3)
    assert (found.tokens, found.accuracy) == (one.tokens, one.accuracy) and found.loss == pytest.approx(one.loss, rel=1e-6)
    greedy = Sampling(temperature=0, tokens=4)
    texts = [generate_text(base / "run", [PROMPT], greedy, layout=layout)[0].text for layout in ("auto", "pipe=2 tensor=2")]
    assert texts[0] == texts[1] == read(base / "run", "sample")[-1]["text"]
