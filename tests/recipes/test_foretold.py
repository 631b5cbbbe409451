"""The line of a dry run that says how long a step takes."""

import re

import pytest

import tiny
from meshloom.plan import hardware
from meshloom.plan.hardware import at_hand, read
from meshloom.plan.time import Part, Time
from meshloom.recipes import launch
from meshloom.recipes.foretold import line, shares


def test_a_line_says_time_rate_and_parts(tmp_path):
    config = tiny.recipe(tmp_path, layout="zero3=2")
    said = line(config, launch.choose(config), read("h100:1x8"))
    found = re.fullmatch(r"time       (\S+) s a step by formula on h100:1x8, ([\d,]+) tokens a second, MFU \d+%: (.+)", said)
    assert found, said
    seconds, tokens = float(found[1]), int(found[2].replace(",", ""))
    assert seconds * tokens == pytest.approx(4 * 32, rel=0.02), "sequences of the tiny recipe"
    assert "over zero3" in found[3], "small arrays: latency rules"


def test_what_cannot_be_told_is_said(tmp_path):
    config = tiny.recipe(tmp_path, layout="zero3=4")
    assert line(config, launch.choose(config), read("h100:1x2")).startswith(
        "time       not known: The layout takes 4 devices, and h100:1x2 has 2."
    )


def test_parts_of_one_kind_are_added_up():
    told = Time((Part("compute", "a", 1.0), Part("compute", "b", 2.0), Part("bubble", "c", 1.0), Part("optimizer", "d", 0.001)), "float32")
    assert shares(told) == [("compute", pytest.approx(3 / 4.001)), ("bubble", pytest.approx(1 / 4.001))]


def test_a_dry_run_has_the_line_where_the_devices_are_known(tmp_path, monkeypatch):
    config = tiny.recipe(tmp_path)
    chosen = launch.choose(config)
    assert not [said for said in launch.describe_plan(config, chosen) if said.startswith("time ")], "a CPU is not measured for that"
    monkeypatch.setattr(launch, "at_hand", lambda: read("v5e:1"))
    assert [said for said in launch.describe_plan(config, chosen) if said.startswith("time ")]


def test_what_is_at_hand_is_known_without_measuring(monkeypatch):
    monkeypatch.setattr(hardware, "of_cpu", lambda kept: pytest.fail("measured"))
    assert at_hand() is None
