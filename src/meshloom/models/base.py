"""What every family shares: the fields of its configuration, the value that a family is, and the context that a block is given."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
from pydantic import Field, model_validator

from meshloom.core.batch import Batch
from meshloom.core.config import Section
from meshloom.core.layout import Layout
from meshloom.core.spec import ONES, ZEROS, Init, Spec, spec
from meshloom.core.tree import Tree, pytree


class ModelConfig(Section):
    """Sizes and constants that every family has. A family adds its own."""

    mixing: ClassVar[str] = "attention"
    """What mixes tokens in the family's blocks: "attention" is `models.attention.attend`. A layer of another name is refused where the sequence is split."""

    layers: int = Field(ge=1)
    """Blocks."""
    embed: int = Field(ge=1)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int = Field(ge=1)
    """Key and value heads; divides `heads`. Default: `heads`."""
    head: int = Field(ge=1)
    """Width of one head. Default: embed / heads."""
    ffn: int = Field(ge=1)
    """Width inside the MLP. Default: 4 x embed."""
    vocab: int = Field(ge=1)
    """Token ids that exist."""
    vocab_multiple: int = Field(128, ge=1)
    """Embedding rows are padded up to a multiple of this, so that they split evenly; padding rows never enter the softmax."""
    max_seq: int = Field(2048, ge=1)
    """Longest sequence that the model is made for, tokens."""
    tied: bool = True
    """Whether the output head is the embedding."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in every norm."""
    init_std: float = Field(0.02, ge=0)
    """Standard deviation of the starting weights."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the embedding and of each residual branch, in training."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the attention probabilities, in training."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, given: Any) -> Any:
        """Fills the sizes that follow from others."""
        if not isinstance(given, dict):
            return given
        out = dict(given)
        embed, heads = out.get("embed"), out.get("heads")
        if isinstance(embed, int) and isinstance(heads, int) and heads > 0 and "head" not in out:
            if embed % heads:
                raise ValueError(
                    f"embed {embed} is not a multiple of heads {heads}. Change one of them, or give `head` (the width of one head)."
                )
            out["head"] = embed // heads
        if heads is not None:
            out.setdefault("kv_heads", heads)
        if isinstance(embed, int):
            out.setdefault("ffn", 4 * embed)
        return out

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly. Use kv_heads that divides {self.heads}."
            )
        return self

    def check_layout(self, lay: Layout) -> None:
        """Refuses a layout that the family's layers have no form for, in a sentence.  lay: of all strategies together."""

    @property
    def vocab_padded(self) -> int:
        """Rows of the embedding, padding included."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def spec(self, axes: str, init: Init | None = None, **more: int) -> Spec:
        """The Spec of a parameter with these axis names; weights start normal with init_std unless told otherwise.
        more: sizes of axes that only some families have, or that differ in this parameter."""
        sizes = dict(
            embed=self.embed,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head=self.head,
            ffn=self.ffn,
            vocab=self.vocab_padded,
            position=self.max_seq,
        )
        sizes.update(more)
        return spec(sizes, axes, Init(self.init_std) if init is None else init, used={"vocab": self.vocab})

    def gain(self, axes: str, role: str = "norm") -> Spec:
        """The Spec of a norm's gain.  role: a row of core.spec.ROLES."""
        return replace(self.spec(axes, ONES), role=role)

    def zeros(self, axes: str, role: str = "added", **more: int) -> Spec:
        """The Spec of a bias.  role: a row of core.spec.ROLES.  more: as for `spec`."""
        return replace(self.spec(axes, ZEROS, **more), role=role)


class Kind(NamedTuple):
    """What may differ from layer to layer. Parameters of other shapes lie in other stacks: `stack` names the field of the model's `layers` that
    holds this layer's; "": all layers are one stack, `layers` itself."""

    window: int | None = None
    """Keys that a query sees, itself included; None: all before it."""
    rotary: bool = True
    """Whether this layer turns its queries and keys by position."""
    stack: str = ""
    """Which stack of parameters it is in."""
    tells: bool = False
    """Whether it tells the objective something beside its output."""


def stack_of(layers: Tree, name: str) -> Tree:
    """One stack of a model's `layers`."""
    return getattr(layers, name) if name else layers


def alike(c: ModelConfig) -> tuple[Kind, ...]:
    """The kinds of a model whose layers are all of the plain one."""
    return (Kind(),) * c.layers


@pytree
class KV:
    """One layer's cache (or, with a leading `layer` axis, all of them). k, v: [batch, length, kv_heads, head]."""

    k: jax.Array
    v: jax.Array


@pytree
class Slots:
    """What every layer's cache shares. start: where this call's keys are written. segments, positions: [batch, length], these keys included;
    segment 0 is empty."""

    start: jax.Array
    segments: jax.Array
    positions: jax.Array


@pytree
class Ctx:
    """What a block is told beside its input. All local shards.

    segments, positions: [batch, whole_seq]. rotary: (cos, sin) of the positions, or None. samples: [batch]. key: dropout's, or None outside
    training. layer: this layer's number, int32; before the loop over layers that of each slot of a pipeline's part, else anything. real: whether a
    layer is there, likewise of each slot, or None: it is. cache, slots: this layer's cache and what all layers share of it, or None.
    late: what gradients of matrices are multiplied by, for a backward pass that makes them later (core/late.py), or None.
    documents: [batch, all tokens] segments of whole rows where devices split these, in the devices' order, else None.
    told: what this layer says to the objective beside its output (a router's load), or None.
    """

    segments: jax.Array
    positions: jax.Array
    rotary: Any
    samples: jax.Array
    key: jax.Array | None
    layer: jax.Array | int
    cache: KV | None
    slots: Slots | None
    documents: jax.Array | None = None
    told: Any = None
    real: jax.Array | None = None
    late: jax.Array | None = None


def context(batch: Batch, key: jax.Array | None) -> Ctx:
    """The context of a training or evaluation batch [batch, seq]."""
    return Ctx(batch.segments, batch.positions, None, batch.samples, key, 0, None, None)


class Row(NamedTuple):
    """One line of a family's map to Hugging Face names, read both ways.

    ours: path of our parameter, or several that `theirs` holds in one tensor (axis `n` of `form` counts them). `{layer}` in theirs marks a
    stack of layers, `{expert}` beside it one of experts. form: how theirs becomes ours, as in einops: "(h k) d -> d h k". An empty `ours` marks a
    buffer of theirs that is passed over. layers: the model's numbers of a stack's layers; none: from 0 on.
    """

    ours: str | tuple[str, ...]
    theirs: str
    form: str
    layers: tuple[int, ...] = ()


class Sizes(NamedTuple):
    """What is added up of what a layer tells that does (`Kind.tells`), fp32 numbers. load: over all devices. parts: over those of a layer's work.
    Both once a micro-batch for all layers. row: in each layer so many a sequence, over the devices that split sequences. sums: names for the log beside."""

    load: int = 0
    parts: int = 0
    row: int = 0
    sums: int = 0


def _nothing_told(c: Any, lay: Layout, told: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Of a family whose layers tell nothing."""
    return 0.0, {}


def _unknown_there(*given: Any) -> Any:
    """Refuses a config.json for a family that Hugging Face does not know."""
    raise ValueError("This family has no counterpart in Hugging Face. Give its Model the functions hf, from_hf and to_hf.")


class Model(NamedTuple):
    """A model family as a value: specs and a few pure functions. c: its configuration; w: its tree of local weights; lay: the layout."""

    name: str
    Config: type[ModelConfig]
    specs: Callable[[Any], Tree]
    """c -> tree of Specs with fields `layers` (stacked blocks), `embed` and `head` (None when tied), and the family's own."""
    embed: Callable[[Any, Layout, Tree, jax.Array, Ctx], jax.Array]
    """c, lay, w, tokens [batch, whole_seq], ctx -> x [batch, seq, embed]."""
    rotary: Callable[[Any, jax.Array], Any]
    """c, positions -> what its blocks need as `ctx.rotary`, computed once."""
    block: Callable[..., tuple[jax.Array, Ctx]]
    """c, lay, kind, w (one layer's), x, ctx -> x, ctx."""
    final: Callable[[Any, Layout, Tree, jax.Array], jax.Array]
    """c, lay, w, x -> x after the last norm, ready for the head."""
    kinds: Callable[[Any], tuple[Kind, ...]]
    """c -> the Kind of each layer."""
    parallel: Callable[[Any], bool] = lambda c: False
    """c -> whether both halves of a layer read the same input and are added together."""
    wide: Callable[[Any], int] = lambda c: c.ffn
    """c -> features of a token that the matrices inside a layer's second half make (its MLP's; of all experts that a token goes through)."""
    active: Callable[[Any, Spec], float] = lambda c, s: 1.0
    """c, a parameter's Spec -> the part of it that a token goes through."""
    hf: Callable[[Any], tuple[Row, ...]] = lambda c: ()
    """c -> the rows of its Hugging Face map. None: it has no counterpart there and is not exported."""
    fused: Callable[[Any], tuple[Row, ...]] = lambda c: ()
    """c -> the rows of a second map, of checkpoints that hold all experts of a layer in one tensor; none: there is only one."""
    told: Callable[[Any], Sizes] = lambda c: Sizes()
    """c -> sizes of what its layers tell."""
    extra: Callable[[Any, Layout, Any], tuple[Any, dict[str, jax.Array]]] = _nothing_told
    """c, lay, what the layers told (stacked) -> what is added to the loss's sum over this device's rows, and named sums for the log."""
    settle: Callable[[Any, Tree, dict[str, jax.Array]], Tree] = lambda c, params, sums: params
    """c, parameters after a step's update, the step's sums -> parameters: what is learnt without a gradient."""
    from_hf: Callable[[dict], Any] = _unknown_there
    """config.json, either schema -> c."""
    to_hf: Callable[[Any, bool], dict] = _unknown_there
    """c, whether in the old schema -> config.json."""


def unembed(w: Tree) -> jax.Array:
    """The output head's weight [vocab, embed]: its own, or the embedding where tied."""
    return w.embed if w.head is None else w.head
