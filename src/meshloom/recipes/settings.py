"""The page of every setting, written from the sections themselves: `make docs` renews docs/settings.md, and a test compares."""

import sys
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshloom.core import yamls
from meshloom.core.config import Section, section_in
from meshloom.models.table import MODELS
from meshloom.recipes.run import RunConfig

HEAD = """# Settings

Every key that a recipe may hold, written by `make docs` from the code. A key that is not here is refused with the nearest name.
`--set section.key=value` overrides one; `extends: other` starts from another recipe.
"""
WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "null", Any: "anything"}
BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "more than"), Le: ("le", "at most"), Lt: ("lt", "less than")}


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD, table("Top level", RunConfig)]
    seen: set[type[Section]] = set()
    for name, field in RunConfig.model_fields.items():
        inner = section_in(field.annotation)
        if name != "model" and inner is not None:
            parts += sections(name, inner, seen)
    parts.append(
        "## model\n\n`family` names one of the families below, whose keys stand beside it; or `from` names a Hugging Face folder,\n"
        "or `like` one of the known models (`meshloom info` lists them), whose keys those beside it change.\n"
    )
    parts += [table(f"model, family {name}", model.Config) for name, model in sorted(MODELS.items())]
    return "\n".join(parts)


def sections(name: str, kind: type[Section], seen: set[type[Section]]) -> Iterator[str]:
    """The table of a section, then those of the sections inside it; a kind of section that was shown is not shown again."""
    seen.add(kind)
    yield table(name, kind)
    for key, field in kind.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None and inner not in seen:
            yield from sections(f"{name}.{key}", inner, seen)


def table(title: str, kind: type[Section]) -> str:
    """One section: its keys, what each may be, its default, what it is."""
    rows = [f"## {title}", "", "| key | may be | default | what it is |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        about = " ".join((field.description or "").split())
        rows.append(" | ".join(("| `" + (field.alias or name) + "`", kind_of(field), default(field), about.replace("|", "\\|"))) + " |")
    return "\n".join(rows) + "\n"


def kind_of(field: FieldInfo) -> str:
    """What a field may be, with its bounds, in words."""
    bounds = [f"{word} {getattr(m, name)}" for m in field.metadata for kind, (name, word) in BOUNDS.items() if isinstance(m, kind)]
    return ", ".join((words(field.annotation), *bounds))


def words(annotation: Any) -> str:
    """A type in words."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    if get_origin(annotation) is tuple:
        return f"list of {words(get_args(annotation)[0])}"
    if annotation in WORDS:
        return WORDS[annotation]
    return " or ".join(dict.fromkeys(words(part) for part in get_args(annotation) if isinstance(part, type) or get_args(part))) or "text"


def default(field: FieldInfo) -> str:
    """The default of a field as a file spells it."""
    if field.default_factory is not None:
        return "by the machine"
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, Section) or (isinstance(field.default, tuple) and any(isinstance(v, Section) for v in field.default)):
        return "its defaults"
    if field.default in ("", ()):
        return "empty"
    return f"`{yamls.text(field.default).split(chr(10))[0]}`"


if __name__ == "__main__":
    sys.stdout.write(page())
