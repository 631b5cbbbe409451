"""Programs, machines and shapes that the tests of `auto` share."""

import itertools
import math

import jax
import jax.numpy as jnp
import optax

from meshloom.auto.price import Rates

SLOW = """
name: slow
platform: gpu
memory: 4e9
bandwidth: 1e11
flops: {float32: 1e10}
efficiency: 1.0
node: 64
inside: {rate: 1e9, latency: 1e-7}
between: {rate: 1e9, latency: 1e-7}
shape: 1x64
"""
"""A machine on which small arrays are worth splitting: slow at arithmetic, quick to begin a collective."""

ADAM = optax.adam(1e-2)


def rates(latency: float = 1e-6, **sizes: int) -> Rates:
    """Rings of 1 GB/s (Thakur, Rabenseifner, Gropp 2005), 10 GFLOP/s, 100 GB/s of memory.  latency: of a step, seconds."""
    ways = {}
    for n in range(1, len(sizes) + 1):
        for axes in itertools.combinations(range(len(sizes)), n):
            devices = math.prod(list(sizes.values())[a] for a in axes)
            once = ((devices - 1) * latency, (devices - 1) / devices / 1e9)
            ways |= {(kind, axes): once for kind in ("all-gather", "reduce-scatter", "all-to-all")}
            ways |= {("all-reduce", axes): (2 * once[0], 2 * once[1]), ("collective-permute", axes): (latency, 1e-9)}
    return Rates(sizes, {"float32": 1e10}, 1e11, ways, 10**9, "test")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(p, x):
    """Two layers."""
    return jax.nn.relu(x @ p["up"]) @ p["down"]


def step(p, s, x):
    """One step of Adam on an MLP."""
    loss, grad = jax.value_and_grad(lambda p: jnp.mean((mlp(p, x) - x) ** 2))(p)
    change, s = ADAM.update(grad, s, p)
    return optax.apply_updates(p, change), s, loss


def sizes(batch: int, embed: int, hidden: int) -> tuple:
    """The step's arguments as shapes."""
    p = {"up": f32(embed, hidden), "down": f32(hidden, embed)}
    return p, jax.eval_shape(ADAM.init, p), f32(batch, embed)


def arrays(shapes, seed: int = 0):
    """Random arrays of these shapes: floats small, integers below 7."""
    keys = iter(jax.random.split(jax.random.key(seed), 200))
    one = lambda s: (
        jax.random.normal(next(keys), s.shape) * 0.1 if s.dtype == jnp.float32 else jax.random.randint(next(keys), s.shape, 0, 7)
    )
    return jax.tree.map(one, shapes)


def norm(x):
    """Root mean square norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(p, x, heads: int):
    """A transformer's layer."""
    b, s, d = x.shape
    q, k, v = ((norm(x) @ p[n]).reshape(b, s, heads, d // heads) for n in "qkv")
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * (d // heads) ** -0.5
    scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9), -1)
    x = x + jnp.einsum("bhqs,bshk->bqhk", scores, v).reshape(b, s, d) @ p["o"]
    return x + jax.nn.silu(norm(x) @ p["up"]) @ p["down"]


def transformer(heads: int = 4, remat: bool = False, scan: bool = False):
    """One step of Adam on a language model, (params, state, tokens) -> (params, state, loss)."""

    def loss(p, t):
        one = lambda x, q: (block(q, x, heads), None)
        one = jax.checkpoint(one) if remat else one
        x = p["table"][t]
        if scan:
            x, _ = jax.lax.scan(one, x, p["layers"])
        else:
            for q in p["layers"]:
                x, _ = one(x, q)
        logits = norm(x)[:, :-1] @ p["head"]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, t[:, 1:, None], -1)[..., 0])

    def step(p, s, t):
        value, grad = jax.value_and_grad(loss)(p, t)
        change, s = ADAM.update(grad, s, p)
        return optax.apply_updates(p, change), s, value

    return step


def words(layers: int, batch: int, seq: int, embed: int, vocab: int, scan: bool = False) -> tuple:
    """The arguments of a transformer's step as shapes."""
    lead = (layers,) if scan else ()
    layer = lambda: {
        **{n: f32(*lead, embed, embed) for n in "qkvo"},
        "up": f32(*lead, embed, 4 * embed),
        "down": f32(*lead, 4 * embed, embed),
    }
    p = {"table": f32(vocab, embed), "head": f32(embed, vocab), "layers": layer() if scan else [layer() for _ in range(layers)]}
    return p, jax.eval_shape(ADAM.init, p), jax.ShapeDtypeStruct((batch, seq), jnp.int32)


def blocks(p, s, x):
    """One step of Adam on residual MLPs, each computed again in the backward pass."""

    def loss(p):
        y = x
        for q in p:
            y = jax.checkpoint(lambda q, y: y + mlp(q, y))(q, y)
        return jnp.mean(y * y)

    value, grad = jax.value_and_grad(loss)(p)
    change, s = ADAM.update(grad, s, p)
    return optax.apply_updates(p, change), s, value


def many(layers: int, batch: int, embed: int, hidden: int) -> tuple:
    """The arguments of `blocks` as shapes."""
    p = [sizes(batch, embed, hidden)[0] for _ in range(layers)]
    return p, jax.eval_shape(ADAM.init, p), f32(batch, embed)


def mixture(p, s, x):
    """One step of Adam on a mixture of experts, a token to one expert, in groups of tokens (GShard's one-hot dispatch)."""

    def loss(p):
        experts, room = p["up"].shape[0], 2 * x.shape[1] // p["up"].shape[0]
        gate = jax.nn.softmax(x @ p["gate"], -1)
        first = jax.nn.one_hot(jnp.argmax(gate, -1), experts)
        place = jax.nn.one_hot((jnp.cumsum(first, 1) * first - 1).astype(int), room)
        sent = jnp.einsum("gse,gsec->gsec", first, place)
        h = jax.nn.relu(jnp.einsum("egcd,edf->egcf", jnp.einsum("gsec,gsd->egcd", sent, x), p["up"]))
        h = jnp.einsum("egcf,efd->egcd", h, p["down"])
        y = x + jnp.einsum("gsec,egcd->gsd", sent * jnp.max(gate, -1)[..., None, None], h)
        return jnp.mean(y * y)

    value, grad = jax.value_and_grad(loss)(p)
    change, s = ADAM.update(grad, s, p)
    return optax.apply_updates(p, change), s, value


def experts(groups: int, seq: int, embed: int, hidden: int, count: int) -> tuple:
    """The arguments of `mixture` as shapes."""
    p = {"gate": f32(embed, count), "up": f32(count, embed, hidden), "down": f32(count, hidden, embed)}
    return p, jax.eval_shape(ADAM.init, p), f32(groups, seq, embed)


def on_a_cpu(moves: dict) -> dict:
    """What a CPU's compiler makes of planned moves: it writes a reduce-scatter as an all-reduce and a slice, so bytes and counts are the same."""
    found: dict = {}
    for (kind, axes), (count, size) in moves.items():
        key = ("all-reduce" if kind == "reduce-scatter" else kind, axes)
        old = found.get(key, (0, 0))
        found[key] = (old[0] + count, old[1] + size)
    return found
