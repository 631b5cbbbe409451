"""A layer's second half as a mixture of experts: its fields, its parameters, its function, and what its routers tell the objective."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from pydantic import Field, model_validator

from meshloom.core.layout import Layout
from meshloom.core.leaf import add_up, sum_over
from meshloom.core.matmul import contract
from meshloom.core.spec import ZEROS
from meshloom.core.tree import Tree, pytree
from meshloom.models.base import Ctx, ModelConfig, Sizes
from meshloom.models.parts import GatedMlp
from meshloom.ops import dispatch, route
from meshloom.ops.act import GATED
from meshloom.ops.moe import capacity


class MixtureConfig(ModelConfig):
    """Fields of every family with experts."""

    experts: int = Field(ge=1)
    """Experts of a layer."""
    top: int = Field(ge=1)
    """Experts that a token goes to."""
    expert_ffn: int = Field(ge=1)
    """Width inside one expert. Default: `ffn`."""
    moe_layers: tuple[bool, ...] = ()
    """Which layers have experts, the others a dense MLP of width `ffn`; empty: all have."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What a router makes of its logits."""
    normalize: bool = True
    """Whether the weights of a token's experts are made to sum to 1."""
    groups: int = Field(1, ge=1)
    """Experts lie in so many groups, of which a token uses the best `top_groups`."""
    top_groups: int = Field(1, ge=1)
    """Groups that a token may use."""
    scale: float = 1.0
    """Multiplies the weights of a token's experts."""
    bias: bool = False
    """Whether each router has a bias that counts for the selection alone. It has no gradient: see `bias_rate`."""
    bias_rate: float = Field(0.0, ge=0)
    """How far a step moves the bias of an expert with too little or too much load (DeepSeek-V3: 0.001)."""
    shared: int = Field(0, ge=0)
    """Experts that every token goes to, as one MLP of width shared x expert_ffn."""
    residual: bool = False
    """Whether a dense MLP of width `ffn` stands beside the experts, both weighted by a softmax of the token (PR-MoE)."""
    capacity: float | None = Field(None, gt=0)
    """Places of an expert for each sequence, as a multiple of its even share; who comes later in the sequence is dropped. None: no token is ever
    dropped. Generation never drops."""
    balance: Literal["batch", "sequence"] = "batch"
    """Over what the load-balance loss counts: a micro-batch on all devices, or each sequence by itself (then no cut of the batch changes it)."""
    balance_loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balance loss of each layer with experts."""
    router_z_loss: float = Field(0.0, ge=0)
    """Coefficient of the squared logsumexp of each router's logits."""

    @model_validator(mode="before")
    @classmethod
    def _expert_width(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "expert_ffn" in given:
            return given
        width = given.get("ffn", 4 * given["embed"] if isinstance(given.get("embed"), int) else None)
        return given if width is None else {**given, "expert_ffn": width}

    @model_validator(mode="after")
    def _choices(self) -> "MixtureConfig":
        if self.top > self.experts:
            raise ValueError(f"A token cannot go to {self.top} of {self.experts} experts. Lower top, or raise experts.")
        if self.experts % self.groups:
            raise ValueError(f"{self.experts} experts cannot lie in {self.groups} equal groups. Use groups that divides {self.experts}.")
        if self.top_groups > self.groups:
            raise ValueError(f"A token cannot use {self.top_groups} of {self.groups} groups. Lower top_groups, or raise groups.")
        if self.top > self.top_groups * (self.experts // self.groups):
            raise ValueError(
                f"{self.top_groups} groups of {self.experts // self.groups} experts do not hold the {self.top} of a token. Raise top_groups, or lower top."
            )
        if len(self.moe_layers) not in (0, self.layers):
            raise ValueError(f"moe_layers has {len(self.moe_layers)} entries for {self.layers} layers. Give one for each, or none.")
        if self.bias_rate and not self.bias:
            raise ValueError(
                f"bias_rate {self.bias_rate} moves a bias that the routers do not have. Set bias: true, or leave bias_rate out."
            )
        if self.shared and self.residual:
            raise ValueError("shared experts and residual both put a dense MLP beside the experts. Choose one.")
        return self

    def check_layout(self, lay: Layout) -> None:
        """Refuses rows or embed that are split inside a layer (a router needs whole tokens, and an exchange those of its own device), matrices that
        are streamed, and a capacity where no device sees a whole sequence."""
        cube = lay.inner or lay.live.get("embed")
        if said := "Layers split by a cube of devices (tensor3d)" if cube else "Streamed products (':stream')" if lay.square else "":
            raise ValueError(
                f"{said} have no form for the {self.experts} experts of this model: a router needs whole tokens. Use tensor or tensor2d."
            )
        if self.capacity and (axes := lay.acts.get("whole_seq")):
            raise ValueError(
                f"A capacity counts places along whole sequences, and the layout splits them over {' x '.join(axes)}. Set model.capacity: null "
                "(no token is dropped), or leave the sequences whole."
            )

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return self.moe_layers or (True,) * self.layers

    @property
    def router(self) -> route.Router:
        """How tokens choose."""
        return route.Router(self.experts, self.top, self.score, self.normalize, self.groups, self.top_groups, self.scale)

    @property
    def beside(self) -> int:
        """Width of the dense MLP beside the experts, 0 for none."""
        return self.ffn if self.residual else self.shared * self.expert_ffn


@pytree
class Mixture:
    """router: [embed, router]. bias: [router] or None. gate, up: [expert, embed, expert_ffn]. down: [expert, expert_ffn, embed]. dense: the MLP that
    every token goes through, or None. mix: [embed, 2], weights of the experts and of `dense` (PR-MoE), or None."""

    router: Any
    bias: Any
    gate: Any
    up: Any
    down: Any
    dense: Any
    mix: Any

    @staticmethod
    def specs(c: MixtureConfig) -> "Mixture":
        """The Specs of one layer."""
        sizes = dict(expert=c.experts, router=c.experts, expert_ffn=c.expert_ffn)
        exact = lambda axes, init=None, **more: replace(c.spec(axes, init, **{**sizes, **more}), exact=True)
        wide, narrow = "expert embed expert_ffn", "expert expert_ffn embed"
        return Mixture(
            router=exact("embed router"),
            bias=replace(exact("router", ZEROS), role="settled") if c.bias else None,
            gate=c.spec(wide, **sizes),
            up=c.spec(wide, **sizes),
            down=c.spec(narrow, **sizes),
            dense=GatedMlp.specs(c, ffn=c.beside) if c.beside else None,
            mix=exact("embed router", router=2) if c.residual else None,
        )


@pytree
class Told:
    """What one router says, as sums over this device's tokens. counts: [experts + 1], assignments to each expert, and dropped ones. parts:
    [experts + 2], the probabilities of each, the squared logsumexp, and tokens times each sequence's load-balance loss."""

    counts: Array
    parts: Array


def mixture(c: MixtureConfig, lay: Layout, w: Mixture, x: Array, ctx: Ctx) -> tuple[Array, Told]:
    """x: (batch whole_seq embed) -> (batch seq embed), and what the router says. Padding (segment 0) goes to no expert."""
    batch, seq, embed = x.shape
    flat = x.reshape(-1, embed)
    valid = jnp.ones(batch * seq, bool) if ctx.segments is None else ctx.segments.reshape(-1) > 0
    logits = _scores(flat, w.router)
    choice = route.route(c.router, logits, w.bias, valid)
    args = flat, choice.expert, choice.weight, w.gate, w.up, w.down
    dropped = jnp.zeros((), jnp.float32)
    if c.capacity is None or ctx.cache is not None:
        y = dispatch.dropless(lay, *args)
    else:
        y, moves = dispatch.capacity(lay, batch, capacity(seq, c.top, c.experts, c.capacity), *args)
        lost = (choice.expert < c.experts) & (moves.slot == moves.source.size)
        dropped = lost.sum().astype(jnp.float32)
    if w.dense is not None:
        y = _beside(w, flat, y)
    counts = jnp.append(route.load(choice, c.experts), dropped)
    parts = jnp.concatenate([choice.probs.sum(0), jnp.stack([jnp.square(choice.logsum).sum(), _by_sequence(c, lay, choice, batch)])])
    return add_up(lay, y.reshape(x.shape), "bT", "btd", summed(lay)), Told(counts, parts)


def _scores(x: Array, w: Array) -> Array:
    """fp32 [tokens, router], in fp32 arithmetic on every platform."""
    return jnp.einsum("nd,dr->nr", x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _beside(w: Mixture, x: Array, y: Array) -> Array:
    """The experts' sum y and the dense MLP's, added up; weighted for each token where there is `mix`.  Source: Rajbhandari 2022, arXiv 2201.05596."""
    hidden = GATED["silu"](contract("nd,df->nf", x, w.dense.gate), contract("nd,df->nf", x, w.dense.up))
    dense = contract("nf,fd->nd", hidden, w.dense.down)
    if w.mix is None:
        return y + dense
    share = jax.nn.softmax(_scores(x, w.mix))
    return (y * share[:, :1] + dense * share[:, 1:]).astype(x.dtype)


def _by_sequence(c: MixtureConfig, lay: Layout, choice: route.Choice, batch: int) -> Array:
    """Tokens times the load-balance loss of each sequence, added up."""
    if c.balance != "sequence" or not c.balance_loss:
        return jnp.zeros((), jnp.float32)
    expert = choice.expert.reshape(batch, -1, 1)
    load = sum_over((expert == jnp.arange(c.experts)).sum(1).astype(jnp.float32), lay.acts.get("whole_seq", ()))
    return route.balance(load, choice.probs.reshape(batch, -1, c.experts).sum(1), c.top).sum()


def summed(lay: Layout) -> tuple[str, ...]:
    """Mesh axes over which a mixture's results are partial sums: those that split the experts' width, or experts aside."""
    return tuple(dict.fromkeys((*lay.acts.get("expert_ffn", ()), *dispatch.aside(lay))))


def told(c: MixtureConfig) -> Sizes:
    """What `extra` and the losses of each sequence add up."""
    return Sizes(c.experts + 1, c.experts + 2, c.experts * (c.balance == "sequence" and c.balance_loss > 0), 2)


def extra(c: MixtureConfig, lay: Layout, said: Told) -> tuple[Array, dict[str, Array]]:
    """The routers' losses as a sum over this device's tokens, and for the log: `balance` and `router_z`, summed over layers and tokens; `load`
    [layers, experts + 1], of all devices: assignments to each expert, and dropped ones.

    Every device of a layer's work says the same about its tokens; the sum over them, divided by their number, is what one says, and its gradient is
    each device's share."""
    same = lay.size(lay.work)
    load = sum_over(said.counts, (*lay.tokens, *lay.work)) / same
    parts = sum_over(said.parts, lay.work) / same
    probs, z, by_sequence = parts[:, : c.experts], parts[:, c.experts].sum(), parts[:, c.experts + 1].sum()
    balance = by_sequence if c.balance == "sequence" else route.balance(load[:, : c.experts], probs, c.top).sum()
    return c.balance_loss * balance + c.router_z_loss * z, {"balance": balance, "router_z": z, "load": load}


def settle(c: MixtureConfig, bias: Tree, load: Array) -> Tree:
    """The selection's biases [layers, experts] after a step with this load."""
    return route.rebalanced(bias, load[:, : c.experts], c.bias_rate)
