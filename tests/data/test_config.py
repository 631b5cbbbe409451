import pytest
from pydantic import ValidationError

from meshloom.data.config import Data, Source, Tokenizer


def test_a_path_stands_for_a_list_of_one_source():
    assert Data(train="a.jsonl").train == (Source(path="a.jsonl"),)
    assert Data(valid="b.jsonl").valid == (Source(path="b.jsonl"),)
    assert Data(train=[{"path": "a", "weight": 2}, {"path": "b"}]).train[0].weight == 2


def test_a_fraction_is_a_fraction_also_as_text():
    assert Data(valid=0.1).valid == 0.1 and Data(valid="0.1").valid == 0.1 and Data(valid=0).valid == 0


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"train": []}, "the list of sources is empty"),
        ({"valid": 1.5}, "less than 1"),
        ({"seq": 0}, "greater than 0"),
        ({"packing": "tight"}, "'documents', 'stream' or 'rows'"),
        ({"train": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"sequence": 1}, "Extra inputs"),
    ],
)
def test_refusals(bad, said):
    with pytest.raises(ValidationError, match=said):
        Data.model_validate(bad)


@pytest.mark.parametrize("section", [Source, Data, Tokenizer])
def test_every_field_says_what_it_is(section):
    assert all(f.description for f in section.model_fields.values())


def test_sections_go_through_json():
    data = Data(train=[{"path": "a", "weight": 0.3}], valid="v.txt")
    assert Data.model_validate_json(data.model_dump_json()) == data
