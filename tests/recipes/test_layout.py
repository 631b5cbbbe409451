"""`meshloom layout` on recipes: any spelling, no device, refusals in the strategies' own sentences."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshloom.recipes.launch import choose, explained
from meshloom.recipes.layout import drawn, show
from meshloom.recipes.load import load_recipe


def test_totals_are_those_of_the_plan() -> None:
    """The same bytes as `meshloom train --dry-run` prints."""
    config = load_recipe("quickstart", ["layout=zero3=4 tensor=2", "batch.micro_batches=2", "train.ema=0.9"])
    d, e = drawn(config, platform="cpu"), explained(config, choose(config))
    assert d.traffic.sent == pytest.approx(sum(sent for _, sent in e.moved[""]))
    assert sum(held.parts[0].bytes for held in d.weights) == e.stored["parameters"]


def test_a_recipe_that_leaves_the_layout_open() -> None:
    config = load_recipe("quickstart")
    assert drawn(config).devices == 8 and drawn(config, devices=1).spelling == "one device"
    assert drawn(config, "tensor=4").spelling == "tensor=4"


def test_a_compiler_that_sees_every_layer_gathers_once() -> None:
    config = load_recipe("quickstart")
    assert [len(drawn(config, "zero3=8", platform=where).traffic.layer) for where in ("gpu", "cpu")] == [3, 2]


def test_needs_no_device_and_makes_no_array() -> None:
    program = (
        "import jax\nfrom jax._src import xla_bridge\nfrom meshloom.recipes.layout import show\nfrom meshloom.recipes.load import load_recipe\n"
        "show(load_recipe('quickstart', ['batch.sequences=1024']), 'data=2 zero3=64 tensor=8')\n"
        "assert not xla_bridge.backends_are_initialized() and not jax.live_arrays()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "The mesh: 1024 devices" in done.stdout


def test_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(jax.live_arrays())
    show(load_recipe("quickstart"), "zero3=4 tensor=2", tmp_path / "picture.svg")
    told = capsys.readouterr().out
    assert "picture.svg" in told and (tmp_path / "picture.svg").stat().st_size > 10_000 and len(jax.live_arrays()) == before


REFUSED = {
    "tensor=3": "8 heads cannot be split over tensor=3 devices. Use tensor= one of 1, 2, 4, 8.",
    "tensr=2": "'tensr' in layout 'tensr=2' is not a strategy. Did you mean 'tensor'?",
    "data=64": "Use batch.sequences that is a multiple of 64.",
    "zero3=3": "embed 256 cannot be split over 3 devices",
}


@pytest.mark.parametrize("spelling", REFUSED)
def test_refuses_what_the_model_does_not_admit(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError) as refused:
        show(load_recipe("quickstart"), spelling)
    assert REFUSED[spelling] in str(refused.value) and not capsys.readouterr().out


def test_refuses_a_file_before_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"picture.jpg ends in '.jpg', and a picture is written as .svg or .png. Name it picture.svg."):
        show(load_recipe("quickstart"), "data=2", tmp_path / "picture.jpg")
    assert not capsys.readouterr().out


def test_refuses_a_place_that_cannot_hold_the_file_before_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "held.svg").mkdir()
    for name, said in (("none/a.svg", "There is no folder .*none to write a.svg to. Make it"), ("held.svg", "held.svg is a folder")):
        with pytest.raises(ValueError, match=said):
            show(load_recipe("quickstart"), "data=2", tmp_path / name)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("devices", [0, -3])
def test_refuses_a_number_of_devices_that_is_none(devices: int) -> None:
    with pytest.raises(ValueError, match=f"--devices {devices} is no number of devices. Give 1 or more."):
        drawn(load_recipe("quickstart"), devices=devices)


def test_refuses_sequences_longer_than_the_model() -> None:
    with pytest.raises(ValueError, match="data.seq is 512 tokens and the model is made for max_seq 256"):
        drawn(load_recipe("quickstart", ["data.seq=512"]), "data=2")
