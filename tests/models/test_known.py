"""Known models against their published numbers of parameters."""

import pytest

from meshloom.core.spec import count
from meshloom.models.known import fields, known, names, table

PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112, "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_419_200,
}  # fmt: skip
"""Parameters as the makers' checkpoints count them (the index files on the hub; DeepSeek's without its extra prediction layer)."""


@pytest.mark.parametrize("name", names())
def test_a_known_model_has_as_many_parameters_as_its_makers_say(name):
    model, c = known(name)
    assert count(model.specs(c)) == PUBLISHED[name]


def test_every_known_model_has_a_source_and_a_published_number():
    assert set(PUBLISHED) == set(names()) and all(row["source"] for row in table().values())


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no known model 'llama3-7b'. Did you mean 'llama3-70b'\?.*deepseek-v3"):
        fields("llama3-7b")
