"""A step's time against closed forms, against the timing of schedules, and by what must be true of it."""

import math
import time

import pytest

from meshloom.models.table import MODELS
from meshloom.parallel.pipe import table_of
from meshloom.parallel.simulate import simulate
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost
from meshloom.plan.flops import train_flops
from meshloom.plan.hardware import Cluster, Hardware, Link, read
from meshloom.plan.link import seconds
from meshloom.plan.time import BESIDE, PASSES, Work, duration, passes, rate, step_time
from meshloom.plan.work import works
from meshloom.runner.run import How

SEQ = 1024
MODEL = MODELS["llama"]
C = MODEL.Config(layers=8, embed=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000, max_seq=SEQ, tied=False)
LARGE = MODEL.Config(layers=80, embed=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, max_seq=8192, tied=False)


def ideal(platform: str = "gpu", **change) -> Hardware:
    """Hardware on which only products take time: memory and links are without bound."""
    fast = Link(1e30, 0.0)
    h = Hardware("ideal", platform, 10**12, 1e30, {"bfloat16": 1e15, "float32": 1e14}, 0.5, 8, fast, fast, 0, ())
    return h._replace(**change)


def at(spelling: str, c=C, seq=SEQ, sequences=64, micro=1, remat="none", platform="gpu"):
    return shapes(MODEL, c, build(spelling, c, seq, platform), seq, sequences, micro, How("scan", remat), "bfloat16")


def test_products_alone_take_their_operations_over_the_attainable_rate():
    x, h = at("zero3=8"), ideal()
    w = works(MODEL, x)
    flops = sum(o.flops for o in (*w.forward, *w.again, *w.backward, *w.outside))
    assert step_time(MODEL, "zero3=8", x, Cluster(h, (1, 8))).total == pytest.approx(flops / (1e15 * 0.5))


def test_work_is_bound_by_products_or_by_memory():
    h = ideal(bandwidth=1e12, stream=0.5, op=1e-6)
    assert duration(Work(5e14, 1e9, 3, ""), h, "bfloat16") == pytest.approx(1.0 + 3e-6)
    assert duration(Work(5e8, 1e12, 0, ""), h, "bfloat16") == pytest.approx(2.0)


def test_what_lies_between_products_waits_for_them_where_it_was_measured():
    """The bytes of products hide behind them all the same."""
    h = ideal(bandwidth=1e12, between_products=1e11)
    assert duration(Work(5e14, 1e11, 0, "attention"), h, "bfloat16") == pytest.approx(1.0 + 1.0)
    assert duration(Work(5e14, 1e11, 0, "matrices"), h, "bfloat16") == pytest.approx(1.0)


def test_mfu_is_what_the_efficiency_and_the_pairs_above_the_diagonal_leave():
    """Of ideal hardware: efficiency, less what attention computes beyond what it needs."""
    x, cluster = at("zero3=8"), Cluster(ideal(), (1, 8))
    mfu = step_time(MODEL, "zero3=8", x, cluster).mfu(train_flops(MODEL, C, SEQ) * SEQ * 64, cluster)
    assert 0.45 < mfu < 0.5
    full = step_time(MODEL, "zero3=8", at("zero3=8", remat="full"), cluster).mfu(train_flops(MODEL, C, SEQ) * SEQ * 64, cluster)
    assert 0.7 < full / mfu < 0.85, "a forward more in four, without the last products of the layers and the head's"


@pytest.mark.parametrize(
    "spelling", ["pipe=4", "pipe=4:gpipe", "pipe=4:interleaved2", "pipe=4:zb", "pipe=4:stash", "pipe=2:stash,interleaved2"]
)
def test_a_pipeline_takes_as_long_as_its_simulated_table(spelling):
    micro = 8
    x, h = at(spelling, micro=micro), ideal()
    w = works(MODEL, x)
    one = lambda given: sum(duration(o, h, "bfloat16") for o in given)
    table = table_of(x.layout, micro)
    assert table and x.flow
    # a chunk's costs as those of a whole stage; without late gradients the simulator adds W to B
    costs = tuple(one(given) * table.schedule.chunks for given in (w.forward, (*w.again, *w.backward), w.late))
    told = simulate(table, costs)
    parts = step_time(MODEL, spelling, x, Cluster(h, (1, x.layout.devices))).parts
    layers = sum(p.seconds for p in parts) - micro * one(w.outside)
    assert layers == pytest.approx(told.wall["uniform"])
    bubble = sum(p.seconds for p in parts if p.what == "bubble")
    assert bubble / layers == pytest.approx(told.bubble["uniform"])


def test_slots_that_no_layer_fills_are_bubble():
    """10 layers on 4 stages take the time of 12."""
    more = MODEL.Config(**{**C.model_dump(), "layers": 10})
    full = MODEL.Config(**{**C.model_dump(), "layers": 12})
    cluster = Cluster(ideal(), (1, 4))
    uneven, even = (step_time(MODEL, "pipe=4", at("pipe=4", c=c, micro=8), cluster) for c in (more, full))
    assert uneven.total == pytest.approx(even.total)
    assert uneven.of("bubble") > even.of("bubble")


def test_slots_that_are_left_out_take_no_time():
    """Stages of 1, 3, 1 and 5 layers: a tick takes 5, and 3 where the longest have 3; a stated even split takes what the default does."""
    c = MODEL.Config(**{**C.model_dump(), "layers": 10})
    of = lambda spelling, c=c: step_time(MODEL, spelling, at(spelling, c=c, micro=8), Cluster(ideal(), (1, 4))).total
    five, three = (MODEL.Config(**{**C.model_dump(), "layers": n}) for n in (20, 12))
    assert of("pipe=4:skip,1+3+1+5") == pytest.approx(of("pipe=4:skip", five)) == pytest.approx(of("pipe=4:1+3+1+5"))
    assert of("pipe=4:skip,3+2+3+2") == pytest.approx(of("pipe=4", three))
    assert of("pipe=4:skip,3+2+3+2") < of("pipe=4:skip,1+3+1+5")


def test_dense_layers_first_take_fewer_where_empty_slots_are_left_out():
    """3 dense and 9 sparse layers on 4 stages: slots of both kinds in every part, or three layers in each."""
    model = MODELS["deepseek"]
    c = model.Config(
        layers=12, embed=64, heads=4, ffn=256, vocab=256, experts=8, top=2, expert_ffn=64, first_dense=3, shared=1, groups=2, top_groups=1,
        key_rank=16, query_rank=16, nope_head=8, rope_head=8, value_head=8,
    )  # fmt: skip
    x = lambda spelling: shapes(model, c, build(spelling, c, 64), 64, 8, 8, How(), "bfloat16")
    with_, without = x("pipe=4:skip,3+3+3+3"), x("pipe=4:3+3+3+3")
    assert with_.flow and with_.flow.heavy == (model.kinds(c)[0],) * 3 and len(without.run) == 4 * 6
    assert passes(with_).share[0] == 2 * passes(without).share[0]


def slow(platform: str, between: float = 1e11) -> Cluster:
    return Cluster(ideal(platform, inside=Link(1e9, 1e-6), between=Link(between, 1e-6)), (1, 8))


def test_on_a_cpu_nothing_hides():
    x, cluster = at("zero3=8", platform="cpu"), slow("cpu")
    moved = [c for c in step_cost("zero3=8", x)]
    parts = step_time(MODEL, "zero3=8", x, cluster).parts
    assert all(p.hidden == 0 for p in parts)
    told = sum(p.seconds for p in parts if "over zero3" in p.what)
    assert told == pytest.approx(sum(seconds(c, x.layout, cluster) for c in moved))


@pytest.mark.parametrize("inside", [1e9, 1e12])
def test_weights_hide_behind_their_pass_and_one_layer_shows(inside):
    x = at("zero3=8")
    cluster = Cluster(ideal(inside=Link(inside, 0.0)), (1, 8))
    w = works(MODEL, x)
    one = lambda given: sum(duration(o, cluster.hardware, "bfloat16") for o in given)
    behind = {"forward": one(w.forward), "backward": one(w.backward)}
    shown = 0.0
    for turn, work in behind.items():
        total = sum(seconds(c, x.layout, cluster) for c in step_cost("zero3=8", x) if BESIDE.get(c.place) == turn)
        shown += max(total - work, total / C.layers)
    parts = [p for p in step_time(MODEL, "zero3=8", x, cluster).parts if "every micro-batch" in p.why and "over" in p.what]
    assert sum(p.seconds for p in parts) == pytest.approx(shown)
    whole = sum(seconds(c, x.layout, cluster) for c in step_cost("zero3=8", x) if c.place in BESIDE)
    assert sum(p.seconds + p.hidden for p in parts) == pytest.approx(whole)


def test_tensor_parallelism_is_waited_for():
    x, cluster = at("tensor=8"), slow("gpu")
    inside = [p for p in step_time(MODEL, "tensor=8", x, cluster).parts if "a layer's halves" in p.why]
    assert inside and all(p.hidden == 0 and p.seconds > 0 for p in inside)


def test_a_ring_goes_around_while_blocks_are_multiplied():
    x = at("context=8")
    ring = [p for p in step_time(MODEL, "context=8", x, slow("gpu", 1e9)).parts if p.what == "collective-permute over context"]
    assert ring and all(p.hidden > 0 for p in ring)


def test_slower_links_make_longer_steps():
    times = [
        step_time(MODEL, "zero3=16", at("zero3=16"), Cluster(ideal(inside=Link(r, 1e-6), between=Link(r / 8, 1e-5)), (2, 8))).total
        for r in (1e12, 1e11, 1e10)
    ]
    assert times == sorted(times) and times[2] > times[0]


@pytest.mark.parametrize(
    "on, spelling, micro", [("h100:8x8", "zero3=8 tensor=8", 1), ("v5p:4x4x4", "zero3=64", 1), ("h100:8x8", "pipe=8 tensor=8", 16)]
)
def test_eighty_layers_take_milliseconds(on, spelling, micro):
    cluster = read(on)
    x = at(spelling, c=LARGE, seq=8192, sequences=64, micro=micro, remat="full", platform=cluster.hardware.platform)
    took = []
    for _ in range(8):
        begin = time.process_time()
        told = step_time(MODEL, spelling, x, cluster)
        took.append(time.process_time() - begin)
    assert min(took) < 0.01
    mfu = told.mfu(train_flops(MODEL, LARGE, 8192) * 8192 * 64, cluster)
    assert 0.1 < mfu < 0.75 and math.isfinite(told.total)


def test_refusals():
    with pytest.raises(ValueError, match="The layout takes 16 devices, and h100:1x8 has 8. Ask for a larger cluster"):
        step_time(MODEL, "zero3=16", at("zero3=16"), read("h100:1x8"))
    with pytest.raises(ValueError, match="v5p has no rate of float16 products; it has bfloat16, int8. Choose one of these"):
        rate(read("v5p").hardware, "float16")
    assert rate(read("v5p").hardware, "float32") == 459e12, PASSES
