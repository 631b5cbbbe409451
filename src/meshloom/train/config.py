"""The training sections of a recipe: optimizer, schedule, train, batch, checkpoint, eval, sample, log."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from meshloom.core.config import Section
from meshloom.core.remat import check
from meshloom.parallel.base import divisors

LAMB_FACTOR = ("coeff_beta", "factor_max", "factor_min", "factor_threshold")
READS = {
    "adamw": {"beta1", "beta2", "eps"},
    "lion": {"beta1", "beta2"},
    "sgd": {"momentum", "nesterov"},
    "muon": {"beta1", "beta2", "eps", "momentum", "nesterov", "rms"},
    "adafactor": {"decay_rate", "update_clip", "relative"},
    "lamb": {"beta1", "beta2", "eps", "max_coeff", "min_coeff"},
    "onebit_adam": {"beta1", "beta2", "eps", "freeze_step"},
    "onebit_lamb": {"beta1", "beta2", "eps", "freeze_step", "max_coeff", "min_coeff", *LAMB_FACTOR},
    "zero_one_adam": {"beta1", "beta2", "eps", "freeze_step", "variance_scaler", "local_scaler", "local_clip"},
}
"""The fields that each kind of optimizer reads beyond kind, lr and weight_decay."""


def _listed(names: list[str]) -> str:
    """Names as a sentence has them: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


class OptimizerConfig(Section):
    """How gradients become updates. A field that the kind does not read must keep its default."""

    kind: Literal["adamw", "adafactor", "lion", "muon", "sgd", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam"] = "adamw"
    """The rule: a row of `train.optimizer.OPTIMIZERS`, or of `train.method.RULES`."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate; the schedule multiplies it."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Memory of the gradient's mean (all but adafactor and sgd; muon's Adam part)."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Memory of the gradient's square (adamw, lamb and their kin, muon's Adam part), or of lion's momentum."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay, times the learning rate, on matrices only (embeddings are matrices; gains and biases are not)."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of sgd and muon; 0 keeps none."""
    nesterov: bool = True
    """Whether the momentum of sgd and muon looks one step ahead."""
    rms: float = Field(default=0.2, gt=0)
    """Muon: root mean square of an update at lr 1. 0.2 matches Adam's, so that one lr serves both (arXiv 2502.16982)."""
    decay_rate: float = Field(default=0.8, gt=0, lt=1)
    """Adafactor: the second moment's memory is 1 - step**-decay_rate (arXiv 1804.04235)."""
    update_clip: float = Field(default=1.0, gt=0)
    """Adafactor: largest root mean square of one matrix's update before the learning rate."""
    relative: bool = False
    """Adafactor: multiply each matrix's update by the root mean square of the matrix, so that lr is relative."""
    freeze_step: int = Field(default=100, ge=1)
    """onebit_adam, onebit_lamb: steps in full precision before momentum is exchanged by one bit. zero_one_adam: the last step that may renew the
    variance, after which there are steps without any exchange."""
    variance_scaler: int = Field(default=16, ge=1)
    """zero_one_adam: renewals of the variance before the steps between them double (arXiv 2202.06009)."""
    local_scaler: int = Field(default=100, ge=1)
    """zero_one_adam: steps after the freeze before the steps between exchanges double."""
    local_clip: int = Field(default=16, ge=1)
    """zero_one_adam: most steps between exchanges."""
    max_coeff: float = Field(default=10.0, gt=0)
    """lamb: largest scale of a weight's step, its norm over that of the direction (arXiv 1904.00962)."""
    min_coeff: float = Field(default=0.01, ge=0)
    """lamb: smallest scale of a weight's step."""
    coeff_beta: float = Field(default=0.9, ge=0, lt=1)
    """onebit_lamb: memory of the scale's mean before the freeze (arXiv 2104.06069)."""
    factor_max: float = Field(default=4.0, gt=0)
    """onebit_lamb: largest factor of that mean after the freeze."""
    factor_min: float = Field(default=0.5, gt=0)
    """onebit_lamb: smallest factor of that mean after the freeze."""
    factor_threshold: float = Field(default=0.1, gt=0, lt=1)
    """onebit_lamb: how much of itself the factor may change by in a step."""
    adascale: bool = False
    """Whether the learning rate follows how much the data shards' gradients differ (AdaScale, arXiv 2007.05105). train.steps then counts steps as
    one shard would need them, and a run ends when their sum of gains reaches it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, field in type(self).model_fields.items():
            unread = name not in READS[self.kind] | {"kind", "lr", "weight_decay", "adascale"}
            if unread and getattr(self, name) != field.default:
                readers = _listed([kind for kind, reads in READS.items() if name in reads])
                raise ValueError(f"optimizer {self.kind} does not read {name}; {readers} would. Remove it, or set it to {field.default}.")
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is more than {high} {getattr(self, high)}. Swap them, or leave them out.")
        return self


class OuterConfig(Section):
    """Replicas along mesh axis `data` that train alone and are brought together every few steps. `optimizer` is then the inner one."""

    kind: Literal["none", "local_sgd", "slowmo", "diloco"] = "none"
    """How they are brought together: a row of `train.outer.OUTER`; none: they never are apart."""
    every: int = Field(default=16, ge=1)
    """Steps between outer steps."""
    lr: float = Field(default=0.7, gt=0)
    """Outer learning rate: diloco's own 0.7; slowmo's factor of the inner one, often 1."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer step (slowmo, and diloco, which looks one step ahead)."""
    buffers: Literal["keep", "reset"] = "keep"
    """What becomes of the inner optimizers' state at an outer step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        reads = OUTER_READS[self.kind] | {"kind"}
        for name, field in type(self).model_fields.items():
            if name not in reads and getattr(self, name) != field.default:
                readers = _listed([kind for kind, fields in OUTER_READS.items() if name in fields])
                raise ValueError(f"outer {self.kind} does not read {name}; {readers} would. Remove it, or set it to {field.default}.")
        return self


OUTER_READS = {
    "none": set(),
    "local_sgd": {"every", "buffers"},
    "slowmo": {"every", "buffers", "lr", "momentum"},
    "diloco": {"every", "buffers", "lr", "momentum"},
}
"""The fields that each kind of outer step reads."""


class ScheduleConfig(Section):
    """The learning rate over the run, as a factor of `optimizer.lr`."""

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """The shape after the warm-up: a row of `train.schedule.SCHEDULES`."""
    unit: Literal["steps", "tokens"] = "steps"
    """What warmup and decay count. Tokens are positions read, padding included: samples times sequence length."""
    warmup: int = Field(default=0, ge=0)
    """Units of linear rise from 0 to the peak."""
    decay: int = Field(default=0, ge=0)
    """wsd: units of the last fall, counted back from the end of the run. The other kinds fall from warm-up to the end, and take 0."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """wsd: the form of the last fall."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Factor at the end of the run (linear, cosine, wsd), and the floor of inverse_sqrt."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "wsd" and self.decay == 0:
            raise ValueError("schedule wsd needs a decay of at least 1: the last part of the run. Use kind: constant for no decay.")
        if self.kind != "wsd" and self.decay:
            raise ValueError(
                f"schedule {self.kind} takes no decay: it has its form from the warm-up to the end. Remove decay, or use kind: wsd."
            )
        if self.kind == "inverse_sqrt" and self.warmup == 0:
            raise ValueError("schedule inverse_sqrt needs a warmup of at least 1: it falls as sqrt(warmup / done).")
        return self


class LossScaleConfig(Section):
    """Dynamic loss scaling, read for fp16 alone."""

    initial: float = Field(default=2.0**16, gt=0)
    """First scale."""
    window: int = Field(default=1000, ge=1)
    """Finite steps in a row before the scale doubles."""
    hysteresis: int = Field(default=2, ge=1)
    """Non-finite steps borne before the scale halves; a doubling restores the patience."""
    minimum: float = Field(default=1.0, gt=0)
    """The scale never falls below this."""
    maximum: float = Field(default=2.0**24, gt=0)
    """The scale never rises above this."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(f"loss scale needs minimum <= initial <= maximum; these are {self.minimum}, {self.initial}, {self.maximum}.")
        return self


class TrainConfig(Section):
    """How long, how precisely, and with what safeguards."""

    steps: int | None = Field(default=None, ge=1)
    """Length in optimizer steps. Exactly one of steps, tokens, epochs is given."""
    tokens: int | None = Field(default=None, ge=1)
    """Length in tokens read (positions); rounded up to whole steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Length in passes over the data; rounded up to whole steps."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of activations and of the weights' compute copy. The master weights and the optimizer state are fp32 always."""
    clip: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; 0 never clips."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of mean(log Z ** 2), which keeps the softmax's normaliser near 1 (arXiv 2204.02311)."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay per step of the averaged weights kept beside the trained ones; 0 keeps none."""
    remat: str = "none"
    """What the backward pass computes again: nothing (`none`), the cheap parts (`selective`), each whole layer (`full`), or several of them from one input
    (`full:4`); `offload` is selective with what is kept in the host's memory. One word, or a pattern over the layers in order, in a pipeline over a part's:
    `full 20, none 12`. `auto` solves for it under the device's memory, `auto 40GB` under so much."""
    runner: Literal["auto", "scan", "unroll"] = "auto"
    """The loop over layers. auto unrolls on a CPU (faster) and scans elsewhere (compiles once per layer kind)."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are: patterns over their dotted paths, as `embed` or `layers.attn.*`. They have no gradient and no optimizer state."""
    nonfinite_limit: int = Field(default=10, ge=0)
    """Skipped steps in a row (non-finite gradient norm) that the run bears; one more ends it with an error."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling for fp16."""

    @field_validator("remat")
    @classmethod
    def _readable(cls, remat: str) -> str:
        return check(remat)

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [f"{name}: {value}" for name in ("steps", "tokens", "epochs") if (value := getattr(self, name)) is not None]
        if len(given) != 1:
            raise ValueError(f"train needs exactly one of steps, tokens, epochs; it has {', '.join(given) or 'none'}.")
        return self


class BatchConfig(Section):
    """The global batch of one optimizer step. The sequence length belongs to `data`."""

    sequences: int = Field(default=8, ge=1)
    """Sequences in one step, over all devices and micro-batches."""
    micro_batches: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Parts that the batch is cut into, one after another. It never changes the result. auto: 1; in a pipeline as many as fit, up to 4 a stage."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro_batches != "auto" and self.sequences % self.micro_batches:
            raise ValueError(
                f"{self.sequences} sequences cannot be cut into {self.micro_batches} equal micro-batches. Use one of {divisors(self.sequences, self.sequences)}."
            )
        return self


class CheckpointConfig(Section):
    """When checkpoints are written and which stay. The newest, the milestones and the best are kept; the union of the three."""

    every: int = Field(default=1000, ge=0)
    """Steps between saves; 0 saves only at the end and on a signal."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest stay, by step number."""
    keep_every: int = Field(default=0, ge=0)
    """Every step that is a multiple of this stays; 0 keeps none for that reason."""
    keep_best: int = Field(default=0, ge=0)
    """How many with the lowest validation loss stay; 0 keeps none for that reason."""
    grace: float = Field(default=30.0, gt=0)
    """Seconds that a signal leaves for the last save; when they are over, the process says so and ends."""


class EvalConfig(Section):
    """Validation during training, on the held-out split."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: int = Field(default=0, ge=0)
    """Batches scored each time; 0 scores the whole split."""
    sequences: int = Field(default=8, ge=1)
    """Sequences in one evaluation batch. It does not change the value."""


class SampleConfig(Section):
    """Text written by the model during training."""

    every: int = Field(default=0, ge=0)
    """Steps between samples; 0 writes one only at the end."""
    prompts: tuple[str, ...] = ()
    """What each sample begins with; none writes no samples."""
    tokens: int = Field(default=64, ge=1)
    """New tokens for each prompt."""
    temperature: float = Field(default=0.8, ge=0)
    """0 always takes the likeliest token."""
    top_k: int = Field(default=0, ge=0)
    """Only the k likeliest tokens are drawn from; 0 draws from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens whose probabilities reach p are drawn from."""


class LogConfig(Section):
    """What is written about the run."""

    every: int = Field(default=10, ge=1)
    """Steps between lines; each line is the token-weighted mean over its interval."""
    tensorboard: bool = True
    """Whether TensorBoard events are written to `tensorboard/` in the run's folder."""
    plot: bool = True
    """Whether `loss.png` is drawn at each checkpoint and at the end."""
