"""Tests mirror the tree: src/meshloom/train/loop.py is tested by tests/train/test_loop.py."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC, TESTS = ROOT / "src" / "meshloom", ROOT / "tests"
EXEMPT = {
    # file: which test covers it, and why that is the better place
    "__init__.py": "tests/named/test_tensor.py: only finds the names that live in named/",
    "cli_base.py": "tests/test_cli.py: exit codes and errors show only through a command",
    "cli_data.py": "tests/test_cli.py: the commands of one program are tested together",
    "cli_plan.py": "tests/test_cli.py: the commands of one program are tested together",
    "cli_info.py": "tests/test_cli.py: a command without a function of its own to call",
    "ops/blocks.py": "tests/ops/test_attention.py: a row of its table, held against the reference with all the others",
    "data/corpus/make.py": "tests/data/test_sources.py: makes the corpus that ships, by hand and rarely; its result is what the tests read",
}


def has_code(path: Path) -> bool:
    """Whether a file defines a function or a class; tables and sections alone are tested by their readers."""
    return any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def mirror(path: Path) -> Path:
    """The test file of a source file."""
    own = path.relative_to(SRC)
    return TESTS / own.parent / f"test_{own.name}"


@pytest.mark.parametrize("path", [p for p in sorted(SRC.rglob("*.py")) if has_code(p)], ids=lambda p: str(p.relative_to(SRC)))
def test_every_file_with_code_has_its_test(path: Path) -> None:
    name = str(path.relative_to(SRC))
    assert mirror(path).is_file() or name in EXEMPT, (
        f"{name} has no {mirror(path).relative_to(ROOT)}. Write it, or give a reason in EXEMPT."
    )


def test_exemptions_are_needed_and_name_a_test() -> None:
    for name, reason in EXEMPT.items():
        assert (SRC / name).is_file() and not mirror(SRC / name).is_file(), f"{name} needs no exemption any more"
        assert (ROOT / reason.split(":")[0]).is_file(), f"{name}: {reason} names no test file"


def test_tests_have_a_source_or_check_the_project() -> None:
    """A test of a file that is gone goes too."""
    project = {"test_architecture.py", "test_imports.py", "test_mirror.py", "test_docs.py", "test_examples.py"}
    for path in TESTS.rglob("test_*.py"):
        own = path.relative_to(TESTS)
        source = SRC / own.parent / own.name.removeprefix("test_")
        whole = own.parts[0] in {"end_to_end", "benchmarks", "examples", "parity", "layouts"}
        assert source.is_file() or own.name in project or whole, f"{own} tests no file of {SRC.name}"
