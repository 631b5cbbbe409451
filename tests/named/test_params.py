"""Laying out the parameters of any model by rules over paths: what lies where, and every rule that cannot be."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshloom as ml
from meshloom.core.layout import Layout

PARAMS = {
    "embed": {"table": jnp.ones((64, 32))},
    "layers": [{"up": {"kernel": jnp.ones((32, 128)), "bias": jnp.zeros(128)}, "down": {"kernel": jnp.ones((128, 32))}} for _ in range(2)],
    "steps": np.zeros((), np.int32),
}
RULES = {"embed/table": "vocab embed", "*/up/kernel": "embed ffn", "*/down/kernel": "ffn embed", "*/bias": "ffn"}


def test_tables_of_meshloom_split_the_names() -> None:
    done = ml.shard(PARAMS, RULES, "zero3=4 tensor=2")
    kernel = done.params["layers"][1]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 64) and done.specs["layers/1/up/kernel"].axes == ("embed", "ffn")
    assert done.unmatched == ("steps",) and done.layout.sizes == {"zero3": 4, "tensor": 2}
    assert done.bytes == 4 * (64 * 32 + 2 * (32 * 128 * 2)) // 8 + 2 * 4 * 64 + 4
    np.testing.assert_array_equal(done.params["embed"]["table"], PARAMS["embed"]["table"])
    text = str(done)
    assert "layers/0/up/kernel    embed=32 ffn=128   each device 8x64" in text and "each device one number (no rule names it)" in text


def test_a_layout_of_ones_own_and_axes_without_a_name() -> None:
    lay = Layout({"x": 8}, rest={"vocab": ("x",)}, acts={"batch": ("x",)})
    done = ml.shard({"table": jnp.ones((64, 3, 5))}, {"table": "vocab _ _"}, lay)
    assert done.params["table"].sharding.shard_shape((64, 3, 5)) == (8, 3, 5)


def test_the_first_rule_that_fits_counts() -> None:
    done = ml.shard(PARAMS, {"layers/0/up/kernel": "_ _", **RULES}, "zero1=8")
    assert done.bytes > ml.shard(PARAMS, RULES, "zero1=8").bytes


@pytest.mark.parametrize(
    "params, rules, layout, sentence",
    [
        (PARAMS, {**RULES, "*/kernal": "embed ffn"}, "zero1=2", "Rule '*/kernal' fits no array. The nearest path is 'layers/0/down/kernel'."),
        (PARAMS, {**RULES, "layers/*": "ffn"}, "zero1=2", "'layers/*' fits only arrays that earlier rules have taken (layers/0/down/kernel). Put it"),
        ({"big": jnp.ones((256, 256)), "small": jnp.ones((4, 4))}, {"small": "embed ffn"}, "zero1=2",
         "No rule fits 'big' of shape (256, 256), 65,536 elements that each device would keep whole. The nearest rule is 'small'"),
        (PARAMS, {**RULES, "*/bias": "embed ffn"}, "zero1=2", "'layers/0/up/bias' has shape (128,), 1 axes, and its rule names 2"),
        (PARAMS, {**RULES, "embed/table": "embed embed"}, "zero1=2", "The rule of 'embed/table' has 'embed' twice"),
        ({"w": jnp.ones((6, 8))}, {"w": "embed ffn"}, "zero3=4", "'w' (embed=6 ffn=8): Axis 'embed' of size 6 cannot be split over 4 devices"),
        (PARAMS, RULES, "zero4=2", "'zero4' in layout 'zero4=2' is not a strategy. Did you mean 'zero"),
        ({"w": jnp.ones((8, 8))}, {"w": "in out"}, "tensor=2", "Mesh axis 'tensor' of 2 devices would split nothing, and they would all do the same"),
        ({"f": print}, {}, "data=2", "There is no array in these parameters"),
        ({"w": jnp.ones((8, 8))}, {"w": "embed ffn"}, Layout({"x": 2}, rest={"embed": ("x",), "ffn": ("x",)}), "Mesh axis 'x' would split both 'embed' and 'ffn'"),
    ],
)  # fmt: skip
def test_refuses(params, rules: dict, layout, sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        ml.shard(params, rules, layout)
    assert sentence in str(told.value)


def test_options_of_a_strategy_are_refused() -> None:
    from meshloom.parallel.table import STRATEGIES

    for name, s in STRATEGIES.items():
        word = f"{s.beside}=2 {name}" if s.beside else f"{name}={'x'.join(['2'] * s.axes)}"
        for option in s.options:
            with pytest.raises(ValueError, match=f"Option '{option}' of '{name}' is made for Meshloom's own models"):
                ml.shard(PARAMS, RULES, f"{word}:{option}")
