"""Finding recipes, extending them, overriding them."""

from pathlib import Path

import pytest

from meshloom.core import yamls
from meshloom.core.config import ConfigError, dump, load, to_tree
from meshloom.recipes.load import find, load_recipe, names, over, tree
from meshloom.recipes.run import RunConfig


@pytest.mark.parametrize("name", names())
def test_every_shipped_recipe_loads_and_its_dump_loads_to_the_same(name: str) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert load(RunConfig, yamls.value(dump(config))) == config


def test_a_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(FileNotFoundError, match="There is no recipe 'quikstart'. Did you mean 'quickstart'?"):
        find("quikstart")
    with pytest.raises(FileNotFoundError, match="There is no recipe file my/own.yaml. The recipes that ship: .*quickstart"):
        find("my/own.yaml")


def test_a_run_folder_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump(load_recipe("quickstart")))
    assert load_recipe(str(tmp_path)) == load_recipe("quickstart")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="is a folder without a run.yaml"):
        find(str(tmp_path / "empty"))


def test_extends_merges_and_is_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: quickstart\nname: a\ntrain: {steps: 7}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nname: b\n")
    config = load_recipe(str(tmp_path / "b.yaml"), ["optimizer.lr=1e-4", "train.steps=3", "train.steps=4"])
    assert (config.name, config.train.steps, config.optimizer.lr, config.batch.sequences) == ("b", 4, 1e-4, 16)


def test_a_circle_of_recipes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ValueError, match="extends itself, through"):
        tree(str(tmp_path / "a.yaml"))


def test_an_override_that_does_not_exist_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", ["train.stepz=3", "trian.steps=3"])
    assert "train.stepz is not a setting. Did you mean train.steps?" in str(caught.value)
    assert "trian is not a setting. Did you mean train?" in str(caught.value)


def test_the_errors_that_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/configuration.md quotes them."""
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("extends: quickstart\nmodel: {layerz: 2}\noptimizer: {lr: x}\nsteps: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe("my.yaml")
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert str(caught.value) in page


def test_a_model_that_is_named_otherwise_takes_the_place_of_the_recipes() -> None:
    config = load_recipe("quickstart", ["model.from=some/folder"])
    assert to_tree(config)["model"] == {"from": "some/folder"}
    assert over({"model": {"from": "a"}}, {"model": {"family": "llama", "layers": 1}})["model"] == {"family": "llama", "layers": 1}
    assert over({"model": {"family": "llama", "layers": 1}}, {"model": {"like": "gpt2"}})["model"] == {"like": "gpt2"}
    assert over({"model": {"family": "llama", "layers": 1}}, {"model": {"layers": 2}})["model"] == {"family": "llama", "layers": 2}


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "-x", "a\0b"])
def test_a_name_that_would_lead_out_of_the_runs_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name: the run's folder is named by it, so it holds letters"):
        load(RunConfig, {"name": name, "model": {"from": "x"}, "train": {"steps": 1}})


@pytest.mark.parametrize("lr", [".inf", "1e400", ".nan"])
def test_a_number_that_is_not_finite_is_refused(lr: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.lr must be a finite number; you gave (Infinity|NaN)."):
        load_recipe("quickstart", [f"optimizer.lr={lr}"])
