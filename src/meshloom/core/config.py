"""Configuration: frozen sections, YAML in and out, deep merging, and every mistake of a file reported at once as a sentence."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from meshloom.core import yamls

S = TypeVar("S", bound="Section")
Nested = dict[str, Any]
"""Mappings in mappings, lists and scalars, as a file spells them."""


class Section(BaseModel):
    """A part of a configuration. Frozen and hashable; unknown keys and wrong types are refused.
    Lists of a file become tuples, so fields are `tuple[...]`; a `pathlib.Path` field needs `Field(strict=False)`, or be text."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # text never becomes a number, nor 1 a boolean
        allow_inf_nan=False,  # what is `.inf` in a file is a mistake: "never" and "no limit" have spellings of their own
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
    )


class Problem(NamedTuple):
    """One mistake: the keys that lead to it, and what is wrong, as the end of a sentence that the dotted path begins."""

    path: tuple[str, ...]
    says: str

    def __str__(self) -> str:
        if not self.path:
            says = self.says.removeprefix(": ")
            return says[:1].upper() + says[1:]
        return ".".join(self.path) + ("" if self.says.startswith(":") else " ") + self.says


class ConfigError(ValueError):
    """All the mistakes of one configuration."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        head = f"{source}: " if source else ""
        if len(problems) == 1:
            super().__init__(f"{head}{problems[0]}")
        else:
            super().__init__(f"{head}{len(problems)} settings are wrong:\n" + "\n".join(f"  - {p}" for p in problems))


def load(kind: type[S], tree: Mapping[str, Any], source: str = "", inside: tuple[str, ...] = ()) -> S:
    """A checked section of `kind` made of nested mappings.  source: what to call the input in errors.  inside: the keys above this section,
    where a validator of an outer section calls this.
    Raises ConfigError that lists every unknown key (with the nearest one), wrong type and value out of range."""
    frozen = _tuples(tree)
    try:
        return kind.model_validate(frozen)
    except ValidationError as error:
        raise ConfigError(_problems(kind, frozen, error, inside), source) from None


def dump(section: Section) -> str:
    """YAML text that `load` turns into an equal section: the resolved configuration of a run."""
    return yamls.text(to_tree(section))


def to_tree(section: Section) -> Nested:
    """The section as nested mappings, lists and scalars."""
    return section.model_dump(mode="json", by_alias=True)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Nested:
    """`base` with the values of `over`: mappings are merged at every depth, anything else is replaced. Neither input changes."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_sets(items: Iterable[str]) -> Nested:
    """The tree that `a.b=value` items spell; values are YAML, later items win.  Raises ConfigError for items of another form."""
    tree: Nested = {}
    problems: list[Problem] = []
    for item in items:
        path, equals, value = item.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(Problem((), f"--set takes key=value with a dotted key, like train.steps=100; you gave {item!r}."))
            continue
        try:
            parsed = yamls.value(value)
        except ValueError as error:
            problems.append(Problem((), f"the value of --set {path} is not YAML: {error}"))
            continue
        for key in reversed(keys):
            parsed = {key: parsed}
        tree = merge(tree, parsed)
    if problems:
        raise ConfigError(problems)
    return tree


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice spelled most like `name`, or None where none is near."""
    names = list(choices)
    folded = {n.lower().replace("-", "_"): n for n in names}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def unknown(what: str, name: str, choices: Iterable[str]) -> str:
    """The sentence for a name that is not among the choices: the nearest first, then all of them."""
    names = sorted(choices)
    near = nearest(name, names)
    guess = f" Did you mean {near!r}?" if near else ""
    return f"There is no {what} {name!r}.{guess} There is: {', '.join(names) or 'none'}."


def keys(kind: type[Section]) -> dict[str, Any]:
    """The keys of a section as a file spells them, each with its annotation."""
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def paths(kind: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every dotted path of a section and the sections inside it, as tuples of keys."""
    for key, annotation in keys(kind).items():
        yield (*prefix, key)
        inner = section_in(annotation)
        if inner is not None and inner is annotation:
            yield from paths(inner, (*prefix, key))


def _tuples(tree: Any) -> Any:
    """The tree with its lists turned into tuples."""
    if isinstance(tree, Mapping):
        return {str(key): _tuples(value) for key, value in tree.items()}
    return tuple(_tuples(value) for value in tree) if isinstance(tree, (list, tuple)) else tree


def _problems(kind: type[Section], tree: Any, error: ValidationError, inside: tuple[str, ...]) -> list[Problem]:
    """Pydantic's errors in our words; a ConfigError raised inside a validator is opened and its paths are prefixed."""
    found: list[Problem] = []
    types: dict[tuple[str, ...], list[str]] = {}  # path -> what it may be, one for each branch of a union
    for item in error.errors(include_url=False):
        path = _path(tree, item["loc"], item["type"])
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            found += [Problem((*path, *p.path), p.says) for p in inner.problems]
        elif item["type"] == "extra_forbidden":
            found.append(Problem(path, _unknown_key(kind, path, inside)))
        elif item["type"] in KINDS:
            types.setdefault(path, []).append(KINDS[item["type"]])
            choices = " or ".join(dict.fromkeys(types[path]))
            found = [p for p in found if p.path != path] + [Problem(path, f"must be {choices}; you gave {_shown(item['input'])}.")]
        else:
            found.append(Problem(path, _says(item, inner)))
    deeper = {p.path[:n] for p in found for n in range(1, len(p.path))}  # a union's other branches, where one went further in
    return [p for p in dict.fromkeys(found) if p.path not in deeper or p.path not in types]


def _path(tree: Any, loc: tuple[int | str, ...], kind: str) -> tuple[str, ...]:
    """Pydantic's location without the labels of union branches, which are no keys of the file."""
    path: list[str] = []
    for number, key in enumerate(loc):
        if (isinstance(tree, Mapping) and key in tree) or (isinstance(tree, tuple) and isinstance(key, int)):
            tree = tree[key]  # type: ignore[index]
        elif not (isinstance(tree, Mapping) and number == len(loc) - 1 and kind == "missing"):
            continue
        path.append(str(key))
    return tuple(path)


def _section_at(kind: type[Section], path: tuple[str, ...]) -> type[Section] | None:
    """The section that a path leads to, through lists and unions, or None."""
    found: type[Section] | None = kind
    for key in path:
        if found is not None and not key.isdigit():
            found = section_in(keys(found).get(key))
    return found


def section_in(annotation: Any) -> type[Section] | None:
    """The first section that an annotation names: itself, or inside a list, an optional or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


def _unknown_key(kind: type[Section], path: tuple[str, ...], inside: tuple[str, ...]) -> str:
    """What to say of a key that its section lacks: the nearest key there, else the same key in another section."""
    section = _section_at(kind, path[:-1])
    here = list(keys(section)) if section else []
    above = (*inside, *path[:-1])
    near = nearest(path[-1], here)
    if near:
        return f"is not a setting. Did you mean {'.'.join((*above, near))}?"
    elsewhere = [".".join((*inside, *p)) for p in paths(kind) if p[-1] == path[-1] and p != path]
    if elsewhere:
        return f"is not a setting. Did you mean {' or '.join(elsewhere)}?"
    where = f"{'.'.join(above)} has" if above else "There is"
    return f"is not a setting. {where}: {', '.join(here)}." if here else "is not a setting."


KINDS = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "finite_number": "a finite number",
    "bool_type": "true or false", "bool_parsing": "true or false", "string_type": "text", "path_type": "a path",
    "tuple_type": "a list", "list_type": "a list", "set_type": "a list", "none_required": "null",
    "dict_type": "a section of keys and values", "mapping_type": "a section of keys and values",
    "model_type": "a section of keys and values", "model_attributes_type": "a section of keys and values",
}  # fmt: skip
BOUNDS = {"greater_than": "more than {gt}", "greater_than_equal": "at least {ge}", "less_than": "less than {lt}",
          "less_than_equal": "at most {le}", "multiple_of": "a multiple of {multiple_of}", "string_too_short": "at least {min_length} letters long",
          "too_short": "a list of at least {min_length}", "too_long": "a list of at most {max_length}"}  # fmt: skip


def _says(item: Any, inner: Exception | None) -> str:
    """One pydantic error as the end of a sentence that begins with the path."""
    kind, given, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "missing":
        return "is missing and has no default."
    if kind in BOUNDS:
        return f"must be {BOUNDS[kind].format(**context)}; you gave {_shown(given)}."
    if kind in ("literal_error", "enum"):
        near = nearest(str(given), [c.strip("'") for c in context["expected"].replace(" or ", ", ").split(", ")])
        return f"must be {context['expected']}; you gave {_shown(given)}." + (f" Did you mean {near!r}?" if near else "")
    if inner is not None:
        return f": {inner}"
    return f": {item['msg']}; you gave {_shown(given)}."


def _shown(given: Any) -> str:
    """A value as an error shows it: its text, cut at 60 letters, with its kind where the text alone could mislead."""
    text = json.dumps(given, ensure_ascii=False, default=str)
    short = text if len(text) <= 60 else text[:57] + "..."
    names = {str: "text", bool: "a boolean", list: "a list", tuple: "a list", dict: "a section", type(None): "nothing"}
    return f"{short} ({names[type(given)]})" if type(given) in names else short
