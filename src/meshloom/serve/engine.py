"""Prefill and decoding of any model under any layout: two compiled programs, in which every device runs its share of one `shard_map`.

`start` reads the prompts and makes the first token; `more` makes the others in one loop on the device. Layers, their weights and their caches
are lists, since slicing a stacked weight in a product of one row costs more than the product.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from meshloom.core.compress import exact
from meshloom.core.layout import PIPE, Layout
from meshloom.core.leaf import dot, put, whole_embed
from meshloom.core.mesh import partitions
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree, pytree
from meshloom.models.base import KV, Ctx, Model, Slots, stack_of, unembed
from meshloom.runner.forward import hidden
from meshloom.runner.gather import gather_step
from meshloom.runner.run import How, each
from meshloom.serve import cache as caches
from meshloom.serve import forms
from meshloom.serve.sampling import Uses, Wants, choose, log_prob

ONE_ROW = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}
"""Compiler options of `more` by platform, where a device has one row: YNNPACK's sums take 7 % of a token there; its products pay from two on."""


@pytree
class State:
    """A batch between two calls. cache, slots: of the tokens up to, not with, the last. slots.start: the last token's slot. tokens: [batch, length],
    prompts ending at slot prompt - 1, then answers. log_probs: fp32, of the answers. logits: [batch, vocab], what the last token was chosen from.
    seen: [batch, vocab] for the repetition penalty, else [batch, 0]. made: [batch], new tokens. done: [batch]. going: whether any row is not."""

    cache: list[KV]
    slots: Slots
    tokens: Array
    log_probs: Array
    logits: Array
    seen: Array
    lengths: Array
    made: Array
    done: Array
    going: Array


@pytree
class Report:
    """What the host sees of a state, equal on every device: tokens, log_probs [batch, length]; made, done [batch]."""

    tokens: Array
    log_probs: Array
    made: Array
    done: Array


@pytree
class Weights:
    """Weights as generation takes them. model: the tree, its layers a list of single ones. head: [vocab, embed] in a form of its own (serve/forms.py),
    or None: the model's."""

    model: Tree
    head: Any


class Engine(NamedTuple):
    """The programs of one model under one layout."""

    model: Model
    config: Any
    layout: Layout
    prepare: Callable[[Tree], Weights]
    """Parameters in the `rest` table -> weights as the other two take them: a list of layers in the type of the arithmetic."""
    start: Callable[..., tuple[State, Report]]
    """weights, prompts [batch, prompt] padded on the left, lengths [batch] (0: an empty row), wants; length=, use=, chunk= -> state after one token."""
    more: Callable[..., tuple[State, Report]]
    """weights, state (donated), wants, halt [batch] rows that end here, until: slot of the last token to make; use=."""


def make_engine(model: Model, c: Any, mesh: Mesh | None, layout: Layout, dtype: str = "float32", gather: str = "layer") -> Engine:
    """The engine of a model.  layout: of training or of generation.  gather: under ZeRO-3, `layer` gathers each layer's weights for each token;
    `once` gathers all of them in `prepare`: much faster, where they fit."""
    lay = serving(layout, gather)
    bound = _Bound(model, c, lay, dtype)
    one_layer = unrolled(model, c)
    rows, scalar = PartitionSpec(lay.batch or None), PartitionSpec()
    weights = Weights(partitions(lay, "step", one_layer), None)
    kv = jax.tree.map(lambda s: lay.partition("acts", s.axes), caches.layer_specs(c, lay.even(1), 1, dtype), is_leaf=is_spec)
    state = State([kv] * c.layers, Slots(scalar, rows, rows), *[rows] * 7, scalar)

    def spread(local: Callable, inputs: tuple, outputs: Any) -> Callable:
        # check_vma is for the transposes of training; nothing here is differentiated
        return local if lay.devices == 1 else jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    @jax.jit
    def prepare(params: Tree) -> Weights:
        return spread(partial(_prepare, bound), (partitions(lay, "rest", model.specs(c)),), weights)(params)

    @partial(jax.jit, static_argnames=("length", "use", "chunk"))
    def start(w: Weights, prompts: Array, lengths: Array, wants: Wants, *, length: int, use: Uses, chunk: int) -> tuple[State, Report]:
        local = partial(_start, bound, use, length, chunk)
        return spread(local, (weights, rows, rows, rows), (state, scalar))(w, prompts, lengths, wants)

    def decode(w: Weights, held: State, wants: Wants, halt: Array, until: Array, *, use: Uses) -> tuple[State, Report]:
        return spread(partial(_more, bound, use), (weights, state, rows, rows, scalar), (state, scalar))(w, held, wants, halt, until)

    several, single = (
        jax.jit(decode, static_argnames=("use",), donate_argnames=("held",), compiler_options=options)
        for options in (None, ONE_ROW.get(lay.platform))
    )

    def more(w: Weights, held: State, wants: Wants, halt: Array, until: Array, *, use: Uses) -> tuple[State, Report]:
        return (single if len(halt) == lay.size(lay.batch) else several)(w, held, wants, halt, until, use=use)

    return Engine(model, c, lay, prepare, start, more)


def serving(lay: Layout, gather: str = "layer") -> Layout:
    """A training layout for generation: the sequence is whole, no weight has a gradient that would lie elsewhere, and nothing is rounded.
    The devices of a pipeline, which would wait for each other at every token, share the rows instead, and layers are gathered as under ZeRO-3."""
    lay = exact(lay.without("seq", "whole_seq", "attend_seq"))
    if lay.stages > 1:
        inside, acts = lay.within, {**lay.within.acts, "batch": (PIPE, *lay.batch)}
        lay = dataclasses.replace(lay, step={**inside.step, "embed": lay.rest["embed"]}, live=inside.live, acts=acts)
    step = {"layer": lay.step, "once": lay.live}[gather]
    return dataclasses.replace(lay, step=step, grad=step, options={})


def unrolled(model: Model, c: Any) -> Tree:
    """A model's specs with its stacked layers as a list of single ones."""
    specs = model.specs(c)

    def one(s: Spec) -> Spec:
        return dataclasses.replace(s, shape=s.shape[1:], axes=s.axes[1:], used=s.used[1:])

    layers = (stack_of(specs.layers, kind.stack) for kind in model.kinds(c))
    return dataclasses.replace(specs, layers=[jax.tree.map(one, tree, is_leaf=is_spec) for tree in layers])


class _Bound(NamedTuple):
    """What every local program needs to know."""

    model: Model
    c: Any
    lay: Layout
    dtype: str


def _prepare(bound: _Bound, params: Tree) -> Weights:
    model, c, lay, dtype = bound
    w, _ = gather_step(lay, model.specs(c), params, dtype)
    layers = each(w.layers, model.kinds(c))
    if lay.devices > 1 or lay.platform not in forms.PLATFORMS:
        return Weights(dataclasses.replace(w, layers=layers), None)
    return Weights(dataclasses.replace(w, layers=list(map(forms.layer, layers)), head=None), forms.head(unembed(w)))


def _forward(
    bound: _Bound, w: Weights, cache: list[KV], slots: Slots, tokens: Array, segments: Array, positions: Array
) -> tuple[Array, list[KV]]:
    """Logits of the last of some new tokens, fp32 [batch, vocab], of every token that exists; and the cache with theirs."""
    model, c, lay, _ = bound
    ctx = Ctx(segments, positions, None, jnp.zeros(tokens.shape[0], jnp.int32), None, 0, cache, slots)
    x, outer, cache, _ = hidden(model, c, lay, w.model, jax.tree.map(lambda _: None, w.model), tokens, ctx, How("unroll"))
    head = whole_embed(lay, unembed(outer)) if w.head is None else w.head
    logits = dot(lay, "BTD,vD->BTv", put(lay, "btd->BTD", x[:, -1:]), head)[:, 0]
    for dim, axes in ((1, lay.acts.get("vocab", ())), (0, lay.inner)):
        logits = lax.all_gather(logits, axes, axis=dim, tiled=True) if axes else logits
    return logits[:, : c.vocab].astype(jnp.float32), cache


def _start(
    bound: _Bound, use: Uses, length: int, chunk: int, w: Weights, prompts: Array, lengths: Array, wants: Wants
) -> tuple[State, Report]:
    """The state after the first new token."""
    c, (batch, size) = bound.c, prompts.shape
    back = jnp.arange(size) - (size - lengths[:, None])
    segments, positions = (back >= 0).astype(jnp.int32), jnp.maximum(back, 0)
    blank = jnp.zeros((batch, length), jnp.int32)
    slots = caches.fill(Slots(jnp.int32(0), blank, blank), segments, positions, 0)
    cache = caches.empty(c, bound.lay, batch * bound.lay.size(bound.lay.batch), length, bound.dtype)

    def read(cache: list[KV], part: tuple[Array, ...]) -> tuple[list[KV], Array]:
        at, *new = part
        logits, cache = _forward(bound, w, cache, dataclasses.replace(slots, start=at), *new)
        return cache, logits

    parts = [a.reshape(batch, -1, chunk).swapaxes(0, 1) for a in (prompts, segments, positions)]
    cache, logits = lax.scan(read, cache, (jnp.arange(0, size, chunk), *parts))
    seen = jnp.zeros((batch, c.vocab if use.penalty else 0), bool)
    if use.penalty:
        seen = seen.at[jnp.arange(batch)[:, None], jnp.where(back >= 0, prompts, c.vocab)].set(True, mode="drop")
    tokens = lax.dynamic_update_slice_in_dim(blank, prompts, 0, axis=1)
    none = jnp.zeros(batch, jnp.int32)
    held = State(
        cache,
        dataclasses.replace(slots, start=jnp.int32(size - 1)),
        tokens,
        jnp.zeros((batch, length), jnp.float32),
        logits[-1],
        seen,
        lengths,
        none,
        lengths == 0,
        jnp.bool_(True),
    )
    held = _take(bound, use, held, wants, logits[-1], cache)
    return held, _report(bound, held)


def _take(bound: _Bound, use: Uses, held: State, wants: Wants, logits: Array, cache: list[KV]) -> State:
    """The state with one more token a row, chosen from these logits and put behind the last one."""
    token = jnp.where(held.done, 0, choose(logits, wants, use, held.made, held.seen))
    at = held.slots.start + 1
    made = held.made + ~held.done
    done = held.done | (made >= wants.tokens) | (token[:, None] == wants.ends).any(-1)
    put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new[:, None].astype(old.dtype), at, axis=1)
    rows = jnp.arange(token.shape[0])
    left = jnp.sum(~done)
    left = lax.psum(left, bound.lay.batch) if bound.lay.batch else left
    return State(
        cache,
        dataclasses.replace(held.slots, start=at),
        put(held.tokens, token),
        put(held.log_probs, log_prob(logits, token)),
        logits,
        held.seen.at[rows, token].set(True) if use.penalty else held.seen,
        held.lengths,
        made,
        done,
        left > 0,
    )


def _more(bound: _Bound, use: Uses, w: Weights, held: State, wants: Wants, halt: Array, until: Array) -> tuple[State, Report]:
    """The state when its last token is in slot `until`, or every row is done."""

    def step(held: State) -> State:
        at = held.slots.start
        token = lax.dynamic_slice_in_dim(held.tokens, at, 1, axis=1)
        segments, positions = (~held.done).astype(jnp.int32)[:, None], (held.lengths + held.made - 1)[:, None]
        slots = caches.fill(held.slots, segments, positions, at)
        logits, cache = _forward(bound, w, held.cache, slots, token, segments, positions)
        return _take(bound, use, dataclasses.replace(held, slots=slots), wants, logits, cache)

    held = dataclasses.replace(held, done=held.done | halt)
    held = lax.while_loop(lambda s: s.going & (s.slots.start < until), step, held)
    return held, _report(bound, held)


def _report(bound: _Bound, held: State) -> Report:
    """What the host sees: every row, on every device."""
    axes = bound.lay.batch
    whole = lambda a: lax.all_gather(a, axes, axis=0, tiled=True) if axes else a
    return Report(*map(whole, (held.tokens, held.log_probs, held.made, held.done)))
