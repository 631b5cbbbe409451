"""`layout: auto`: what the planner chooses for the devices present."""

import jax

from meshloom.plan.hardware import cluster
from meshloom.plan.search import search
from meshloom.plan.space import Allowed
from meshloom.recipes import launch
from meshloom.recipes.auto import NOMINAL, automatic_layout, question_of
from tiny import recipe


def test_it_is_the_planners_best_and_says_why(tmp_path) -> None:
    config = recipe(tmp_path, layout="auto", batch={"sequences": 8})
    found = automatic_layout(config, 8, "cpu")
    best = search(question_of(config, cluster(NOMINAL, (8,), "cpu:8"), Allowed(remats=("none",))), 2).best
    assert best and (found.spelling, found.micro) == (best.spelling, best.micro)
    assert "chosen for 8 devices" in found.said and "; next " in found.said
    chosen = launch.choose(config)
    assert chosen.spelling == best.spelling and chosen.plan.micro == best.micro and found.said in chosen.said


def test_every_process_and_every_start_choose_the_same(tmp_path) -> None:
    config = recipe(tmp_path, layout="auto", batch={"sequences": 8})
    assert automatic_layout(config, 8, "cpu") == automatic_layout(config, 8, "cpu")
    assert NOMINAL.shared, "a fixed machine: nothing is measured"


def test_one_device_is_not_searched_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("meshloom.recipes.auto.search", None)
    config = recipe(tmp_path, layout="auto")
    assert automatic_layout(config, 1, "cpu")[:2] == ("", None)
    assert launch.choose(config, jax.devices()[:1]).spelling == "one device"


def test_what_the_recipe_fixes_stays(tmp_path) -> None:
    config = recipe(tmp_path, layout="auto", batch={"sequences": 8, "micro_batches": 2}, train={"remat": "full"})
    assert automatic_layout(config, 4, "cpu").micro == 2


def test_devices_that_are_not_there_stand_for_known_ones(tmp_path) -> None:
    config = recipe(tmp_path, layout="auto", batch={"sequences": 8})
    assert "8 devices" in automatic_layout(config, 8, "gpu", here=False).said
    assert "whose speed is not known" in automatic_layout(config, 12, "gpu", here=False).said


def test_where_nothing_divides_the_rule_stands_in_and_its_check_speaks(tmp_path) -> None:
    config = recipe(
        tmp_path, layout="auto", batch={"sequences": 4}, model={"embed": 36, "heads": 3, "kv_heads": 3, "head": 12}, data={"seq": 31}
    )
    found = automatic_layout(config, 8, "cpu")
    assert found.spelling and launch.choose(config).spelling == found.spelling


def test_a_way_of_training_that_needs_data_replicas_gets_them(tmp_path) -> None:
    config = recipe(tmp_path, layout="auto", batch={"sequences": 8}, outer={"kind": "diloco", "every": 2})
    assert "data=" in automatic_layout(config, 8, "cpu").spelling


def test_too_little_memory_takes_what_needs_least_and_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("meshloom.recipes.auto.NOMINAL", NOMINAL._replace(memory=8000))
    config = recipe(tmp_path, layout="auto", batch={"sequences": 8})
    assert "nothing fits by its formulas, this needs least" in automatic_layout(config, 8, "cpu").said
