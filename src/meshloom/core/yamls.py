"""YAML as a person means it: 1e-3 is a number, `no` is text, a key given twice is an error, and what is written reads back equal."""

import re
from pathlib import Path
from typing import Any

import yaml

INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$")
BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
RESOLVERS = (("bool", BOOL, "tTfF"), ("int", INT, "-+0123456789"), ("float", FLOAT, "-+0123456789."), ("null", NULL, ["~", "n", "N", ""]))


class Loader(yaml.SafeLoader):
    """Safe loading under the four resolvers above, refusing a key given twice."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012  (PyYAML's own class attribute, replaced so that its 1.1 rules are gone)


class Dumper(yaml.SafeDumper):
    """Writing under the same resolvers, so that text that looks like a number is quoted."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists are indented under their key."""
        super().increase_indent(flow, False)


def _number(loader: Loader, node: yaml.ScalarNode) -> int | float:
    """A float; an exponent without a point that makes a whole number is an integer, so that `steps: 1e4` is 10000."""
    text = node.value.replace("_", "")
    if text.lower().lstrip("+-") in (".inf", ".nan"):
        return float(text.lower().replace(".", ""))
    number = float(text)
    return int(number) if "." not in text and number.is_integer() else number


def _mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """A mapping whose keys are all different.  Raises a marked YAML error for a key given twice."""
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (list, dict)):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word, not a list or a section", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


for _tag, _pattern, _first in RESOLVERS:
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
    Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", "")))
Loader.add_constructor("tag:yaml.org,2002:float", _number)
Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def value(text: str) -> Any:
    """The value that YAML text spells.  Raises ValueError with line and column where it is not YAML."""
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}{error.problem or error}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{error}.") from None


def read(path: Path | str) -> dict[str, Any]:
    """The mapping that a YAML file holds.  Raises OSError where there is no such file, ValueError naming the file and line otherwise."""
    try:
        tree = value(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path} must hold keys and values, like 'train: {{steps: 100}}'; it {'is empty' if tree is None else f'holds a {type(tree).__name__}'}."
        )
    return tree


def text(tree: Any) -> str:
    """YAML text of nested mappings, lists and scalars, in their order."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
