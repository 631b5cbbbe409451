"""The training sections: defaults are valid, and every refusal reads as a sentence."""

import pytest
from pydantic import ValidationError

from meshloom.train import config

SECTIONS = [getattr(config, n) for n in dir(config) if n.endswith("Config")]


def test_every_field_is_documented():
    fields = [(s.__name__, n) for s in SECTIONS for n, f in s.model_fields.items() if not f.description]
    assert fields == [] and len(SECTIONS) == 10


def test_reads_names_fields():
    assert set().union(*config.READS.values()) <= set(config.OptimizerConfig.model_fields)
    assert set(config.READS) == set(config.OptimizerConfig.model_fields["kind"].annotation.__args__)


REFUSALS = [
    (
        config.OptimizerConfig,
        dict(kind="lion", eps=1e-6),
        "lion does not read eps; adamw, muon, lamb, onebit_adam, onebit_lamb and zero_one_adam would. Remove it, or set it to 1e-08",
    ),
    (
        config.OptimizerConfig,
        dict(kind="adamm"),
        "'adamw', 'adafactor', 'lion', 'muon', 'sgd', 'lamb', 'onebit_adam', 'onebit_lamb' or 'zero_one_adam'",
    ),
    (config.OptimizerConfig, dict(lr=0), "greater than 0"),
    (config.OptimizerConfig, dict(beta2=1.0), "less than 1"),
    (config.ScheduleConfig, dict(kind="wsd"), "wsd needs a decay of at least 1"),
    (config.ScheduleConfig, dict(kind="cosine", decay=5), "cosine takes no decay"),
    (config.ScheduleConfig, dict(kind="inverse_sqrt"), "needs a warmup"),
    (config.TrainConfig, dict(), "exactly one of steps, tokens, epochs; it has none"),
    (config.TrainConfig, dict(steps=3, epochs=1), "it has steps: 3, epochs: 1.0"),
    (config.TrainConfig, dict(steps=0), "greater than or equal to 1"),
    (config.TrainConfig, dict(steps=1, precision="fp8"), "'fp32', 'bf16' or 'fp16'"),
    (config.LossScaleConfig, dict(initial=0.5), "minimum <= initial <= maximum"),
    (config.BatchConfig, dict(sequences=12, micro_batches=5), "Use one of 1, 2, 3, 4, 6, 12"),
    (config.CheckpointConfig, dict(keep_last=0), "greater than or equal to 1"),
    (config.CheckpointConfig, dict(keep_lst=1), "Extra inputs"),
]


@pytest.mark.parametrize("section, values, message", REFUSALS)
def test_refusals(section, values, message):
    with pytest.raises(ValidationError) as caught:
        section(**values)
    assert message in str(caught.value)


def test_defaults_hold():
    for section in SECTIONS:
        section(**({"steps": 1} if section is config.TrainConfig else {}))
