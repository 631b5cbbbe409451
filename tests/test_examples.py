"""Every example runs as its docstring says, small, and prints what it promises."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LONGEST = 100  # lines
LIMIT = 180  # seconds; on two quiet cores each takes a tenth of it


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder that the examples share, so that the corpus is tokenized once and nothing is left in the real one."""
    return tmp_path_factory.mktemp("home")


def run(home: Path, folder: Path, name: str, *flags: str) -> str:
    """What an example prints, run as a user runs it: a process of its own, in an empty folder."""
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(home), "JAX_PLATFORMS": "cpu"}
    environ |= {"JAX_COMPILATION_CACHE_DIR": str(home / "xla")}
    command = [sys.executable, str(EXAMPLES / name), *flags]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that a pattern's groups hold, of its one place in a text."""
    found = re.findall(pattern, text, re.MULTILINE)
    assert len(found) == 1, f"{pattern!r} is found {len(found)} times in\n{text}"
    return [float(n.replace(",", "")) for n in (found[0] if isinstance(found[0], tuple) else found)]


def test_train_from_python(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "train_from_python.py", "--steps", "20")
    last, first = numbers(r"^trained +([\d.]+) nats .*, ([\d.]+) on the first 10$", told)
    held, perplexity = numbers(r"^held out +([\d.]+) nats a token, perplexity ([\d.,]+),", told)
    assert last < first < 8.5 and held < 8 and perplexity < 4096
    assert (tmp_path / "runs" / "from-python" / "metrics.jsonl").is_file()


def test_finetune_hf(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "finetune_hf.py", "--steps", "12", "--out", "out")
    before, after = (numbers(rf"^{name} +([\d.]+) nats a token, .* bits a byte$", told)[0] for name in ("before", "after"))
    assert after < before - 0.1
    assert "loaded 20 of 20 tensors, 0 missing, 0 unexpected" in told
    assert "out/tuned/hf: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json" in told


def test_own_model(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "own_model.py", "--steps", "3")
    assert "layout     zero3=2 x tensor=2" in told
    assert max(numbers(r"^largest relative difference: loss (\S+), norm (\S+)$", told)) < 1e-5
    one, many = re.findall(r"^(?:one device|zero3=2 tensor=2) +loss (.*)$", told, re.MULTILINE)
    assert one == many and len(one.split()) == 3


def test_layouts(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "layouts.py", "--steps", "2", "zero3=8")
    lines = {line[:26].strip(): line for line in told.splitlines()}
    assert lines["one device"].endswith("nothing") and "all-gather" in lines["zero3=8"]
    assert lines["one device"][26:33] == lines["zero3=8"][26:33]
    assert re.search(r"^zero3=64 +kept +1\.2 GiB", told, re.MULTILINE)


def test_data_pipeline(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "data_pipeline.py", "--out", "out")
    assert "1. stop: out/python.jsonl:7: broken JSON".replace("out/", "OUT/") in told and "6 skipped as bad" in told
    for kind in ("broken JSON", "not an object", "missing field", "wrong type", "empty", "not UTF-8"):
        assert re.search(rf"^ +1 {kind} \(", told, re.MULTILINE)
    assert "{0: 750, 1: 250}" in told and "[1, 1, 0, 1, 1, 1]" in told and "5. resume at sample 24" in told


def same_under_layouts(told: str, layouts: int, most: float) -> None:
    """One line for one device and one for each layout, all with the same loss, and an explanation whose total is that of its layout."""
    lines = re.findall(r"^(.*?) +loss ([\d.]+)  differs (\S+)  (.*)$", told, re.MULTILINE)
    assert len(lines) == 1 + layouts and lines[0][0] == "one device" and all(float(differs) <= most for _, _, differs, _ in lines)
    rules = held_in(r"^mesh rows=2 cols=4, rules (.*)$", told)
    assert rules == lines[1][0] and "all together" in told and "backward of einsum" in told


def held_in(pattern: str, text: str) -> str:
    """What a pattern's group holds in its one place in a text."""
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return found


def test_named_digits(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    told = run(home, tmp_path, "named_digits.py", "--epochs", "2")
    same_under_layouts(told, 4, 1e-4)
    assert min(float(n) for n in re.findall(r"held out ([\d.]+)%", told)) > 80


def test_two_tower(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "two_tower.py", "--steps", "3")
    same_under_layouts(told, 4, 1e-4)
    assert "rename pair out -> item out" in told and "all-gather over rows, 1 array, 16,384 B" in told


def test_named_transformer(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "named_transformer.py", "--steps", "2")
    same_under_layouts(told, 4, 1e-4)
    assert "reduce-scatter over rows x cols" in told


def test_encoder_decoder(home: Path, tmp_path: Path) -> None:
    told = run(home, tmp_path, "encoder_decoder.py", "--steps", "8")
    assert numbers(r"^1f1b differs from one device: gradients (\S+)$", told)[0] < 1e-5
    assert "a step: 60 programs and 51 moves" in told
    first, last = numbers(r"^loss of a letter: ([\d.]+) at first, ([\d.]+) after 8 steps$", told)
    assert last < first - 1


def test_parallelize_flax(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("flax.linen")
    told = run(home, tmp_path, "parallelize_flax.py", "--steps", "5")
    assert told.count("all together") == 2 and "mesh data=8 on h100:1x8" in told and "mesh rows=2 cols=4 on cpu" in told
    loss, want, apart = numbers(r"^step +5: loss ([\d.]+), plain jit ([\d.]+); parameters differ by (\S+)$", told)
    assert abs(loss - want) <= 1e-4 and apart < 1e-3


def test_auto_stages(home: Path, tmp_path: Path) -> None:
    """On slow devices with slow links: several stages of unequal size."""
    link = "{rate: 2.0e+8, latency: 1.0e-5}"
    (tmp_path / "slow.yaml").write_text(
        f"name: slow\nplatform: cpu\nmemory: 1000000000\nbandwidth: 1.0e+9\nflops: {{float32: 5.0e+9}}\nefficiency: 1.0\nnode: 8\ninside: {link}\nbetween: {link}\n"
    )
    told = run(home, tmp_path, "auto_stages.py", "--steps", "12", "--on", "slow.yaml:1x8")
    devices = [int(n) for n in re.findall(r"^layers \S+ on (\d+) devices", told, re.MULTILINE)]
    assert sum(devices) == 8 and len(set(devices)) > 1
    assert numbers(r"^gradients differ from one device's by (\S+) of", told)[0] < 1e-5
    first, last = numbers(r"^loss of an image: ([\d.]+) at first, ([\d.]+) after 12 steps$", told)
    assert last < first - 0.3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short_and_say_what_they_show(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    said = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/{path.name}" in said and "on two CPU cores" in said and "It prints" in said
    assert f"def test_{path.stem}(" in Path(__file__).read_text(encoding="utf-8")
