"""The benchmark programs, tiny: they take turns, do the same work, and their tables are right."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCH))

import measure  # noqa: E402
import report  # noqa: E402
import run as bench  # noqa: E402
import startup  # noqa: E402
from turns import Program, interleave  # noqa: E402

ECHO = """
import sys
sys.path.insert(0, {bench!r})
from turns import Turns
turns = Turns()
print("noise")
turns.loop(lambda: {{"loss": 2.0}}, name={name!r})
"""


def program(tmp_path: Path, name: str, text: str | None = None) -> Program:
    return Program(name, [sys.executable, "-c", text or ECHO.format(bench=str(BENCH), name=name)], {}, tmp_path / f"{name}.log")


def test_programs_take_turns_and_what_they_print_does_not_disturb(tmp_path: Path) -> None:
    programs = [program(tmp_path, name) for name in "ab"]
    assert [p.hear()["name"] for p in programs] == ["a", "b"]
    answers = interleave(programs, rounds=3, warm=1, rest=0)
    for p in programs:
        p.close()
        assert p.process.returncode == 0
    assert [len(given) for given in answers.values()] == [4, 4]
    assert [a["warm"] for a in answers["a"]] == [True, False, False, False]
    assert "noise" in (tmp_path / "a.log").read_text()


def test_a_program_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    p = program(tmp_path, "broken", "raise SystemExit('no torch here')")
    with pytest.raises(RuntimeError, match="broken ended with code 1.*\n.*no torch here"):
        p.hear()
    p.close()


def test_ratios_are_within_a_round_and_warm_turns_do_not_count() -> None:
    turn = lambda wall, warm=False: {"wall": wall, "cpu": 2 * wall, "loss": 1.0, "warm": warm}
    answers = {"ours": [turn(9, True), turn(1), turn(2), turn(4)], "theirs": [turn(1, True), turn(2), turn(4), turn(8)]}
    ours, theirs = measure.rows(answers, "ours", cores=2)
    assert (ours.wall, ours.ratio, ours.cpu) == (2, 1, 2)
    assert (theirs.wall, theirs.ratio, theirs.low, theirs.high, theirs.cpu_ratio) == (4, 2, 2, 2, 2)
    assert measure.quartiles([1, 2, 3, 4, 5]) == (2, 4)


def test_disagreement_is_the_largest_relative_difference() -> None:
    answers = {"a": [{"loss": 2.0}, {"loss": 4.0}], "b": [{"loss": 2.0}, {"loss": 4.4}]}
    assert measure.disagreement(answers, ("a", "b")) == pytest.approx(0.1)


def test_a_page_gets_the_tables_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(page, "new")
    assert page.read_text() == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no <!-- bench:begin -->"):
        report.write(page, "new")


def test_the_published_page_has_its_markers() -> None:
    text = (BENCH.parent / "docs" / "speed.md").read_text()
    assert report.BEGIN in text
    assert report.END in text


@pytest.mark.parametrize("job", ["train", "decode"])
def test_our_programs_run(tmp_path: Path, job: str) -> None:
    bench._export("llama-tiny", str(tmp_path / "weights"), tmp_path)
    p = Program(job, [sys.executable, str(BENCH / "ours.py"), job, "llama-tiny", str(tmp_path / "weights")], {}, tmp_path / "log")
    try:
        facts = p.hear()
        first, second = p.turn(), p.turn()
    finally:
        p.close()
    if job == "train":
        assert 0 < second["loss"] < 7
        assert second["loss"] != first["loss"]
    else:
        assert first["ids"] == second["ids"]
        assert len(first["ids"]) == facts["new"]


def test_start_up_is_timed_to_the_first_step(tmp_path: Path) -> None:
    tiny = ("model.layers=1", "model.embed=32", "model.heads=2", "model.kv_heads=2", "model.ffn=32", "train.steps=30")
    start = startup.start("quickstart", tmp_path / "run", tmp_path / "cache", tiny, steps=4)
    assert start.seconds > 0
    assert 0 <= start.waiting < 1


def test_calls_of_stages_are_counted_and_timed() -> None:
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(BENCH / "stage_calls.py"), "--stages", "2", "--micro", "3", "--arrays", "2,5", "--steps", "2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True)
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [f"{n} parameters a stage: 11 programs and 7 moves" for n in (2, 5)]


@pytest.mark.parity
def test_ours_and_theirs_do_the_same_work(tmp_path: Path) -> None:
    """The whole comparison, tiny: equal losses and equal tokens."""
    if find_spec("torch") is None:
        pytest.skip("no torch")
    suite = bench.SUITES["gpt"]
    programs = {name: job for name, job in suite.programs.items() if name != "torch.compile"}  # compiles for a minute
    done = bench.compare(suite._replace(programs=programs, same=("meshloom", "PyTorch")), True, True, tmp_path)
    assert "losses agree to" in done[0]
    assert float(done[0].split("losses agree to ")[1].split()[0]) < 1e-5


def test_the_gpu_check_runs_on_the_cpu(tmp_path: Path) -> None:
    """Small, and without the packages that a GPU machine may lack."""
    code = (
        "import sys\n"
        "for name in ('orbax', 'tokenizers', 'rich', 'cyclopts', 'safetensors', 'zstandard', 'matplotlib', 'tensorboardX'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        "import gpu_check\n"
        f"sys.exit(gpu_check.main(['--small', '--json', {str(tmp_path / 'report.json')!r}]))\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads((tmp_path / "report.json").read_text())
    assert {row["dtype"] for row in told["parity"]} == {"float32", "bfloat16"}
    assert told["speed"][0]["tokens_per_s"] > 0
    assert "all well" in done.stdout
