"""Stored bytes by formula, as counted on arrays; the estimate of a step against the compiler's number."""

import jax
import numpy as np
import pytest

from meshloom.core.mesh import make_mesh, shardings
from meshloom.models.base import KV
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.layer import kept
from meshloom.plan.memory import counted, device_memory, kv_cache, stored, working
from meshloom.runner.run import How
from programs import config, gradient, weights


@pytest.mark.parametrize("spelling", ["", "data=4", "zero1=8", "data=2 zero3=2 tensor=2"])
def test_formula_equals_the_arrays(spelling) -> None:
    model, c = config("llama")
    lay, specs = build(spelling, c, 16), model.specs(c)
    params = jax.tree.map(jax.device_put, weights("llama"), shardings(make_mesh(lay), lay, "rest", specs))
    assert counted(params) == stored(lay, specs) > 0


def test_counts_the_fullest_device() -> None:
    assert counted([jax.device_put(np.ones(4, np.float32), jax.devices()[i]) for i in (0, 1, 1)]) == 32 and counted(None) == 0


def test_cache_of_keys_and_values() -> None:
    _, c = config("llama")
    one = KV(*[np.zeros((3, 20, c.kv_heads, c.head), "float16")] * 2)
    assert kv_cache(c, build("", c, 16), 3, 20, "float16") == c.layers * sum(a.nbytes for a in (one.k, one.v))
    assert kv_cache(c, build("tensor=2", c, 16), 3, 20, "float16") * 2 == kv_cache(c, build("tensor=4", c, 16), 3, 20, "float16")


def test_zero3_works_with_one_layer() -> None:
    model, c = config("gpt2", layers=8)
    at = {s: working(model, shapes(model, c, build(s, c, 16), 16, 8, 1, How(), "float32")) for s in ("zero1=8", "zero2=8", "zero3=8")}
    assert at["zero3=8"]["weights"] == 0 < at["zero2=8"]["weights"] and at["zero2=8"]["gradients"] < 0.5 * at["zero1=8"]["gradients"]


def test_a_groups_own_copy_is_counted() -> None:
    """Nested stages hold each group's share in the type of the arithmetic beside the master: 2 bytes a parameter over the inner devices."""
    model, c = config("gpt2", layers=8)
    at = lambda s: working(model, shapes(model, c, build(s, c, 16), 16, 16, 2, How(), "bfloat16"))["weights"]
    share = sum(s.size for s in shapes(model, c, build("", c, 16), 16, 8, 1, How(), "bfloat16").leaves.values() if "embed" in s.axes)
    assert at("zero1=2 zero3=4") - at("zero3=8") == 2 * (share // 4 - share // 8)


def test_remat_keeps_less() -> None:
    model, c = config("llama")
    full, some, none = (
        kept(shapes(model, c, build("", c, 16), 16, 8, 1, How("scan", r), "float32")) for r in ("full", "selective", "none")
    )
    assert full == 8 * 16 * 32 * 4 < some < none


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_the_estimate_is_near_the_compilers_number(remat) -> None:
    more = (("layers", 6),)
    model, c = config("llama", layers=6)
    x = shapes(model, c, build("", c, 16), 16, 32, 1, How("scan", remat), "float32")
    ratio = sum(working(model, x).values()) / gradient("llama", "", 1, "scan", remat, sequences=32, more=more).temp
    assert 0.5 < ratio < 2, ratio


def test_a_device_needs_what_it_stores_and_what_a_step_adds() -> None:
    model, c = config("llama")
    x = shapes(model, c, build("zero3=8", c, 16), 16, 8, 1, How(), "float32")
    found = device_memory(model, x, {"parameters": 100, "optimizer": 200})
    assert list(found.kinds)[:2] == ["parameters", "optimizer"]
    assert found.total == 300 + sum(working(model, x).values())
