"""`meshloom eval`: the same numbers whatever the batch and the layout, and bits for the bytes that were scored."""

import json
import math

import pytest

from meshloom.recipes import launch
from meshloom.recipes.evaluate import evaluate, show
from tiny import recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    base = tmp_path_factory.mktemp("eval")
    outcome = launch.train(recipe(base, train={"steps": 2}), base / "run")
    return base, outcome


def test_held_out_split_gives_the_loss_of_training(run):
    base, outcome = run
    scores = evaluate(str(base / "run"))
    assert scores.loss == pytest.approx(outcome.loss, rel=1e-6)
    assert scores.perplexity == pytest.approx(math.exp(scores.loss), rel=1e-6)
    assert scores.bits_per_byte == pytest.approx(scores.loss * scores.tokens / math.log(2) / scores.bytes, rel=1e-9)


def test_batch_and_layout_do_not_matter(run):
    base, _ = run
    one, many = evaluate(str(base / "run"), sequences=1), evaluate(str(base / "run"), sequences=5, layout="zero3=2 tensor=2")
    assert many.tokens == one.tokens and many.loss == pytest.approx(one.loss, rel=1e-6)
    assert evaluate(str(base / "run"), sequences=2, limit=3).tokens == evaluate(str(base / "run"), sequences=3, limit=3).tokens


@pytest.mark.parametrize("layout", ["context=4", "data=2 context=2 ulysses=2"])
def test_a_sequence_may_be_split_and_padded(run, layout):
    """Rows of 30 tokens, which eight pieces or four parts do not divide."""
    base, _ = run
    one, split = evaluate(str(base / "run"), seq=30), evaluate(str(base / "run"), seq=30, layout=layout)
    assert split.tokens == one.tokens and split.accuracy == one.accuracy and split.loss == pytest.approx(one.loss, rel=1e-6)


def test_own_text(run, tmp_path, capsys):
    base, _ = run
    (tmp_path / "own.txt").write_text("the sea was calm and a ship came in")
    scores = evaluate(str(base / "run"), (str(tmp_path / "own.txt"),))
    assert scores.documents == 1 and 0 < scores.bytes <= len("the sea was calm and a ship came in")
    show(scores, json=True)
    assert json.loads(capsys.readouterr().out)["tokens"] == scores.tokens


def test_missing_model_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no"):
        evaluate(str(tmp_path / "absent"))


@pytest.mark.parametrize("name, given, least", [("sequences", 0, 1), ("limit", -1, 0), ("seq", -5, 0)])
def test_numbers_that_cannot_be_are_told(name, given, least):
    with pytest.raises(ValueError, match=f"--{name} is {given}; it must be at least {least}"):
        evaluate("no model is opened", **{name: given})
