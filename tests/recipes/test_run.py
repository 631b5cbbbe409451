"""The model section: by family, or from a folder; every section is checked at once."""

import pytest

from meshloom.core.config import ConfigError, load, to_tree
from meshloom.models.known import known
from meshloom.models.table import MODELS
from meshloom.recipes.run import Folder, RunConfig

SMALL = {"family": "llama", "layers": 1, "embed": 8, "heads": 2, "ffn": 16, "vocab": 32}


def run(**sections: object) -> RunConfig:
    return load(RunConfig, {"name": "x", "model": SMALL, "train": {"steps": 1}, **sections})


def test_a_family_is_flat_in_the_file() -> None:
    config = run()
    assert config.model.config == MODELS["llama"].Config(**{k: v for k, v in SMALL.items() if k != "family"})
    assert to_tree(config)["model"]["family"] == "llama" and to_tree(config)["model"]["embed"] == 8


def test_a_folder_is_kept_as_it_was_given() -> None:
    config = run(model={"from": "my/model"})
    assert config.model == Folder.model_validate({"from": "my/model"})
    assert load(RunConfig, to_tree(config)) == config


def test_a_model_may_be_like_a_known_one() -> None:
    config = run(model={"like": "llama3-8b", "layers": 4, "rope": {"theta": 1e4}})
    family, c = known("llama3-8b")
    want = c.model_copy(update={"layers": 4, "rope": c.rope.model_copy(update={"theta": 1e4})})
    assert config.model.family == family.name and config.model.config == want
    assert load(RunConfig, to_tree(config)) == config and "like" not in to_tree(config)["model"]


REFUSED = {
    "unlike any": ({"model": {"like": "lama3-8b"}}, "model.like: There is no known model 'lama3-8b'. Did you mean 'llama3-8b'?"),
    "like no name": ({"model": {"like": 3}}, "model.like must be the name of a known model, like llama3-8b; you gave 3."),
    "unknown family": ({"model": {"family": "lama"}}, "model.family: There is no model family 'lama'. Did you mean 'llama'?"),
    "no family": ({"model": {"layers": 1}}, "model.family is missing. Give one of"),
    "misspelled size": ({"model": {**SMALL, "layerz": 2}}, "model.layerz is not a setting. Did you mean model.layers?"),
    "family and folder": ({"model": {**SMALL, "from": "a"}}, "model.family is not a setting"),
    "wrong type": ({"model": {**SMALL, "layers": "two"}}, 'model.layers must be a whole number; you gave "two" (text).'),
    "not a section": ({"model": 3}, "model must be a section of keys and values; you gave 3."),
    "no length": ({"train": {}}, "train"),
    "name that is no file name": ({"name": "a/b"}, "name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    sections, sentence = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        run(**sections)
    assert sentence in str(caught.value)
