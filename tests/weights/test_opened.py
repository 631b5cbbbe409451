"""A model is opened wherever it lies."""

from pathlib import Path

import numpy as np
import pytest

from goldens import small
from meshloom.core.tree import named_leaves
from meshloom.recipes.convert import convert
from meshloom.weights.checkpoint import Checkpoints
from meshloom.weights.load import load
from meshloom.weights.opened import open_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden as a folder like a run's, with two checkpoints."""
    folder = tmp_path_factory.mktemp("opened") / "run"
    convert(small.FOLDER / "qwen2", folder, to="meshloom", say=lambda line: None)
    opened, saved = open_model(folder), Checkpoints(folder / "checkpoints")
    saved.save(3, {"params": opened.weights(None)}, {key: opened.info[key] for key in ("model", "huggingface")})
    saved.close()
    return folder


def test_a_run_a_checkpoint_and_a_hugging_face_folder_hold_the_same(run: Path) -> None:
    wanted = named_leaves(load(small.source("qwen2")).weights)
    for path, step in ((run, None), (run, 0), (run / "checkpoints" / "3", None), (small.FOLDER / "qwen2", None)):
        opened = open_model(path, step)
        got = named_leaves(opened.weights(None))
        assert opened.config == small.source("qwen2").config and opened.said["eos_token_id"] == 2
        assert got.keys() == wanted.keys() and all((np.asarray(got[k]) == np.asarray(wanted[k])).all() for k in got)
    assert open_model(run).name.endswith("checkpoints/3") and open_model(run, 0).name.endswith("checkpoints/0")


def test_what_cannot_be_opened_is_refused_with_what_is_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 2. There are: 0, 3"):
        open_model(run, 2)
    with pytest.raises(FileNotFoundError, match="There is no .*nothing. Give"):
        open_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither the folder of a run"):
        open_model(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="no whole checkpoint yet"):
        open_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="is a pickle"):
        open_model(tmp_path / "model.bin")


def test_a_step_of_what_has_no_steps_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="is one model, not the folder of a run with its checkpoints. Leave --step 3 out"):
        open_model(run / "checkpoints" / "3", 3)
