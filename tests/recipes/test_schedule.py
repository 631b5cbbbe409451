"""`meshloom schedule`: one schedule, all of them, a table of one's own, a recipe's bytes; refusals before anything is printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshloom.parallel.schedules import make, read, rows
from meshloom.recipes.load import load_recipe
from meshloom.recipes.schedule import asked, show

OWN = "F0,F1,,B0,B1\n,F0+B0,F1,B1\n"


def test_without_a_name_all_that_fit_stand_side_by_side() -> None:
    found, left = asked(4, 8, None, None)
    assert [s.name for s in found] == ["gpipe", "1f1b", "interleaved2", "interleaved4", "zb"] and not left
    found, left = asked(4, 6, None, None)
    assert [s.name for s in found] == ["gpipe", "1f1b", "zb"] and "The nearest that fit: 4 or 8." in left["interleaved2"]


def test_bytes_of_a_recipe() -> None:
    """quickstart: 4 layers, 16 sequences of 256 tokens and 256 features, fp32."""
    found, left = asked(2, None, None, None, load_recipe("quickstart", ["batch.micro_batches=8"]))
    assert [s.name for s in found] == ["gpipe", "1f1b", "interleaved2", "zb"] and "The model has 4 layers" in left["interleaved4"]
    held = found[1].flight
    assert held and held.rings["kept"].each == 2 * 256 * 256 * 4 and held.rings["kept"].places == found[1].times.kept[0] == 3
    split, _ = asked(2, 8, "1f1b", None, load_recipe("quickstart", ["layout=pipe=2 data=2"]))
    assert split[0].flight and split[0].flight.rings["kept"].each == held.rings["kept"].each // 2
    assert split[0].flight.said.startswith("quickstart under data=2 besides, 1 x 256 tokens")
    uneven, _ = asked(2, 8, "1f1b", None, load_recipe("quickstart", ["layout=pipe=2:1f1b,1+3 data=2"]))
    assert split[0].flight.layers == 2 and uneven[0].flight and uneven[0].flight.layers == 3
    stash, _ = asked(2, 8, "1f1b", None, load_recipe("quickstart"), stash=True)
    assert stash[0].costs == (1, 1, 1) and stash[0].flight and stash[0].flight.bytes > held.bytes


def test_prints_and_writes_pictures_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(2, 4, "1f1b", pictures=(tmp_path / "a.svg", tmp_path / "a.png"), csv=tmp_path / "mine.csv")
    out = capsys.readouterr().out
    assert "stage 1" in out and "1f1b" in out and out.count("Written: ") == 3 and "\x1b" not in out
    assert (tmp_path / "a.svg").read_text().startswith("<?xml") and (tmp_path / "a.png").stat().st_size > 1000
    assert rows(read(tmp_path / "mine.csv")) == rows(make("1f1b", 2, 4))


def test_a_table_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.csv").write_text(OWN)
    show(table=tmp_path / "own.csv", every=True)
    out = capsys.readouterr().out
    assert "a table of your own" in out
    assert [line.split()[0] for line in out.splitlines() if "%" in line][-6:] == [
        "own",
        "gpipe",
        "1f1b",
        "interleaved2",
        "interleaved4",
        "zb",
    ]
    show(2, 2, table=tmp_path / "own.csv", config=load_recipe("quickstart"))
    assert "MiB in flight on each device" in capsys.readouterr().out


def test_imports_no_jax_without_a_model() -> None:
    program = (
        "import sys; from meshloom.cli import main; main(['schedule', '--stages', '2', '--micro', '4']); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(micro=4), r"--stages is missing. Give --stages and --micro, as in --stages 4 --micro 16, or a table of your own: --table FILE.csv."),
        (dict(stages=4), r"--micro is missing."),
        (dict(stages=0, micro=4), r"A pipeline of 0 stages is none."),
        (dict(stages=4, micro=8, name="1fb1"), r"'1fb1' is not a schedule. Did you mean '1f1b'\?"),
        (dict(stages=4, micro=9, name="interleaved2"), r"The nearest that fit: 8 or 12."),
        (dict(stages=8, micro=10**6), r"make 96,000,000 pieces of work, more than can be shown; 200,000 is the most. Give fewer micro-batches"),
        (dict(stages=4, micro=8, csv=Path("a.csv")), r"--csv writes the table of one schedule. Name it with --schedule, as in --schedule 1f1b."),
        (dict(stages=4, micro=8, pictures=(Path("a.jpg"),)), r"a.jpg ends in '.jpg', and a picture is written as .svg or .png. Name it a.svg."),
        (dict(stages=4, micro=2000, name="1f1b", pictures=(Path("a.svg"),)), r"A picture of 32,000 pieces of work is more than can be seen"),
        (dict(table=Path("none.csv")), r"none.csv"),
    ],
)  # fmt: skip
def test_refuses_before_it_prints(given: dict, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        show(**given)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(name="1f1b"), r"own.csv and --schedule 1f1b are two schedules. Give one of them."),
        (dict(stages=3), r"own.csv is a table of 2 stages, and --stages says 3. Leave --stages out, or give another table."),
        (dict(micro=3), r"own.csv is a table of 2 micro-batches, and --micro says 3. Leave --micro out, or give another table."),
    ],
)
def test_refuses_flags_that_contradict_a_table(given: dict, said: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(OWN)
    with pytest.raises(ValueError, match=said):
        show(table=tmp_path / "own.csv", **given)


@pytest.mark.parametrize(
    "stages, micro, name, sets, said",
    [
        (8, 8, None, [], r"The model has 4 layers, and 8 stages take 8"),
        (4, 8, "interleaved2", [], r"4 stages of 2 chunks take 8"),
        (4, 5, None, [], r"A batch of 16 sequences cannot be cut into 5 micro-batches"),
        (4, 8, None, ["data.seq=512"], r"data.seq is 512 tokens and the model is made for max_seq 256"),
    ],
)
def test_refuses_what_the_model_does_not_admit(stages: int, micro: int, name: str | None, sets: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        show(stages, micro, name, config=load_recipe("quickstart", sets))
