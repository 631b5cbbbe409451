"""The plan in numbers, with nothing allocated."""

import jax
import pytest

from meshloom.parallel.table import build
from meshloom.plan.explain import Kept, brief, explain, fits, lines, number, size, unsplit
from meshloom.plan.plan import Plan
from meshloom.recipes.launch import choose, describe_plan, explained
from meshloom.recipes.load import load_recipe
from meshloom.runner.run import How
from programs import config as config_of


@pytest.fixture(scope="module")
def config():
    return load_recipe("quickstart", ["layout=data=2 zero3=2 tensor=2", "train.ema=0.9"])


def test_allocates_nothing(config) -> None:
    before = {id(a) for a in jax.live_arrays()}
    text = describe_plan(config, choose(config))
    assert {id(a) for a in jax.live_arrays()} <= before and len(text) > 40


def test_a_huge_model_is_explained_at_once() -> None:
    big = [
        "layout=zero3=8",
        "model.layers=80",
        "model.embed=8192",
        "model.heads=64",
        "model.kv_heads=8",
        "model.ffn=28672",
        "model.vocab=128256",
    ]
    config = load_recipe("quickstart", [*big, "train.runner=scan"])
    e = explained(config, choose(config))
    assert 69e9 < e.parameters < 70e9 and e.stored["parameters"] == pytest.approx(e.parameters * 4 / 8, rel=1e-3)


def test_numbers(config) -> None:
    e = explained(config, choose(config))
    c = config.model.config
    layer = 2 * 256 * 8 * 32 + 2 * 256 * 4 * 32 + 3 * 256 * 688
    products = 4 * layer + 4096 * 256
    # a token sees (256 + 1) / 2 keys on average; two products of 8 heads of 32 in each of 4 layers
    attention = 4 * 4 * 8 * 32 * 257 / 2
    assert e.flops == pytest.approx(3 * (2 * products + attention) * e.tokens) and e.tokens == 16 * c.max_seq
    assert e.stored["average"] == e.stored["parameters"] and e.stored["optimizer"] == 2 * e.stored["parameters"] + 4
    assert sum(a.bytes for a in e.arrays) == e.stored["parameters"]


def test_text_names_every_part(config) -> None:
    e = explained(config, choose(config))
    text = "\n".join(lines(e))
    for words in (
        "layers.attn.q",
        "4 x 256 x 8 x 32",
        "4 x 128 x 4 x 32",
        "reduce-scatter",
        "in a step, estimate",
        "gradients, every micro-batch",
    ):
        assert words in text
    assert len(brief(e)) == 4 and "data=2 x zero3=2 x tensor=2" in brief(e)[1]


def test_large_parameters_that_nothing_splits_are_named() -> None:
    """Of a GPT-2 with a wide MLP: biases without an embed axis stay whole; biases and gains with one are split."""
    model, c = config_of("gpt2", embed=64, ffn=8192, layers=4)
    lay = build("zero3=8", c, 16)
    e = explain(model, c, "zero3=8", Plan(None, lay, How(), 1, "float32"), 16, 8, Kept({}, lay, {}))
    held = 4 * (4 * 8192 + 3 * 4 * 64)
    want = "layers.mlp.up_bias, layers.attn.q_bias, layers.attn.k_bias, layers.attn.v_bias"
    assert unsplit(e) == f"{want}: {size(held)} in all, {held / e.stored['parameters']:.0%} of the parameters that a device keeps"
    assert f"not split  {want}" in brief(e)[4] and "not split  layers.mlp.up_bias" in "\n".join(lines(e))
    for spelling, sizes in (("data=8", {}), ("zero3=2", {"ffn": 64, "embed": 256})):
        model, c = config_of("gpt2", **sizes)
        lay = build(spelling, c, 16)
        assert not unsplit(explain(model, c, spelling, Plan(None, lay, How(), 1, "float32"), 16, 8, Kept({}, lay, {})))


def test_units() -> None:
    assert (size(512), size(1536), size(3 << 30), size(5 << 40)) == ("512 B", "1.5 KiB", "3.0 GiB", "5.0 TiB")
    assert (number(12), number(3.2e12)) == ("12.00 ", "3.20 T")


def test_says_how_many_parameters_train(config) -> None:
    e, less = (
        explained(some, choose(some))
        for some in (load_recipe("quickstart", ["layout=zero1=2", f"train.freeze={freeze}"]) for freeze in ("[]", "[embed, layers.attn.*]"))
    )
    assert e.trained == e.parameters and not any("train (" in line for line in brief(e))
    c = config.model.config
    fixed = c.vocab * c.embed + c.layers * c.embed * c.head * (2 * c.heads + 2 * c.kv_heads)
    assert less.trained == less.parameters - fixed and f"{less.trained:,} of them train (" in brief(less)[0]
    kept = less.stored["optimizer"] - 4
    assert kept == 2 * sum(a.bytes for a in less.arrays if a.path != "embed" and "attn." not in a.path)
    assert less.working["gradients"] < e.working["gradients"] and less.flops < e.flops


def test_says_whether_a_step_fits_and_by_how_much_not() -> None:
    config = load_recipe("quickstart", ["layout=zero1=2"])
    e = explained(config, choose(config))
    needs = sum(e.stored.values()) + sum(e.working.values())
    assert fits(e, needs, "one").startswith("fits") and f"of the {size(needs)} of a device of one" in fits(e, needs, "one")
    most = max({**e.stored, **e.working}.items(), key=lambda row: row[1])
    less = fits(e, needs // 2, "one")
    assert (
        f"{size(needs - needs // 2)} more than the {size(needs // 2)} of a device of one; most of it is {most[0]}: {size(most[1])}" in less
    )
