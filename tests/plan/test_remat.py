"""What a model's layers keep under a limit: against every split of its layers between two words, by the same formulas."""

import itertools
import time

import pytest

from meshloom.core.remat import words_of
from meshloom.models.base import Kind
from meshloom.models.known import known
from meshloom.parallel.table import build
from meshloom.plan.chain import peak
from meshloom.plan.cost import shapes
from meshloom.plan.hardware import Cluster, read
from meshloom.plan.memory import working
from meshloom.plan.remat import choose, links_of
from meshloom.plan.time import step_time
from meshloom.runner.run import How, stacks
from plan.questions import CPU
from programs import config

GB = 10**9


def asked(spelling: str = "zero3=64", on: str = "h100:8x8", name: str = "llama3-8b", micro: int = 1, sequences: int = 64):
    model, c = known(name)
    cluster = read(on)
    lay = build(spelling, c, 8192, cluster.hardware.platform)
    return model, shapes(model, c, lay, 8192, sequences, micro, How(), "bfloat16", False), spelling, cluster


def seconds(model, x, spelling, cluster, remat: str) -> float:
    return step_time(model, spelling, x._replace(remat=remat), cluster).total


def test_is_no_slower_than_any_split_between_two_words() -> None:
    given = model, x, _, cluster = asked()
    links = links_of(model, x, cluster, lambda remat: seconds(*given, remat))
    row = {choice.word: choice for choice in links.chain[0]}
    limit = 30 * GB
    got = choose(*given, limit)
    assert got.peak <= limit and len(words_of(got.remat, 32)) == 32
    best = min(
        sum(c.seconds for c in pieces)
        for a, b in itertools.permutations(("none", "selective", "full", "offload"), 2)
        for n in range(33)
        if peak(pieces := [row[a]] * n + [row[b]] * (32 - n), links.end) + links.outside <= limit
    )
    assert got.seconds <= best * (1 + 1e-6)
    assert got.seconds == pytest.approx(seconds(*given, got.remat) - seconds(*given, "none"), rel=0.02)
    assert got.seconds < got.alone["full"][1] and got.alone["none"][0] > limit


def test_nothing_is_computed_again_where_all_fits() -> None:
    assert choose(*asked(), 500 * GB)[:2] == ("none", 0.0)


@pytest.mark.parametrize("limit", [20, 30, 40])
def test_the_peak_is_that_of_the_plan(limit: int) -> None:
    """What `meshloom layout` and a run say of the chosen pattern is what it was chosen by; a group's shares of an input are rounded down."""
    model, x, *_ = given = asked()
    got = choose(*given, limit * GB)
    assert "," in got.remat
    assert sum(working(model, x._replace(remat=got.remat)).values()) == pytest.approx(got.peak, rel=1e-6)


def test_an_update_that_does_not_fit_is_no_matter_of_layers() -> None:
    """On a CPU, whose update takes two copies of the gradients; one sequence of 64 tokens keeps next to nothing."""
    model, c = known("llama3-8b")
    lay, cluster = build("data=8", c, 64, "cpu"), Cluster(CPU, (1, 8))
    given = (model, shapes(model, c, lay, 64, 8, 1, How(), "float32", False), "data=8", cluster)
    with pytest.raises(
        ValueError, match=r"the optimizer's update takes [\d.]+ GB whatever they keep, [\d.]+ GB more. Use a layout that splits more"
    ):
        choose(*given, 10 * GB)


def test_less_memory_takes_more_time() -> None:
    given = asked()
    times = [choose(*given, limit * GB).seconds for limit in (60, 40, 20, 12)]
    assert times == sorted(times) and len(set(times)) > 2


def test_what_is_stored_counts() -> None:
    given = asked()
    assert choose(*given, 40 * GB, 10 * GB).remat == choose(*given, 30 * GB).remat


def test_says_by_how_much_nothing_fits() -> None:
    given = asked()
    with pytest.raises(
        ValueError,
        match=r"No choice of what layers keep fits 1 GB: the one that needs least, .*full.*, takes [\d.]+ GB, [\d.]+ GB more. Use smaller",
    ):
        choose(*given, GB)


def test_a_pipeline_chooses_for_the_slots_of_a_part() -> None:
    given = asked("pipe=4 zero3=16", micro=8, sequences=512)
    alone = choose(*given, 10**15).alone
    limit = (alone["none"][0] + alone["full"][0]) // 2
    got = choose(*given, limit)
    assert len(words_of(got.remat, 8)) == 8 and got.peak <= limit and got.remat not in ("none", "full")


def test_on_a_cpu_what_is_computed_again_is_a_loop() -> None:
    model, c = config("llama", layers=7)
    x = shapes(model, c, build("", c, 16), 16, 64, 1, How(), "float32", False)
    given = model, x, "", Cluster(CPU._replace(flops={"float32": 1e9}), (1, 1))  # products take longer than copies of what is kept
    alone = choose(*given, 10**15).alone
    patterns = set()
    for share in range(1, 20):
        got = choose(*given, alone["full"][0] + share * (alone["none"][0] - alone["full"][0]) // 20)
        patterns.add(got.remat)
        assert got.peak <= got.limit and len(words_of(got.remat, 7)) == 7
        assert all(s.repeat > 1 for s in stacks((Kind(),) * 7, got.remat) if s.remat != "none"), got.remat
    assert len(patterns) > 4


def test_a_pattern_of_kinds_stays_whole() -> None:
    more = dict(variant="smollm3", qk_norm=False, qkv_bias=False, o_bias=False, rotary_layers=(True, True, True, False) * 3)
    model, c = config("llama", layers=12, **more)
    x = shapes(model, c, build("", c, 16, "gpu"), 16, 64, 1, How(), "float32", False)
    given = model, x, "", read("h100:1x1")
    links = links_of(*given[:2], given[3], lambda remat: seconds(*given, remat))
    assert links.widths == (4, 4, 4) and {choice.word for choice in links.chain[0]} == {"none", "selective", "full", "offload", "full:4"}


def test_offload_is_offered_where_there_is_a_way_to_the_host() -> None:
    assert "offload" in choose(*asked(), 500 * GB).alone
    model, x, spelling, cluster = asked()
    without = cluster._replace(hardware=cluster.hardware._replace(host=0.0))
    assert "offload" not in choose(model, x, spelling, without, 500 * GB).alone
    with pytest.raises(ValueError, match="h100 has no rate to its host's memory, so remat 'offload' has no time"):
        step_time(model, spelling, x._replace(remat="offload"), without)


def test_is_quick() -> None:
    given = asked(name="llama3-70b")
    choose(*given, 10**15)
    took = []
    for _ in range(3):
        start = time.process_time()
        choose(*given, 150 * GB)
        took.append(time.process_time() - start)
    assert min(took) < 0.05, took
