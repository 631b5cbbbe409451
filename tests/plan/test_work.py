"""A device's work by shapes, against the operations that the compiler counts, and against the whole model's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from meshloom.core.mesh import make_mesh
from meshloom.core.spec import abstract
from meshloom.models.freeze import frozen
from meshloom.models.table import MODELS
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.flops import train_flops, visible_keys
from meshloom.plan.plan import Plan
from meshloom.plan.work import pairs, works
from meshloom.recipes.verify import QUICK
from meshloom.runner.run import How
from meshloom.train.gradient import make_gradient
from programs import rows

SEQ, SEQUENCES = 128, 16
SIZES = dict(layers=4, embed=128, heads=8, kv_heads=8, ffn=384, vocab=512, max_seq=256)


def model_of(family: str = "llama", **more):
    model = MODELS[family]
    return model, model.Config(**{**SIZES, **more})


def at(model, c, spelling: str = "", micro: int = 1, remat: str = "none", platform: str = "cpu", packed: bool = False):
    lay = build(spelling, c, SEQ, platform)
    return shapes(model, c, lay, SEQ, SEQUENCES, micro, How("unroll", remat), "float32", packed)


def products(given) -> float:
    return sum(one.flops for one in given)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_operations_are_those_that_the_compiler_counts(remat):
    """Products alone are 96 to 100 % of all that XLA counts in the gradient's program on one device: the rest is done element by element."""
    model, c = model_of()
    lay = build("", c, SEQ)
    plan = Plan(make_mesh(lay), lay, How("unroll", remat), 1, "float32", False)
    given = rows(SEQUENCES, 1, seq=SEQ)
    given = replace(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given), segments=None)
    program = jax.jit(make_gradient(model, c, plan, lm(0.0))).lower(abstract(model.specs(c)), given, None, jnp.float32(1))
    counted = program.compile(compiler_options=QUICK).cost_analysis()["flops"]  # type: ignore[index]
    w = works(model, at(model, c, remat=remat))
    ours = products([*w.forward, *w.again, *w.backward, *w.outside])
    assert 0.9 < ours / counted <= 1.0


@pytest.mark.parametrize(
    "spelling", ["data=8", "zero3=8", "tensor=4 zero1=2", "tensor2d=2x2", "tensor2d=2x2:stream", "tensor3d=8", "ulysses=2 zero1=4", "pipe=2 tensor=2"]
)  # fmt: skip
def test_a_layout_shares_the_products_of_the_model_out(spelling):
    model, c = model_of()
    x = at(model, c, spelling)
    w, part = works(model, x), (x.layout.stages if x.flow else 1)
    assert part == 1 or x.parts == 2
    one = lambda name, given: sum(work.flops for work in given if work.what == name) * x.layout.devices
    tokens = SEQ * SEQUENCES
    matrices = train_flops(model, c, SEQ) - 6 * c.vocab_padded * c.embed - 3 * 4 * c.layers * c.heads * c.head * visible_keys(SEQ, None)
    assert one("matrices", [*w.forward, *w.backward]) == pytest.approx(matrices * tokens)
    assert one("head and loss", w.outside) == pytest.approx(6 * c.vocab_padded * c.embed * tokens)


def test_keys_of_few_heads_are_computed_by_all():
    """8 devices with 2 heads of keys multiply those matrices whole."""
    model, c = model_of(kv_heads=2)
    own, alone = (products(o for o in works(model, at(model, c, s)).forward if o.what == "matrices") for s in ("tensor=8", ""))
    keys = 2 * SEQ * SEQUENCES * c.layers * 2 * c.embed * c.kv_heads * c.head
    assert own == pytest.approx((alone - keys) / 8 + keys)


@pytest.mark.parametrize("spelling", ["expert=4", "expert=2:folded tensor=2", "zero1=4", "expert=2 zero3=2"])
@pytest.mark.parametrize("more", [{}, {"capacity": 1.5}])
def test_experts_are_balanced(spelling, more):
    model, c = model_of("moe", experts=8, top=2, expert_ffn=96, **more)
    w = works(model, at(model, c, spelling))
    ours = sum(o.flops for o in w.forward if o.what == "experts") * 4
    rows = SEQ * SEQUENCES * c.layers * 2 * more.get("capacity", 1)
    assert ours == pytest.approx(2 * rows * 3 * c.embed * 96)


def test_rows_of_experts_elsewhere_are_moved_too():
    """Without a capacity each of 8 devices sorts the rows of all; with one, its own share."""
    model, c = model_of("moe", experts=8, top=2, expert_ffn=96)
    moved = lambda c, spelling: next(o for o in works(model, at(model, c, spelling)).forward if o.what == "norms, activations").bytes
    rows = SEQ * SEQUENCES // 8 * 2 * (6 * c.embed + 3 * 96) * 4 * c.layers
    assert moved(c, "expert=8") - moved(c, "zero1=8") == pytest.approx(7 * rows)
    few = type(c)(**{**c.model_dump(), "capacity": 1.0})
    assert moved(few, "expert=8") == pytest.approx(moved(few, "zero1=8")) == pytest.approx(moved(c, "zero1=8"))


def test_what_is_frozen_has_no_gradient_of_its_own():
    model, c = model_of()
    still = frozen(model, c, ("layers.mlp.*",))
    free, held = (products(works(m, at(m, c)).backward) for m in (model, still))
    assert free - held == pytest.approx(2 * SEQ * SEQUENCES * c.layers * 3 * c.embed * c.ffn)


@pytest.mark.parametrize("remat, matrices, attention, between", [("none", 0, 0, 0), ("selective", 0, 1, 1), ("full", 1, 1, 1)])
def test_what_remat_computes_again(remat, matrices, attention, between):
    model, c = model_of()
    w = works(model, at(model, c, remat=remat))
    made = lambda given, what, field: sum(getattr(o, field) for o in given if o.what == what)
    ending = 2 * SEQ * SEQUENCES * c.layers * c.embed * c.ffn
    assert made(w.again, "matrices", "flops") == pytest.approx(matrices * (made(w.forward, "matrices", "flops") - ending))
    assert made(w.again, "attention", "flops") == attention * made(w.forward, "attention", "flops")
    assert made(w.again, "norms, activations", "bytes") == between * made(w.forward, "norms, activations", "bytes")


def test_a_ring_keeps_its_result_under_selective():
    model, c = model_of()
    w = works(model, at(model, c, "context=4", remat="selective"))
    assert not [o for o in w.again if o.what == "attention"]
    assert products(w.forward) < products(works(model, at(model, c)).forward) / 3


def test_a_stage_that_keeps_inputs_runs_its_part_again():
    model, c = model_of()
    kept, again = (works(model, at(model, c, f"pipe=2{option}", micro=4)) for option in (":stash", ""))
    assert products(kept.again) == 0 and products(again.again) == products(again.forward)
    late = works(model, at(model, c, "pipe=2:zb", micro=4))
    assert products(late.late) > 0 and products(late.late) + products(late.backward) == pytest.approx(products(again.backward))


def test_pairs_that_rows_compute():
    assert pairs("reference", 100, None) == 100 * 100
    assert pairs("blocks", 1024, None) == sum(128 * 128 * (i + 1) for i in range(8))
    assert 4096 * 4097 / 2 < pairs("cudnn", 4096, None) < pairs("blocks", 4096, None)
    assert pairs("blocks", 1024, 64) < pairs("blocks", 1024, None) / 4


def test_the_update_is_of_what_a_device_keeps():
    model, c = model_of()
    all_, part = (next(o for o in works(model, at(model, c, s)).once if o.what == "update").bytes for s in ("data=8", "zero1=8"))
    assert part < all_ / 7
