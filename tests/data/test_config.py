import re
from pathlib import Path

import pytest

from meshloom.core.config import ConfigError, dump, load, parse_sets
from meshloom.core.yamls import value
from meshloom.data.config import Data, Source, Tokenizer
from meshloom.data.packing import PACKINGS
from meshloom.data.report import KINDS
from meshloom.data.sources import ENDINGS

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_a_path_stands_for_a_list_of_one_source():
    assert Data(train="a.jsonl").train == (Source(path="a.jsonl"),)
    assert Data(valid="b.jsonl").valid == (Source(path="b.jsonl"),)
    assert load(Data, {"train": [{"path": "a", "weight": 2}, {"path": "b"}]}).train[0].weight == 2


def test_a_fraction_is_a_fraction():
    assert Data(valid=0.1).valid == 0.1 and Data(valid=0).valid == 0
    assert load(Data, parse_sets(["data.valid=0.1"])["data"]).valid == 0.1


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"train": []}, "the list of sources is empty"),
        ({"valid": 1.5}, "at least 0 and less than 1; you gave 1.5"),
        ({"seq": 0}, "more than 0"),
        ({"packing": "tight"}, "'documents', 'stream' or 'rows'"),
        ({"train": [{"path": "a", "weight": 0}]}, "more than 0"),
        ({"workers": 0}, "more than 0"),
        ({"sequence": 1}, "sequence is not a setting"),
        ({"max_byte": 1}, "Did you mean max_bytes"),
    ],
)
def test_refusals(bad, said):
    with pytest.raises(ConfigError, match=said):
        load(Data, bad)


@pytest.mark.parametrize("section", [Source, Data, Tokenizer])
def test_every_field_says_what_it_is(section):
    assert all(f.description for f in section.model_fields.values())


def test_sections_go_through_yaml():
    data = Data(train=(Source(path="a", weight=0.3),), valid="v.txt")
    assert load(Data, value(dump(data))) == data


def test_the_pages_example_is_a_configuration():
    text = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    tree = value(text)
    data = load(Data, tree["data"])
    assert load(Tokenizer, tree["tokenizer"]).path == "my_tokenizer" and [s.weight for s in data.train] == [3, 1, 1]


def test_the_page_names_every_choice_and_kind():
    page = PAGE.read_text()
    names = [*PACKINGS, *ENDINGS.keys() - {".arrow"}, *(k for k in KINDS if not k.startswith(("missing", "wrong", "damaged")))]
    assert not [n for n in names if n not in page]
