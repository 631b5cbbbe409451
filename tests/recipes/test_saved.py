"""Plans as files, and a recipe that takes one."""

import pytest

from meshloom.core.config import load, parse_sets, to_tree
from meshloom.recipes import saved
from meshloom.recipes.load import load_recipe, tree
from meshloom.recipes.run import RunConfig


def a_plan(**over) -> saved.Saved:
    """A plan of the quickstart for two devices."""
    config = load_recipe("quickstart")
    fields = dict(model=to_tree(config)["model"], hardware="cpu:2", devices=2, seq=256, sequences=16, precision="fp32", layout="zero3=2",
                  micro_batches=4, remat="full", runner="scan", predicted={"seconds": 1.5})  # fmt: skip
    return saved.Saved(**{**fields, **over})


def test_a_plan_reads_back_equal(tmp_path) -> None:
    saved.save(a_plan(), tmp_path / "plan.yaml")
    assert to_tree(saved.read(tmp_path / "plan.yaml")) == to_tree(a_plan())
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.yaml"]


def test_a_recipe_takes_a_plan_and_set_still_wins(tmp_path) -> None:
    taken = saved.take(tree("quickstart"), a_plan(), parse_sets(["train.remat=none", "train.steps=3"]), tmp_path / "p.yaml")
    config = load(RunConfig, taken.tree)
    assert (config.layout, config.batch.micro_batches, config.train.remat, config.train.runner, config.train.steps) == (
        "zero3=2",
        4,
        "none",
        "scan",
        3,
    )
    assert "zero3=2, 4 micro-batches, remat full" in taken.said[0]
    assert taken.said[1:] == ("plan: --set train.remat=none stands in place of the plan's full",)


def test_a_plan_of_another_model_or_number_of_devices_is_refused(tmp_path) -> None:
    path = tmp_path / "p.yaml"
    config = load(RunConfig, saved.take(tree("quickstart"), a_plan(), {}, path).tree)
    model = to_tree(config)["model"]
    assert saved.check(config, model, a_plan(), 2, path) == []
    with pytest.raises(ValueError, match=r"is a plan for 2 devices, and 8 are here"):
        saved.check(config, model, a_plan(), 8, path)
    own = config.model_copy(update={"layout": "zero3=4"})
    with pytest.raises(ValueError, match=r"--set layout=zero3=4 takes 4 devices, and 2 are here.*the plan's is zero3=2"):
        saved.check(own, model, a_plan(), 2, path)
    with pytest.raises(ValueError, match=r"is a plan of another model: its layers is 4, and this recipe's 6"):
        saved.check(config, {**model, "layers": 6}, a_plan(), 2, path)
    said = saved.check(config, model, a_plan(sequences=32, precision="bf16"), 2, path)
    assert said and "batch.sequences 16 (planned for 32), train.precision fp32 (planned for bf16)" in said[0]


def test_a_file_that_is_no_plan_is_refused(tmp_path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with pytest.raises(ValueError, match="is no plan: it lacks model, hardware, devices, seq, "):
        saved.read(tmp_path / "x.yaml")
    saved.save(a_plan(), tmp_path / "y.yaml")
    (tmp_path / "x.yaml").write_text("".join(line for line in (tmp_path / "y.yaml").open() if not line.startswith("runner")))
    with pytest.raises(ValueError, match="is no plan: it lacks runner. "):
        saved.read(tmp_path / "x.yaml")


def test_a_recipe_is_planned_from_the_file(tmp_path, monkeypatch) -> None:
    saved.save(a_plan(devices=8, layout="zero3=8"), tmp_path / "plan.yaml")
    config, said = saved.planned("quickstart", ["train.steps=3"], tmp_path / "plan.yaml")
    assert config.layout == "zero3=8" and config.train.steps == 3 and len(said) == 1
    assert saved.model_tree(config) == a_plan().model
    with pytest.raises(ValueError, match="is a plan for 2 devices, and 8 are here"):
        saved.save(a_plan(), tmp_path / "two.yaml")
        saved.planned("quickstart", [], tmp_path / "two.yaml")
