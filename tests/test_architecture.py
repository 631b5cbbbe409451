"""The page for newcomers is true: its folders exist, its layers are those that imports are held to, collectives stand where it says."""

import ast
import re
from pathlib import Path

from meshloom.core.spec import is_spec
from meshloom.core.tree import named_leaves
from programs import FAMILIES, config
from test_imports import LAYERS

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "meshloom"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LAYERS_BLOCK, COLLECTIVES_BLOCK = (block.strip().splitlines() for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL))
COLLECTIVES = {"psum", "pmax", "pmin", "pmean", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pshuffle"}


def test_the_layers_are_those_of_the_code() -> None:
    drawn = [set(re.split(r" {2,}", line)[0].split()) for line in LAYERS_BLOCK]
    assert drawn == [set(names) for names in reversed(LAYERS)]
    there = {path.name for path in SRC.iterdir() if (path / "__init__.py").is_file()} | {p.stem for p in SRC.glob("cli*.py")}
    assert set().union(*drawn) == there


def test_the_files_that_it_names_exist() -> None:
    for name in re.findall(
        r"`((?:core|ops|models|parallel|runner|weights|objectives|data|plan|train|serve|named|recipes)/[a-z_/.0-9]+)`", PAGE
    ):
        assert (SRC / name).exists(), f"docs/architecture.md names {name}"


def test_parameters_are_named_by_models_alone() -> None:
    """A new family needs no edit in what splits, counts and runs models."""
    paths = {path for model, c in map(config, FAMILIES) for path in named_leaves(model.specs(c), is_spec)}
    names = {p for p in paths if "." in p} | {p.rpartition(".")[2] for p in paths if "_" in p}
    for folder in ("core", "parallel", "plan", "runner", "objectives", "train"):
        for file in (SRC / folder).rglob("*.py"):
            said = {n.value for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Constant)}
            assert not said & names, file


def test_the_names_that_it_gives_are_defined_there() -> None:
    for names, file in re.findall(r"^\| `(\w+)` \| `([\w/.]+)`", PAGE, re.MULTILINE):
        assert re.search(rf"^(class )?{names}\b", (SRC / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file} defines no {names}"


def test_collectives_are_written_where_it_says_and_nowhere_else() -> None:
    found = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and isinstance(node.value, ast.Name) and node.value.id == "lax":
                found.add(str(path.relative_to(SRC)))
    assert found == {line.split()[0] for line in COLLECTIVES_BLOCK}
