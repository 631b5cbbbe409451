"""Who may import whom, read from every file's imports: down only, heavy packages inside functions, no JAX in data."""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "meshloom"
LAYERS = (
    ("core",),
    ("ops",),
    ("models", "parallel"),
    ("weights", "runner"),
    ("objectives", "data", "plan"),
    ("train", "serve", "named", "auto"),
    ("recipes",),
    ("cli", "cli_base", "cli_data", "cli_info", "cli_plan"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
DRAWN = {
    # (importer, imported): why a sideways or upward import is right. A file is named as folder.module, a whole folder by its name.
    ("cli", "cli_base"): "one program in five files",
    ("cli", "cli_data"): "one program in five files",
    ("cli", "cli_info"): "one program in five files",
    ("cli", "cli_plan"): "one program in five files",
    ("cli_data", "cli_base"): "one program in five files",
    ("cli_plan", "cli_base"): "one program in five files",
    ("auto.parallelize", "named.rules"): "mesh shapes are written and read one way",
}
CORE = {"jax", "numpy", "pydantic", "yaml", "ml_dtypes"}  # all that core may stand on
HEAVY = {
    "transformers",
    "torch",
    "pyarrow",
    "datasets",
    "matplotlib",
    "tensorboardX",
    "tokenizers",
    "gguf",
    "zstandard",
    "orbax",
    "rich",
    "safetensors",
}
LIGHT = {"cli", "cli_base", "cli_data", "cli_info", "cli_plan"}  # import nothing outside the standard library but cyclopts
SCRIPTS = {"data/corpus/make.py"}  # run by hand, imported by nothing: heavy packages at the top are right
FILES = sorted(SRC.rglob("*.py"))


def module(path: Path) -> tuple[str, ...]:
    """The module of a file below meshloom: ("train", "loop"); () for the package itself."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> list[tuple[tuple[str, ...], bool, int]]:
    """Every import of a file: full name, whether it is inside a function, line. Relative names are made absolute."""
    found: list[tuple[tuple[str, ...], bool, int]] = []
    package = ("meshloom", *(module(path) if path.name == "__init__.py" else module(path)[:-1]))

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((tuple(alias.name.split(".")), inside, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                name = (*base, *(child.module.split(".") if child.module else ()))
                found.extend(((*name, alias.name), inside, child.lineno) for alias in child.names)
            walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    walk(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def refusal(importer: tuple[str, ...], imported: tuple[str, ...]) -> str | None:
    """Why one of our modules may not import another, or None. Names are below meshloom."""
    above, below = importer[0], imported[0]
    if below not in LEVEL:
        return None  # __version__ and the like
    if above == below or LEVEL[above] > LEVEL[below]:
        return None
    names = [".".join(importer[:n]) for n in range(1, len(importer) + 1)]
    others = [".".join(imported[:n]) for n in range(1, len(imported) + 1)]
    if any((a, b) in DRAWN for a in names for b in others):
        return None
    side = "beside" if LEVEL[above] == LEVEL[below] else "below"
    return f"{'.'.join(importer)} imports {'.'.join(imported)}, but {above} is {side} {below}"


def check(path: Path) -> list[str]:
    """Every import of a file that breaks a rule, as a sentence with its line."""
    own = module(path)
    wrong = []
    for name, inside, line in imports(path):
        top = name[0]
        said = None
        if top == "meshloom":
            said = refusal(own, name[1:]) if own and name[1:] else None
        elif top in sys.stdlib_module_names:
            continue
        elif own and own[0] == "core" and top not in CORE:
            said = f"core stands on {', '.join(sorted(CORE))} only; this is {top}"
        elif own and own[0] == "data" and top == "jax":
            said = "data runs in light worker processes and may not import jax"
        elif own and own[0] in LIGHT and not inside and top != "cyclopts":
            said = f"{top} at the top of a command file makes --help slow; import it inside the function"
        elif not inside and top in HEAVY and str(path.relative_to(SRC)) not in SCRIPTS:
            said = f"{top} is heavy or optional; import it inside the function that needs it"
        if said:
            wrong.append(f"{path.relative_to(SRC.parent)}:{line}: {said}")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_down(path: Path) -> None:
    assert not check(path), "\n".join(check(path))


def test_every_folder_has_a_layer() -> None:
    assert {module(path)[0] for path in FILES if module(path)} <= set(LEVEL)


def test_every_drawn_import_is_used() -> None:
    """An exception that nothing needs any more is taken out."""
    used = set()
    for path in FILES:
        for name, _, _ in imports(path):
            if name[0] == "meshloom":
                own = [".".join(module(path)[:n]) for n in range(1, len(module(path)) + 1)]
                other = [".".join(name[1:][:n]) for n in range(1, len(name))]
                used |= {(a, b) for a in own for b in other}
    assert not set(DRAWN) - used


def test_the_rules_refuse_what_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    cases = {
        "ops/a.py": ("from ..train import loop", "ops is below train"),
        "models/a.py": ("from ..parallel.zero import x", "models is beside parallel"),
        "data/a.py": ("def f():\n    import jax", "may not import jax"),
        "train/a.py": ("import matplotlib.pyplot", "import it inside the function"),
        "core/a.py": ("def f():\n    import optax", "core stands on"),
        "cli.py": ("import jax", "makes --help slow"),
    }
    for name, (text, sentence) in cases.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        assert sentence in "".join(check(path)), name
