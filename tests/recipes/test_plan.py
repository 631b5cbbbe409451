"""`meshloom plan`: what a wish asks, what is refused, what is printed and saved."""

import json

import pytest

from meshloom.core.config import to_tree
from meshloom.core.layout import ONE_DEVICE
from meshloom.models.known import known
from meshloom.recipes import plan as worker
from meshloom.recipes import saved
from meshloom.recipes.load import load_recipe
from meshloom.recipes.plan import BINARY, DECIMAL, Wanted, Wish, amount, ask


def test_suffixes_of_a_batch_are_binary_and_of_a_budget_decimal() -> None:
    assert amount("4M", "--batch-tokens", BINARY) == 4 * 2**20 and amount("0.5K", "-", BINARY) == 512
    assert amount("15T", "--tokens", DECIMAL) == 15 * 10**12 and amount("1_000", "-", DECIMAL) == 1000


@pytest.mark.parametrize(
    "wish, sentence",
    [
        (Wish("llama3-8b", "h100:1x8", batch="4X"), "--batch-tokens 4X is no number of tokens. Write a number with one of these behind it"),
        (Wish("llama3-8b", "h100:1x8", batch="9999999999999M"), "is 1.05e+19 tokens, more than any run takes"),
        (Wish("llama3-8b", "h100:1x8", batch="0.3"), "--batch-tokens 0.3 is 0.3 tokens, and it takes a whole number"),
        (Wish("llama3-8b", "h100:1x8", batch="1000", seq=300), "1,000 tokens, which are not a whole number of sequences of 300. Give 900 or 1,200"),
        (Wish("llama3-8b", "h101:1x8"), "There is no hardware 'h101'. Did you mean 'h100'?"),
        (Wish("llama3-9b", "h100:1x8"), "'llama3-9b' is neither a known model nor a recipe. Did you mean"),
        (Wish("llama3-8b", "h100:1x8", seq=9000), "--seq 9000 is not a length that llama3-8b takes: it is made for 1 to 8192 tokens"),
        (Wish("llama3-8b", "h100:1x8", layout="tensor=3"), "--layout tensor=3 takes 3 devices, which do not divide the 8 of h100:1x8"),
        (Wish("llama3-8b", "h100:1x8", layout="tensr=2"), "'tensr' in layout 'tensr=2' is not a strategy. Did you mean 'tensor'?"),
        (Wish("llama3-8b", "h100:1x8", sets=("train.steps=3",)), "--set train.steps=3 changes a recipe, and 'llama3-8b' is a model"),
        (Wish("llama3-8b", "h100:1x8", micro=0), "--micro 0 is no number of micro-batches"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_sentence(wish: Wish, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        ask(wish)
    assert sentence in str(caught.value)


def test_a_recipe_file_that_is_not_there_is_told() -> None:
    with pytest.raises(OSError, match="There is no recipe file my.yaml"):
        ask(Wish("my.yaml", "h100:1x8"))


def test_a_recipe_is_asked_as_it_stands_and_under_the_flags() -> None:
    config = load_recipe("quickstart")
    asked = ask(Wish("quickstart", "a100:1x8"))
    q = asked.question
    assert (q.seq, q.sequences, q.dtype, q.packed) == (config.data.seq, config.batch.sequences, "float32", True)
    assert asked.tree == to_tree(config)["model"] and "optimizer" in q.stored(ONE_DEVICE)
    q = ask(Wish("quickstart", "a100:1x8", batch="8K", seq=128, precision="bf16")).question
    assert (q.seq, q.sequences, q.dtype) == (128, 64, "bfloat16")


def test_a_known_model_takes_adamw_and_its_own_length() -> None:
    q = ask(Wish("gpt2", "a100:1x8", batch="512K")).question
    assert (q.seq, q.sequences) == (1024, 512)


def test_everything_is_printed_drawn_and_saved(tmp_path, capsys: pytest.CaptureFixture) -> None:
    wish = Wish("gpt2", "a100:1x4", batch="256K")
    assert worker.plan(wish, Wanted("10B", 1.5, picture=tmp_path / "p.svg", save=tmp_path / "p.yaml"))
    said = capsys.readouterr().out
    for part in (
        "gpt2 on a100:1x4",
        "--batch-tokens 256K = 262,144",
        "Layout",
        "Memory",
        "Step",
        "MFU",
        "10,000,000,000 tokens",
        "Next best",
        "Saved:",
    ):
        assert part in said
    plan = saved.read(tmp_path / "p.yaml")
    model, c = known("gpt2")
    assert plan.model == {"family": model.name, **to_tree(c)} and plan.devices == 4 and (tmp_path / "p.svg").stat().st_size > 1000
    assert worker.plan(wish, Wanted(json=True))
    assert json.loads(capsys.readouterr().out)["best"]["layout"] == plan.layout


def test_where_nothing_fits_it_says_what_would(tmp_path, capsys: pytest.CaptureFixture) -> None:
    assert not worker.plan(Wish("llama3-8b", "rtx4090:1x2", batch="64K", seq=8192))
    said = capsys.readouterr().out
    assert "Nothing fits: the layout that needs least" in said and "What would fit:" in said and "more devices, rtx4090:" in said


def test_what_no_layout_admits_is_a_mistake_and_not_a_matter_of_memory() -> None:
    with pytest.raises(ValueError, match=r"No layout admits this: '3\+1' is 4 layers, and the model has 12"):
        worker.plan(Wish("gpt2", "h100:1x8", batch="64K", layout="pipe=2:1f1b,3+1"), Wanted())
    with pytest.raises(
        ValueError, match=r"in 7 micro-batches .* cannot be shared evenly by the 8 devices of h100:1x8. To mend it, leave --micro out"
    ):
        worker.plan(Wish("gpt2", "h100:1x8", batch="64K", micro=7), Wanted())


def test_a_file_that_is_no_plan_is_not_written_over(tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text("extends: quickstart\n")
    with pytest.raises(ValueError, match="recipe.yaml is there already and is no plan"):
        worker.plan(Wish("gpt2", "a100:1x1"), Wanted(save=tmp_path / "recipe.yaml"))
    assert (tmp_path / "recipe.yaml").read_text() == "extends: quickstart\n"


def test_a_negative_price_and_a_picture_of_another_kind_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="--price -1 is no price"):
        worker.plan(Wish("gpt2", "a100:1x1"), Wanted(price=-1))
    with pytest.raises(ValueError, match="--price inf is no price"):
        worker.plan(Wish("gpt2", "a100:1x1"), Wanted("1B", float("inf")))
    with pytest.raises(ValueError, match="--price 2 has no run to price"):
        worker.plan(Wish("gpt2", "a100:1x1"), Wanted(price=2))
    with pytest.raises(ValueError, match="a picture is written as"):
        worker.plan(Wish("gpt2", "a100:1x1"), Wanted(picture=tmp_path / "a.gif"))
