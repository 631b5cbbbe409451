"""What a recipe leaves open is decided and said; what cannot be is refused with a sentence."""

import jax
import pytest

from meshloom.plan import hardware
from meshloom.recipes import launch
from meshloom.runner.run import How
from meshloom.weights.opened import open_model
from tiny import recipe


def test_auto_layout_takes_all_devices_and_is_said(tmp_path):
    chosen = launch.choose(recipe(tmp_path, layout="auto", batch={"sequences": 8}))
    assert chosen.plan.layout.devices == 8
    assert any(line.startswith(f"layout: {chosen.spelling} ") and "8 devices" in line for line in chosen.said)


def test_auto_layout_of_a_width_that_does_not_divide(tmp_path):
    """embed 36 over 8 devices: ZeRO over all of them is not possible."""
    chosen = launch.choose(
        recipe(tmp_path, layout="auto", model={"embed": 36, "heads": 3, "kv_heads": 3, "head": 12}, batch={"sequences": 8})
    )
    assert chosen.plan.layout.devices == 8 and not any(name.startswith("zero") and n == 8 for name, n in chosen.plan.layout.sizes.items())


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"layout": "tensor=3"}, r"4 heads cannot be split over tensor=3 devices. Use tensor= one of 1, 2, 4"),
        ({"layout": "data=16"}, r"needs 16 devices .*has 8.*--devices 16"),
        ({"layout": "tensro=2"}, r"Did you mean 'tensor'"),
        ({"layout": "zero3=8", "batch": {"sequences": 12}}, r"12 sequences.*8 devices"),
        ({"data": {"seq": 64}}, r"data\.seq is 64.*max_seq 32"),
        ({"layout": "sequence"}, r"'sequence'.*'tensor'"),
        ({"layout": "pipe=8"}, r"The model has 2 layers, and 8 stages take 8.*Use 2 stages at most"),
        ({"layout": "pipe=2 pipe=4"}, r"'pipe' stands twice"),
        ({"layout": "pipe=2:1fb1"}, r"Did you mean '1f1b'"),
        ({"layout": "pipe=2 data=8"}, r"needs 16 devices \(pipe=2 x data=8\).*--devices 16"),
        (
            {"layout": "pipe=2 data=2", "batch": {"sequences": 6, "micro_batches": 6}},
            r"6 sequences in 6 micro-batches are 1 each.*sequences: 12",
        ),
        (
            {"layout": "pipe=2:interleaved2", "model": {"layers": 4}, "batch": {"sequences": 6, "micro_batches": 3}},
            r"groups of 2, and 3 .*The nearest that fit: 2 or 4",
        ),
        (
            {"layout": "pipe=2:interleaved2 data=2", "model": {"layers": 4}, "batch": {"sequences": 6}},
            r"6 sequences cannot be cut into micro-batches.*Use batch.sequences that is a multiple of 4, such as 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(over, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        launch.choose(recipe(tmp_path, **over))


@pytest.mark.parametrize(
    ("remat", "says"),
    [
        ("full 1, none 2", r"remat 'full 1, none 2' is of 3 layers, and there are 2 layers. Change its numbers"),
        ("offload", r"'offload' moves nothing on 'cpu': a CPU's devices have no memory but the host's.*Use 'selective'"),
        ("auto 20kB", r"No choice of what layers keep fits 20 kB: .*takes [\d.]+ MB.*, [\d.]+ MB more"),
    ],
)
def test_remat_that_is_not_possible_is_refused(remat, says, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "present", lambda: hardware.read("h100:1x8"))
    with pytest.raises(ValueError, match=says):
        launch.choose(recipe(tmp_path, layout="", train={"remat": remat}, batch={"sequences": 8}))


def test_a_pattern_is_of_a_parts_slots(tmp_path):
    given = dict(model={"layers": 4}, batch={"sequences": 8, "micro_batches": 4}, train={"remat": "full 1, none 1"})
    assert launch.choose(recipe(tmp_path, layout="pipe=2", **given)).plan.how == How("scan", "full 1, none 1")
    with pytest.raises(ValueError, match="is of 2 layers, and there are 4 layers"):
        launch.choose(recipe(tmp_path, layout="", **given))


def test_automatic_remat_is_solved_for_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "present", lambda: hardware.read("h100:1x8"))
    given = lambda remat: recipe(
        tmp_path, layout="", model={"layers": 4}, train={"remat": remat, "runner": "auto"}, batch={"sequences": 32}
    )
    plenty = launch.choose(given("auto"))
    assert plenty.plan.how == How("unroll", "none") and any(line.startswith("remat: none (chosen: takes") for line in plenty.said)
    need = sum(sum(part.values()) for part in (lambda e: (e.stored, e.working))(launch.explained(given("none"), plenty)))
    tight = [launch.choose(given(f"auto {int(share * need)}")) for share in (0.98, 0.96, 0.94, 0.92)]
    assert all(line.startswith(f"remat: {one.plan.how.remat} (chosen") for one in tight for line in one.said if line.startswith("remat"))
    mixed = [one.plan.how for one in tight if "," in one.plan.how.remat]
    assert mixed and all(how.runner == "scan" for how in mixed)


def test_an_unrolled_loop_on_a_cpu_says_that_remat_saves_nothing(tmp_path):
    chosen = launch.choose(recipe(tmp_path, layout="", train={"remat": "full", "runner": "unroll"}))
    assert launch.NOTHING_SAVED in chosen.said
    assert launch.NOTHING_SAVED not in launch.choose(recipe(tmp_path, layout="", train={"remat": "full", "runner": "auto"})).said


def test_padding_of_a_split_sequence_is_said(tmp_path):
    chosen = launch.choose(recipe(tmp_path, layout="context=4", data={"seq": 30}))
    assert "sequence: rows of 30 tokens are padded to 32 for context=4 (6.2% of the work, weight 0)" in chosen.said
    assert any("attention in a ring of 4 devices, 4 heads (2 for keys) on each" in line for line in chosen.said)


def test_a_pipeline_says_what_it_chose_and_what_it_computes_in_vain(tmp_path):
    """Up to four micro-batches a stage; a third layer on two stages leaves a slot empty."""
    chosen = launch.choose(recipe(tmp_path, layout="pipe=2", model={"layers": 3}, batch={"sequences": 12}))
    assert chosen.plan.micro == 6 and "pipeline: 6 micro-batches (chosen; batch.micro_batches says how many)" in chosen.said
    empty = (
        "pipeline: 3 layers on 2 stages of 2 slots each; 1 of 4 slots hold no layer and are computed in vain (33% more work in the layers)"
    )
    assert empty in chosen.said
    given = launch.choose(recipe(tmp_path, layout="pipe=2", batch={"micro_batches": 2}))
    assert given.plan.micro == 2 and not [line for line in given.said if line.startswith("pipeline") or not line]


def test_vocabulary_smaller_than_the_tokenizers(tmp_path):
    config = recipe(tmp_path, model={"vocab": 300})
    with pytest.raises(ValueError, match=r"300"):
        launch.prepare(config, 300, progress=False)


def test_tokens_and_epochs_become_whole_steps(tmp_path):
    """Rounded up: 4 x 32 = 128 positions a step."""
    assert launch.steps_of(recipe(tmp_path), rows=10) == 6
    tokens = recipe(tmp_path, train={"steps": None, "tokens": 129})
    assert launch.steps_of(tokens, rows=10) == 2
    epochs = recipe(tmp_path, train={"steps": None, "epochs": 1.5})
    assert launch.steps_of(epochs, rows=10) == 4


def test_plan_allocates_nothing(tmp_path):
    """--dry-run: no array is made."""
    config = recipe(tmp_path, layout="zero3=2 tensor=2")
    before = {id(a) for a in jax.live_arrays()}
    text = "\n".join(launch.describe_plan(config, launch.choose(config)))
    assert not [a for a in jax.live_arrays() if id(a) not in before]
    assert "zero3" in text and "tensor" in text and "layers.attn.q" in text


def test_train_exports_and_starts_from_the_export(tmp_path):
    """The folder that a run exports is a start for another: its first loss is the last one's."""
    config = recipe(tmp_path, train={"steps": 2})
    outcome = launch.train(config, tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"run.yaml", "metrics.jsonl", "checkpoints", "hf", "tokenizer"}
    opened = open_model(tmp_path / "run" / "hf")
    assert opened.config.vocab == 4099
    start = launch.Folder.model_validate({"from": str(tmp_path / "run" / "hf")})
    again = recipe(tmp_path, train={"steps": 1}, optimizer={"lr": 1e-12}).model_copy(update={"model": start})
    more = launch.train(again, tmp_path / "more")
    assert more.loss == pytest.approx(outcome.loss, rel=1e-4)


def test_a_family_without_a_counterpart_elsewhere_is_not_exported(tmp_path, monkeypatch, capsys):
    from meshloom.models import llama
    from meshloom.models.base import Model
    from meshloom.models.table import MODELS

    own = Model("own", *llama.MODEL[1:8])
    monkeypatch.setitem(MODELS, "llama", own)
    assert own.hf(None) == ()
    with pytest.raises(ValueError, match=r"has no counterpart in Hugging Face"):
        own.from_hf({})
    launch.train(recipe(tmp_path, train={"steps": 1}), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints").is_dir() and not (tmp_path / "run" / "hf").exists()
    assert "No hf folder is written: Hugging Face has no counterpart of this own model." in capsys.readouterr().out
