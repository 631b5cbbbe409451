"""A cache is specs: sizes, shards, slots."""

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.spec import is_spec
from meshloom.models import llama
from meshloom.models.base import Slots
from meshloom.parallel.table import build
from meshloom.serve import cache

C = llama.Config(layers=3, embed=16, heads=4, kv_heads=2, ffn=32, vocab=61, vocab_multiple=32)


def test_specs():
    found = cache.specs(C, 4, 10, "bfloat16")
    assert found.k.shape == found.v.shape == (3, 4, 10, 2, 4)
    assert found.k.axes == ("layer", "work_batch", "length", "kv_heads", "head")
    assert sum(s.nbytes for s in jax.tree.leaves(found, is_leaf=is_spec)) == 2 * 3 * 4 * 10 * 2 * 4 * 2


def test_a_device_has_its_rows_and_heads():
    lay = build("zero3=2 tensor=2", C, 64)
    assert [a.k.shape for a in cache.empty(C, lay, 4, 10, "float32")] == [(2, 10, 1, 4)] * 3
    assert cache.empty(C, build("tensor=4", C, 64), 4, 10, "float32")[0].v.shape == (4, 10, 2, 4), "2 heads over 4 devices stay whole"


def test_fill():
    blank = jnp.zeros((2, 5), jnp.int32)
    slots = cache.fill(Slots(jnp.int32(0), blank, blank), jnp.ones((2, 2)), jnp.array([[0, 1], [3, 4]]), 2)
    assert int(slots.start) == 2
    np.testing.assert_array_equal(slots.segments, [[0, 0, 1, 1, 0]] * 2)
    np.testing.assert_array_equal(slots.positions, [[0, 0, 0, 1, 0], [0, 0, 3, 4, 0]])
