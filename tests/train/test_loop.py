"""A run that is stopped anywhere, by anything, and resumed is the run that was not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import meshloom
from meshloom.core.config import dump
from meshloom.core.tree import named_leaves
from meshloom.recipes import launch
from meshloom.train import loop
from meshloom.train.metrics import METRICS, read
from meshloom.weights.stored import whole
from tiny import recipe, text

TWO_EPOCHS = 14
"""Steps; the tiny text has about 6 steps an epoch."""


def config(folder: Path, **over):
    text(folder, documents=20)
    train = {"steps": TWO_EPOCHS, "runner": "scan", "ema": 0.9} | over.pop("train", {})
    return recipe(folder, train=train, log={"every": 3}, **over)


def weights(state) -> dict[str, np.ndarray]:
    return {name: np.array(a) for name, a in named_leaves(state).items()}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run that nothing interrupts, with an evaluation on the way: folder and outcome."""
    base = tmp_path_factory.mktemp("whole")
    return base, launch.train(config(base, eval={"every": 5}), base / "run")


def test_resume_in_the_second_epoch_is_bit_for_bit(whole_run, tmp_path):
    """C17, C18: stopped at step 8, in epoch 1; weights, moments, average and every line of the log are the same bits."""
    base, outcome = whole_run
    first = config(base, eval={"every": 5}, train={"steps": 8})
    launch.train(first, tmp_path / "run")
    again = launch.train(config(base, eval={"every": 5}), tmp_path / "run", resume=True)
    assert again.step == outcome.step == TWO_EPOCHS
    a, b = weights(outcome.state), weights(again.state)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert (tmp_path / "run" / METRICS).read_text() == (base / "run" / METRICS).read_text()


def test_resume_under_another_layout_and_batch_cut(whole_run, tmp_path):
    """The same samples and the same curve on 4 devices from a checkpoint of one."""
    base, outcome = whole_run
    launch.train(config(base, train={"steps": 8}), tmp_path / "run")
    moved = config(base, layout="zero3=2 tensor=2", batch={"micro_batches": 2})
    again = launch.train(moved, tmp_path / "run", resume=True)
    for name, a in weights(outcome.state.params).items():
        np.testing.assert_allclose(np.array(named_leaves(again.state.params)[name]), a, atol=3e-4, err_msg=name)
    one, other = read(base / "run", "train"), read(tmp_path / "run", "train")
    assert [x["tokens"] for x in one] == [x["tokens"] for x in other], "every sample is used exactly once"
    for x, y in zip(one, other):
        assert y["loss"] == pytest.approx(x["loss"], rel=1e-4) and y["norm"] == pytest.approx(x["norm"], rel=1e-3)


def test_evaluation_does_not_change_training(whole_run, tmp_path):
    """C78: with and without evaluations, bitwise equal weights."""
    base, outcome = whole_run
    silent = launch.train(config(base, data={"valid": 0.1}, eval={"every": 0}), tmp_path / "run")
    a, b = weights(outcome.state.params), weights(silent.state.params)
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_failing_evaluation_leaves_the_last_checkpoint(whole_run, tmp_path, monkeypatch):
    """C25: the last step's checkpoint is whole before the last evaluation begins, and the error is not swallowed."""
    base, _ = whole_run

    def fail(*_):
        raise RuntimeError("evaluation broke")

    monkeypatch.setattr(loop, "score", fail)
    with pytest.raises(RuntimeError, match="evaluation broke"):
        launch.train(config(base, train={"steps": 3}), tmp_path / "run")
    assert whole(tmp_path / "run" / "checkpoints" / "3")


def test_signal_saves_and_ends(whole_run, tmp_path, monkeypatch):
    """C26: SIGTERM during an evaluation: a checkpoint of the last finished step, and a resume that ends as if nothing had been."""
    base, outcome = whole_run
    asked = []

    def signalled(*given):
        if not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        return score(*given)

    score = loop.score
    monkeypatch.setattr(loop, "score", signalled)
    stopped = launch.train(config(base, eval={"every": 5}, checkpoint={"every": 0}), tmp_path / "run")
    assert stopped.signal == signal.SIGTERM and stopped.step == 5
    assert whole(tmp_path / "run" / "checkpoints" / "5")
    again = launch.train(config(base, eval={"every": 5}, checkpoint={"every": 0}), tmp_path / "run", resume=True)
    a, b = weights(outcome.state.params), weights(again.state.params)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert (tmp_path / "run" / METRICS).read_text() == (base / "run" / METRICS).read_text()


def test_kill_9_then_resume(whole_run, tmp_path):
    """kill -9 in the middle, then --resume: the same metrics.jsonl, byte for byte, as the run that was never killed."""
    base, _ = whole_run
    file = tmp_path / "tiny.yaml"
    file.write_text(dump(config(base, eval={"every": 5})))
    env = {**os.environ, "PYTHONPATH": str(Path(meshloom.__file__).parent.parent), "XLA_FLAGS": "", "MESHLOOM_COMPILE_CACHE": "0"}
    command = [sys.executable, "-m", "meshloom.cli", "train", str(file), "--out", str(tmp_path / "run")]
    victim = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "run" / METRICS, time.monotonic() + 240
    while victim.poll() is None and time.monotonic() < deadline and not (log.exists() and '"step": 6' in log.read_text()):
        time.sleep(0.01)
    victim.kill()
    victim.wait()
    subprocess.run([*command, "--resume"], env=env, check=True, capture_output=True, timeout=300)
    one, other = read(base / "run", "train"), read(tmp_path / "run", "train")
    assert [x["step"] for x in one] == [x["step"] for x in other]
    first = tmp_path / "again"
    subprocess.run([*command[:-1], str(first)], env=env, check=True, capture_output=True, timeout=300)
    assert log.read_text() == (first / METRICS).read_text()


def test_too_many_bad_steps_end_the_run(whole_run, tmp_path):
    """Steps that are not finite are skipped and counted; past the limit the run ends with a sentence."""
    base, _ = whole_run
    wild = config(
        base, optimizer={"kind": "sgd", "lr": 1e30, "momentum": 0.0, "weight_decay": 0.0}, train={"nonfinite_limit": 2, "clip": 0.0}
    )
    with pytest.raises(FloatingPointError, match=r"not finite in 3 steps in a row.*train\.nonfinite_limit is 2"):
        launch.train(wild, tmp_path / "run")


def test_another_model_is_refused(whole_run):
    base, _ = whole_run
    other = config(base, model={"heads": 8, "head": 8})
    with pytest.raises(ValueError, match=r"another model.*heads: 4 -> 8"):
        launch.train(other, base / "run", resume=True)


def test_a_run_that_went_further_already_is_not_cut(whole_run):
    base, _ = whole_run
    with pytest.raises(ValueError, match=r"14 is of step 14, and the run that is asked for ends at step 8\. Train longer"):
        launch.train(config(base, train={"steps": 8}), base / "run", resume=True)


def test_a_refused_resume_leaves_the_folder_as_it_was(whole_run):
    """C20: otherwise the recipe that does not fit would be the run's, and its tokenizer too."""
    base, _ = whole_run
    before = {p: p.read_bytes() for p in (base / "run").rglob("*") if p.is_file() and "checkpoints" not in p.parts and p.name != ".lock"}
    for over in ({"model": {"heads": 8, "head": 8}}, {"optimizer": {"kind": "lion"}}, {"seed": 9}):
        with pytest.raises(ValueError, match=r"another model|another way of training|data seed = 0 and now has 9"):
            launch.train(config(base, **over), base / "run", resume=True)
    assert {p: p.read_bytes() for p in before} == before


DAMAGE = {
    "info.json": (lambda at: (at / "8" / "info.json").write_text('{"form'), r"8, the newest checkpoint, is damaged: its info\.json cannot be read"),
    "files": (lambda at: (at / "8" / "files.0.json").unlink(), r"8, the newest checkpoint, is damaged: it lacks files\.0\.json"),
    "list": (lambda at: (at / "8" / "files.0.json").write_text("{"), r"8/files\.0\.json cannot be read.*move .*8 away\. There are checkpoints of steps 4, 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_damaged_newest_checkpoint_is_named_and_kept(whole_run, tmp_path, name):
    """Nothing is removed, nothing begins anew; with the damaged one moved away the run goes on from the one before."""
    base, outcome = whole_run
    launch.train(config(base, train={"steps": 8}, checkpoint={"every": 4}), tmp_path / "run")
    folder, longer = tmp_path / "run" / "checkpoints", config(base, eval={"every": 5}, checkpoint={"every": 4})
    damage, said = DAMAGE[name]
    damage(folder)
    lines = (tmp_path / "run" / METRICS).read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            launch.train(longer, tmp_path / "run", resume=True)
    assert (folder / "8").is_dir() and (tmp_path / "run" / METRICS).read_bytes() == lines
    (folder / "8").rename(tmp_path / "8")
    (folder / "run.json").write_text('{"ru')
    again = launch.train(longer, tmp_path / "run", resume=True)
    a, b = weights(outcome.state), weights(again.state)
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_a_run_whose_name_is_lost_goes_on(whole_run, tmp_path, capsys):
    base, _ = whole_run
    launch.train(config(base, train={"steps": 4}, checkpoint={"every": 2}), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "run.json").unlink()
    assert launch.train(config(base, train={"steps": 5}), tmp_path / "run", resume=True).step == 5
    assert "run.json was missing or damaged; the checkpoints beside it say which run this is." in capsys.readouterr().out


def test_a_folder_with_a_run_is_not_overwritten(whole_run):
    base, _ = whole_run
    with pytest.raises(FileExistsError, match="--resume"):
        launch.train(config(base), base / "run")


def test_resume_after_the_end_changes_nothing(whole_run):
    base, outcome = whole_run
    before = (base / "run" / METRICS).read_text()
    again = launch.train(config(base, eval={"every": 5}), base / "run", resume=True)
    assert again.step == outcome.step and (base / "run" / METRICS).read_text() == before
    assert jax.tree.leaves(again.state.step)[0] == TWO_EPOCHS


def test_a_resumed_run_may_freeze_more_but_not_less(whole_run, tmp_path, capsys):
    """What is frozen later stays as the checkpoint has it; what was frozen has no optimizer state to begin with."""
    base, _ = whole_run
    run = tmp_path / "run"
    first = launch.train(config(base, train={"steps": 3, "freeze": ["embed"]}), run)
    before = weights(first.state.params)
    more = launch.train(config(base, train={"steps": 5, "freeze": ["embed", "layers.mlp.*"]}), run, resume=True)
    assert "Frozen from here on: layers.mlp.down, layers.mlp.gate, layers.mlp.up." in capsys.readouterr().out
    after = weights(more.state.params)
    assert {name for name in after if np.array_equal(after[name], before[name])} == {
        "embed",
        *(f"layers.mlp.{n}" for n in ("up", "gate", "down")),
    }
    with pytest.raises(ValueError, match="was made with layers.mlp.down, .* frozen, so it holds no optimizer state to train them with"):
        launch.train(config(base, train={"steps": 6, "freeze": ["embed"]}), run, resume=True)
