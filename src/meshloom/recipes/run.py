"""The configuration of a run: every section that a recipe may hold, each owned by the code that reads it."""

import re
from typing import Any

from pydantic import Field, InstanceOf, field_serializer, field_validator

from meshloom.core.config import ConfigError, Problem, Section, load, merge, to_tree, unknown
from meshloom.data.config import Data, Tokenizer
from meshloom.models import known
from meshloom.models.base import ModelConfig
from meshloom.models.table import MODELS
from meshloom.train.config import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    OptimizerConfig,
    OuterConfig,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
)


class Family(Section):
    """A model by its family and sizes: `model: {family: llama, layers: 4, ...}`, or from a known one: `model: {like: llama3-8b, layers: 4}`."""

    family: str
    """A row of MODELS."""
    config: InstanceOf[ModelConfig]
    """The family's own section; in a file its keys stand beside `family`."""


class Folder(Section):
    """A model that starts from a Hugging Face folder: `model: {from: path}`. Its config.json gives family and sizes."""

    path: str = Field(alias="from")


class RunConfig(Section):
    """All of a run. `meshloom train` writes it, resolved, to `run.yaml` in the run's folder."""

    name: str
    """Names the run and its folder."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Decides starting weights, sample order and dropout."""
    model: Family | Folder
    """What is trained."""
    tokenizer: Tokenizer = Tokenizer()
    """How text becomes tokens."""
    data: Data = Data()
    """What it is trained on."""
    batch: BatchConfig = BatchConfig()
    """How many sequences a step takes, and in how many parts."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How gradients change the weights."""
    outer: OuterConfig = OuterConfig()
    """Whether data replicas train alone for some steps, and how they are brought together."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over time."""
    train: TrainConfig
    """How long, in which precision, with which limits."""
    layout: str = "auto"
    """How the run is spread over devices, like "data=2 zero3=4 tensor=2 sequence". auto: the planner chooses for the devices present."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and which stay."""
    eval: EvalConfig = EvalConfig()
    """When the held-out loss is measured."""
    sample: SampleConfig = SampleConfig()
    """When the model writes text, and from which prompts."""
    log: LogConfig = LogConfig()
    """What is written about the run."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"the run's folder is named by it, so it holds letters, digits, '_', '-' and '.', and begins with no '.' or '-'; you gave {name!r}."
            )
        return name

    @field_validator("model", mode="before")
    @classmethod
    def _choose(cls, given: Any) -> Any:
        return choose_model(given) if isinstance(given, dict) else given

    @field_serializer("model")
    def _flat(self, model: Family | Folder) -> dict[str, Any]:
        return {"from": model.path} if isinstance(model, Folder) else {"family": model.family, **to_tree(model.config)}


def choose_model(given: dict[str, Any]) -> Family | Folder:
    """The model that a `model` section asks for.  Raises ConfigError where the family is unknown or its section is wrong."""
    if "from" in given:
        return load(Folder, given, inside=("model",))
    if "like" in given:
        given = _alike(given)
    family = given.get("family")
    if not isinstance(family, str):
        listed = ", ".join(sorted(MODELS))
        raise ConfigError(
            [Problem(("family",), f"is missing. Give one of {listed}, or like: a known model, or from: a Hugging Face folder.")]
        )
    if family not in MODELS:
        raise ConfigError([Problem(("family",), f": {unknown('model family', family, MODELS)}")])
    rest = {key: value for key, value in given.items() if key != "family"}
    return Family(family=family, config=load(MODELS[family].Config, rest, inside=("model",)))


def _alike(given: dict[str, Any]) -> dict[str, Any]:
    """A `model` section that starts from a known model: its family and fields, under those that stand beside `like`."""
    if not isinstance(given["like"], str):
        raise ConfigError([Problem(("like",), f"must be the name of a known model, like llama3-8b; you gave {given['like']!r}.")])
    try:
        base = known.fields(given["like"])
    except ValueError as error:
        raise ConfigError([Problem(("like",), f": {error}")]) from None
    return merge(base, {key: value for key, value in given.items() if key != "like"})
