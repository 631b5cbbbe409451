"""Rotary parameters in both schemas, and what config.json may not say."""

import pytest

from meshloom.models.hf import activation, only, read_rope, take, write_rope
from meshloom.ops.rope import Rope

ROPES = [
    Rope(theta=5e5),
    Rope(kind="linear", factor=2.0),
    Rope(kind="dynamic", factor=2.0, original=64),
    Rope(kind="llama3", factor=8.0, original=16, low_freq_factor=1.0, high_freq_factor=4.0, theta=5e5),
    Rope(kind="yarn", factor=4.0, original=16),
    Rope(kind="yarn", factor=4.0, original=16, mscale=1.0, mscale_all_dim=0.5, attention_factor=1.1, truncate=False, beta_fast=8.0),
    Rope(theta=5e5, partial=0.5),
]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r.kind)
def test_rotary_parameters_are_read_as_they_were_written(rope: Rope, old: bool) -> None:
    assert read_rope(write_rope(rope, old), 1.0, 64) == rope


def test_the_older_spelling_of_the_kind_is_read() -> None:
    assert read_rope({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 3.0}}, 1.0, 64) == Rope(
        kind="linear", factor=3.0, theta=1e6
    )


def test_what_is_absent_has_the_familys_meaning() -> None:
    assert read_rope({}, 2e6, 64, partial=0.25) == Rope(theta=2e6, partial=0.25)
    assert read_rope({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}}, 1e4, 64).factor == 4.0


def test_layers_that_agree_are_one_and_others_are_refused() -> None:
    one, other = {"rope_type": "default", "rope_theta": 5.0}, {"rope_type": "default", "rope_theta": 6.0}
    assert read_rope({"rope_parameters": {"full_attention": one, "sliding_attention": one}}, 1.0, 64) == Rope(theta=5.0)
    with pytest.raises(ValueError, match="differ between layers"):
        read_rope({"rope_parameters": {"full_attention": one, "sliding_attention": other}}, 1.0, 64)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "longrope"}, "'longrope' is not implemented. These are: default, linear"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 3.0}, "with alpha is not implemented"),
    ],
)
def test_an_unknown_scaling_is_refused(scaling: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope({"rope_scaling": scaling}, 1.0, 64)


def test_missing_keys_are_all_named() -> None:
    with pytest.raises(ValueError, match="lacks a, c. Add"):
        take({"b": 1}, {"x": "a", "y": "b", "z": "c"}, {})
    assert take({"b": 1}, {"x": "a", "y": "b"}, {"a": 7}) == {"x": 7, "y": 1}


def test_values_that_are_not_implemented_are_refused() -> None:
    only({"act": "silu"}, {"act": ("silu",), "absent": (True,)})
    with pytest.raises(ValueError, match="act = 'relu', and only 'silu' is implemented"):
        only({"act": "relu"}, {"act": ("silu",)})


def test_names_of_one_activation_are_the_same() -> None:
    assert activation("swish") == "silu" and activation("gelu_fast") == "gelu_new" and activation("relu") == "relu"
    with pytest.raises(ValueError, match="'mish' is not implemented. These are: gelu"):
        activation("mish")
