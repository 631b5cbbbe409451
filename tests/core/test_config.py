"""Sections: every mistake at once, sentences, overrides, and a dump that loads to an equal section."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator

from meshloom.core import config
from meshloom.core.config import ConfigError, Section, load, merge, parse_sets


class Inner(Section):
    steps: int = Field(10, ge=1)
    rate: float = Field(1e-3, gt=0, lt=1)
    kind: Literal["cosine", "linear"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    on: bool = False


class Item(Section):
    path: str
    weight: float = 1.0


class Outer(Section):
    name: str
    inner: Inner = Inner()
    source: str = Field("here", alias="from")
    even: int = 2
    items: tuple[Item, ...] = ()
    held: float | tuple[Item, ...] = 0.1
    most: int | None = None
    folder: Path = Field(Path("a"), strict=False)

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"must be even; you gave {value}. Use {value + 1}.")
        return value


CASES = {
    "unknown key, nearest": ({"inner": {"stepz": 3}}, ["inner.stepz is not a setting. Did you mean inner.steps?"]),
    "unknown section": ({"iner": {"steps": 3}}, ["iner is not a setting. Did you mean inner?"]),
    "key of another section": ({"betas": [1, 2]}, ["betas is not a setting. Did you mean inner.betas?"]),
    "nothing near": ({"zzzzzz": 1}, ["zzzzzz is not a setting. There is: name, inner, from, even, items, held, most, folder."]),
    "nothing near inside": ({"inner": {"qqqqqq": 1}}, ["inner.qqqqqq is not a setting. inner has: steps, rate, kind, betas, on."]),
    "text for a number": ({"inner": {"steps": "many"}}, ['inner.steps must be a whole number; you gave "many" (text).']),
    "text that looks like a number": ({"inner": {"rate": "0.1"}}, ['inner.rate must be a number; you gave "0.1" (text).']),
    "fraction": ({"inner": {"steps": 1.5}}, ["inner.steps must be a whole number; you gave 1.5."]),
    "boolean for a number": ({"inner": {"steps": True}}, ["inner.steps must be a whole number; you gave true (a boolean)."]),
    "number for a boolean": ({"inner": {"on": 1}}, ["inner.on must be true or false; you gave 1."]),
    "range": (
        {"inner": {"steps": 0, "rate": 1.0}},
        ["inner.steps must be at least 1; you gave 0.", "inner.rate must be less than 1.0; you gave 1.0."],
    ),
    "choice": (
        {"inner": {"kind": "cosin"}},
        ["inner.kind must be 'cosine' or 'linear'; you gave \"cosin\" (text). Did you mean 'cosine'?"],
    ),
    "section is a number": ({"inner": 3}, ["inner must be a section of keys and values; you gave 3."]),
    "own check": ({"even": 3}, ["even: must be even; you gave 3. Use 4."]),
    "list item": ({"inner": {"betas": [0.9, "x"]}}, ['inner.betas.1 must be a number; you gave "x" (text).']),
    "key in a list": (
        {"items": [{"path": "a"}, {"pth": "a"}]},
        ["items.1.path is missing and has no default.", "items.1.pth is not a setting. Did you mean items.1.path?"],
    ),
    "either of two": ({"held": "x"}, ['held must be a number or a list; you gave "x" (text).']),
    "deep in the second of two": ({"held": [{"path": "a", "wait": 1}]}, ["held.0.wait is not a setting. Did you mean held.0.weight?"]),
    "number or nothing": ({"most": "x"}, ['most must be a whole number; you gave "x" (text).']),
    "null": ({"inner": {"steps": None}}, ["inner.steps must be a whole number; you gave null (nothing)."]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_is_a_sentence(case: str) -> None:
    tree, sentences = CASES[case]
    with pytest.raises(ConfigError) as caught:
        load(Outer, {"name": "x", **tree})
    assert [str(p) for p in caught.value.problems] == sentences


def test_all_mistakes_at_once_with_the_source() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Outer, {"inner": {"stepz": 3, "rate": 2.0}, "fom": "a"}, "my.yaml")
    text = str(caught.value)
    assert text.startswith("my.yaml: 4 settings are wrong:\n")
    assert "name is missing and has no default." in text and "Did you mean from?" in text and "inner.rate must be less than 1" in text


def test_dump_loads_to_an_equal_section() -> None:
    given = {"name": "1e3", "from": "no", "folder": "b/c", "inner": {"steps": 7, "rate": 1e-05, "betas": [0.5, 1], "on": True}}
    section = load(Outer, given)
    again = load(Outer, config.yamls.value(config.dump(section)))
    assert again == section and hash(again) == hash(section)
    assert again.inner.betas == (0.5, 1.0) and again.name == "1e3" and again.source == "no" and again.folder == Path("b/c")


def test_merge_is_deep_and_leaves_its_inputs() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert merge(base, {"a": {"c": [3]}, "d": {"e": 2}}) == {"a": {"b": 1, "c": [3]}, "d": {"e": 2}}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 1}


def test_sets_are_yaml_and_the_later_wins() -> None:
    tree = parse_sets(["a.b=1e-3", "a.c=[1, two]", "x=true", "a.b=2", "name=a=b", "empty="])
    assert tree == {"a": {"b": 2, "c": [1, "two"]}, "x": True, "name": "a=b", "empty": None}


@pytest.mark.parametrize("item", ["train.steps", "=3", "a..b=1"])
def test_sets_of_another_form_are_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="--set takes key=value with a dotted key, like train.steps=100; you gave"):
        parse_sets([item])


def test_sets_with_broken_yaml_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"The value of --set a.b is not YAML: line 1"):
        parse_sets(["a.b=[1"])


def test_nearest_ignores_case_and_dashes() -> None:
    assert config.nearest("Learning-Rate", ["learning_rate", "x"]) == "learning_rate"
    assert config.nearest("zzz", ["learning_rate"]) is None
    assert (
        config.unknown("recipe", "quikstart", ["quickstart", "b"])
        == "There is no recipe 'quikstart'. Did you mean 'quickstart'? There is: b, quickstart."
    )


def test_a_file_is_named(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("name: x\ninner: {stepz: 1}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: inner\.stepz is not a setting"):
        load(Outer, config.yamls.read(tmp_path / "a.yaml"), str(tmp_path / "a.yaml"))


def test_errors_inside_a_validator_keep_their_paths() -> None:
    class Holder(Section):
        model: Annotated[object, Field()] = None

        @field_validator("model", mode="before")
        @classmethod
        def _load(cls, value: object) -> object:
            return load(Inner, value, inside=("model",))  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as caught:
        load(Holder, {"model": {"stepz": 1, "rate": 3}})
    assert {p.path for p in caught.value.problems} == {("model", "stepz"), ("model", "rate")}
    assert "model.stepz is not a setting. Did you mean model.steps?" in str(caught.value)
