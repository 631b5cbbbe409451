"""Sizes that follow from others, and sizes that do not fit."""

import jax.numpy as jnp
import pytest

from meshloom.core.spec import ONES
from meshloom.models.base import ModelConfig, unembed
from meshloom.models.llama import Llama

SIZES = dict(layers=1, embed=12, heads=4, vocab=257)


def test_sizes_that_are_not_given_follow_from_the_others() -> None:
    c = ModelConfig(**SIZES)
    assert (c.head, c.kv_heads, c.ffn, c.vocab_padded) == (3, 4, 48, 384)
    c = ModelConfig(**SIZES, head=5, kv_heads=2, ffn=7, vocab_multiple=1)
    assert (c.head, c.kv_heads, c.ffn, c.vocab_padded) == (5, 2, 7, 257)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(heads=5), "embed 12 is not a multiple of heads 5. Change one of them"),
        (dict(kv_heads=3), "4 query heads cannot share 3 key/value heads evenly"),
        (dict(layers=0), "greater than or equal to 1"),
        (dict(heds=4), "Extra inputs are not permitted"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SIZES, **change})


def test_a_spec_knows_its_axes_and_its_padding() -> None:
    c = ModelConfig(**SIZES)
    assert (c.spec("vocab embed").shape, c.spec("vocab embed").used, c.spec("vocab embed").init.std) == ((384, 12), (257, 12), 0.02)
    assert c.spec("embed", ONES).init.mean == 1 and c.zeros("heads head").init == (0, 0)


def test_the_head_is_the_embedding_where_tied() -> None:
    a, b = jnp.zeros(2), jnp.ones(2)
    assert unembed(Llama(a, None, None, None)) is a and unembed(Llama(a, None, None, b)) is b
