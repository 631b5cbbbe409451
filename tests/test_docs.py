"""What the pages say exists: commands and flags, links, make targets, variables, and files small enough to hold."""

import ast
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from meshloom import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOOK = r"solved in [\d.]+ s"
LONGEST = 400  # lines of a source file


def lines_of(page: Path) -> list[str]:
    """Lines inside a page's code fences, continued lines joined."""
    fences = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line for fence in fences for line in fence.replace("\\\n", " ").splitlines()]


def commands() -> list[tuple[str, str]]:
    """Every `meshloom ...` command that a page shows, with the page's name."""
    found = []
    for page in PAGES:
        for line in lines_of(page):
            match = re.search(r"(?:^|\s)(?:\.venv/bin/)?meshloom\s+(?=[a-z-])(.*)", line.split("  #")[0])
            if match and not line.startswith("#"):
                found.append((page.name, match[1]))
    return found


def helped(words: list[str]) -> str:
    """The help text of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main([*words, "--help"]) == 0
    return out.getvalue()


@pytest.mark.parametrize("page, command", commands())
def test_commands_and_flags_exist(page: str, command: str) -> None:
    words = shlex.split(command.replace("[", " ").replace("]", " ").replace("...", " "))
    name = words[:2] if words[0] == "data" else words[:1]
    text = helped([] if name[0].startswith("--") else name)
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word.split('=')[0])}\b", text), f"{page}: `meshloom {' '.join(name)}` has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ([a-z]+)`", page.read_text(encoding="utf-8")) + [
            match[1] for line in lines_of(page) if (match := re.match(r"make ([a-z]+)", line))
        ]
        assert set(named) <= targets, f"{page.name}: {set(named) - targets}"


def test_environment_variables_are_told_and_read_in_command_files_only() -> None:
    told = set(re.findall(r"MESHLOOM_[A-Z_]+", "".join(page.read_text(encoding="utf-8") for page in PAGES)))
    read = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"MESHLOOM_[A-Z_]+", text))
        command = path.name.startswith("cli")
        uses = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]
        assert command or not uses, f"{path.name}:{uses[0].lineno} reads the environment; take it as an argument from the command"
    assert told == read


@pytest.mark.parametrize("name", ["named.md", "parallelize.md"])
def test_what_a_page_runs_prints_what_it_says(name: str) -> None:
    """The Python of a page in its order; a block of text is what the block before it prints, but for how long that took."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    names: dict = {}
    printed = ""
    for kind, text in re.findall(r"```(python|text)\n(.*?)```", page, re.DOTALL):
        if kind == "text":
            assert re.sub(TOOK, "", printed) == re.sub(TOOK, "", text)
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, f"docs/{name}", "exec"), names)
        printed = out.getvalue()


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small_enough_to_hold(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST, f"{path.name}: look for the second thing that it does"


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_public_functions_say_what_they_do(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.name} does not say what it is"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}:{node.lineno}: {node.name} has no docstring"
