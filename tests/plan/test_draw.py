"""What pictures show is what the layout and the specs say."""

import itertools
import math

import numpy as np
import pytest

from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh
from meshloom.core.order import arrange
from meshloom.core.spec import is_spec, spec
from meshloom.core.tree import named_leaves
from meshloom.parallel.table import build
from meshloom.plan.draw import coordinates, cuts, holders, labels, spans, visible
from meshloom.plan.memory import stored
from plan.drawn import SPELLINGS, drawn
from programs import config


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_parts_are_the_layouts(spelling: str) -> None:
    d = drawn(spelling)
    model, c = config("llama", layers=3)
    lay, leaves = build(spelling, c, 16, "gpu"), named_leaves(model.specs(c), is_spec)
    assert sorted(path for held in d.weights for path in held.paths) == sorted(leaves)
    assert sum(held.parts[0].bytes for held in d.weights) == stored(lay, model.specs(c))
    for held in d.weights:
        rest, step, live, grad = held.parts
        s, n = leaves[held.paths[0]], len(held.paths)
        assert [p.shape for p in (rest, step, grad)] == [lay.shard_shape(t, s) for t in ("rest", "step", "grad")]
        inside = s.axes[0] == "layer"
        assert live.shape == lay.shard_shape("live", s)[inside:]
        assert (rest.bytes, grad.bytes) == tuple(4 * n * math.prod(lay.shard_shape(t, s)) for t in ("rest", "grad"))
        assert (step.bytes, live.bytes) == tuple(2 * n * math.prod(p.shape) for p in (step, live))


def test_a_kind_has_the_same_axes_in_any_order() -> None:
    kinds = {frozenset(held.axes): held.paths for held in drawn("tensor=2").weights}
    assert kinds[frozenset(("layer", "embed", "heads", "head"))] == ("layers.attn.q", "layers.attn.o")
    assert kinds[frozenset(("layer", "embed", "ffn"))] == ("layers.mlp.up", "layers.mlp.gate", "layers.mlp.down")


@pytest.mark.parametrize("spelling", SPELLINGS[1:6])
def test_the_marked_piece_and_its_holders_are_jaxs(spelling: str) -> None:
    """Against the index that JAX's sharding gives each device, for every device and every kind of array."""
    _, c = config("llama", layers=3)
    lay = build(spelling, c, 16, "gpu")
    mesh = np.arange(lay.devices).reshape(tuple(lay.sizes.values()))
    for device in range(lay.devices):
        d = drawn(spelling, device=device)
        assert d.place == dict(zip(lay.sizes, (int(i) for i in np.argwhere(mesh == device)[0])))
        for held in (*d.weights, *d.acts):
            for part in held.parts:
                own = {cut.name: cut.own for cut in part.cuts}
                same = [
                    n
                    for n in range(lay.devices)
                    if all(a.own == b.own for a, b in zip(part.cuts, _cuts_of(lay, part, n)))
                ]  # fmt: skip
                assert holders(d, part.cuts, own) == same and device in same and len(same) == part.copies


def _cuts_of(lay: Layout, part, device: int):
    s = spec({cut.name: cut.size for cut in part.cuts}, " ".join(cut.name for cut in part.cuts))
    return cuts(lay, part.moment, s, coordinates(lay.sizes, device))


def test_pieces_count_as_in_a_sharding_of_jax() -> None:
    """An axis over two mesh axes: the first named counts slowest."""
    import jax
    from jax.sharding import NamedSharding

    lay = Layout({"a": 1, "b": 1}, acts={"batch": ("a", "b")})
    assert NamedSharding(make_mesh(lay, jax.devices()[:1]), lay.partition("acts", ("batch",))).spec == jax.P(("a", "b"))
    lay = Layout({"a": 2, "b": 3}, acts={"batch": ("b", "a")})
    s = spec({"batch": 12}, "batch")
    owns = [cuts(lay, "acts", s, {"a": a, "b": b})[0].own for a, b in itertools.product(range(2), range(3))]
    assert owns == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_activations_are_cut_as_their_table_says(spelling: str) -> None:
    d, (_, c) = drawn(spelling), config("llama", layers=3)
    lay = build(spelling, c, 16, "gpu")
    acts = {held.paths[0]: held for held in d.acts}
    rows = 64 // lay.size(lay.batch)
    assert acts["tokens"].parts[0].shape == (rows, 16) and acts["tokens"].parts[0].bytes == rows * 16 * 4
    assert acts["residual stream"].parts[0].shape == (rows, 16 // lay.size(lay.acts.get("seq", ())), 32)
    assert acts["queries"].parts[0].shape == (rows, 16, 8 // lay.size(lay.acts.get("heads", ())), 8)
    assert set(acts) == {"tokens", "residual stream", "input of a layer's half", "queries", "keys, values", "inside the MLP", "logits"}


@pytest.mark.parametrize("optimizer, kinds", [("adamw", 2), ("lion", 1)])
def test_optimizer_state_stands_beside_its_parameters(optimizer: str, kinds: int) -> None:
    d = drawn("zero1=4", optimizer=optimizer)
    assert not d.kept
    q = next(held for held in d.weights if "layers.attn.q" in held.paths)
    assert q.parts[0].note == f"optimizer: + {kinds * q.parts[0].bytes / 1024:.1f} KiB"


def test_factored_state_has_rows_of_its_own() -> None:
    d = drawn("zero1=4", optimizer="adafactor")
    said = {line for held in d.kept for line in labels(held.paths)}
    assert {"optimizer.rows: embed", "optimizer.rows.attn: q, k, v", "optimizer.columns.attn: k, v"} <= said
    assert {held.axes for held in d.kept} == {
        ("vocab",), ("embed",), ("layer", "embed"), ("layer", "ffn"), ("layer", "heads", "head"), ("layer", "kv_heads", "head"),
    }  # fmt: skip


def test_logits_exist_a_chunk_at_a_time() -> None:
    logits = next(held.parts[0] for held in drawn("tensor=2", micro=1, seq=64).acts if held.paths == ("logits",))
    assert logits.shape == (64, 64, 192) and logits.note == "" and logits.bytes == 64 * 64 * 192 * 4


def test_tokens_of_a_ring_are_those_that_the_host_gives_a_device() -> None:
    for spelling, device in (("context=4", 1), ("context=2 ulysses=2", 2)):
        d, lay = drawn(spelling, device=device), build(spelling, config("llama", layers=3)[1], 16, "gpu")
        tokens = next(held.parts[0] for held in d.acts if held.paths == ("tokens",))
        place = sorted(np.split(arrange(lay, np.arange(16)), 4)[device])
        assert tokens.note == f"places {spans(place)}"


def test_heads_are_split_further_inside_attention() -> None:
    acts = {held.paths[0]: held.parts[0] for held in drawn("ulysses=2 tensor=2").acts}
    assert acts["queries"].shape == (64, 8, 4, 8) and acts["queries in attention"].shape == (64, 16, 2, 8)
    assert "queries in attention" not in {held.paths[0] for held in drawn("context=2").acts}


def test_embed_is_whole_inside_a_layer_unless_its_weights_are_split() -> None:
    shape = lambda spelling: next(held.parts[0].shape for held in drawn(spelling).acts if held.paths == ("input of a layer's half",))
    assert shape("tensor2d=2x2") == (32, 16, 32) and shape("tensor3d=2x2x2") == (32, 16, 16)


def test_experts_have_room_for_the_tokens_of_all_devices_that_split_them() -> None:
    inside = next(held.parts[0] for held in drawn("expert=4", "moe").acts if held.paths == ("inside the experts",))
    assert inside.shape == (8 // 4, 64 * 16 * 2 // 8, 24) and inside.note == "in even shares"


def test_the_mesh_is_explained() -> None:
    d = drawn("zero3=4 tensor=2 sequence")
    zero, tensor = d.axes
    assert (zero.name, zero.size, zero.asked) == ("zero3", 4, "zero3=4") and tensor.asked == "tensor=2 sequence"
    assert zero.said == "splits embed (rest, step, grad); batch (acts)"
    assert tensor.said == "splits heads, kv_heads, ffn, vocab (always); seq (acts)"
    assert "sequence is split" in tensor.what and d.devices == 8
    rows, cols = drawn("tensor2d=2x2").axes
    assert (rows.asked, cols.asked) == ("tensor2d=2x2",) * 2 and "matrices" in rows.what and cols.what == ""


def test_refuses_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="There is no device 8: this layout has 8, counted from 0. Use --device 0 to 7."):
        drawn("data=8", device=8)


def test_words_for_people() -> None:
    assert labels(("embed", "layers.attn.q", "layers.attn.o", "layers.attn_norm")) == ["embed, attn_norm", "attn: q, o"]
    assert spans([0, 1, 2, 3, 6, 8, 9]) == "0-3 6 8 9"
    assert visible(4, 3) == [0, 1, 2, 3]
    assert visible(64, 9, 4) == [0, 1, None, 9, None, 63]
    assert visible(64, 63, 4) == [0, 1, None, 63]


def test_a_pipeline_is_drawn_as_its_stages_hold_it() -> None:
    """3 layers on 2 stages of 2 slots: between steps parameters are split as ZeRO-1 splits them; in a step a stage has its own layers."""
    d = drawn("pipe=2 zero1=2 tensor=2", device=5)
    model, c = config("llama", layers=3)
    lay = build("pipe=2 zero1=2 tensor=2", c, 16, "gpu")
    assert sum(held.parts[0].bytes for held in d.weights) == stored(lay, model.specs(c))
    kinds = {held.axes: held for held in d.weights}
    rest, step, live, grad = kinds["layer", "embed", "heads", "head"].parts
    assert [(cut.over, cut.own) for cut in rest.cuts] == [((), 0), (("zero1", "pipe"), 1), (("tensor",), 1), ((), 0)]
    assert rest.shape == (3, 8, 4, 8) and step.shape == grad.shape == (2, 32, 4, 8) and live.shape == (32, 4, 8)
    assert (rest.copies, step.copies, live.copies) == (1, 2, 2) and step.note == "layer 2, gathered"
    assert [(cut.name, cut.over) for cut in kinds["vocab", "embed"].parts[0].cuts] == [("vocab", ("tensor", "pipe")), ("embed", ("zero1",))]
    (pipe,) = (axis for axis in d.axes if axis.name == "pipe")
    assert "2 stages of 2 layers, 2 micro-batches" in pipe.what and "stage 0: layers 0-1; stage 1: layer 2" in pipe.what
    acts = {held.paths[0]: held.parts[0] for held in d.acts}
    assert acts["tokens"].copies == 4 and acts["residual stream"].copies == 2, "stages work on different micro-batches"
