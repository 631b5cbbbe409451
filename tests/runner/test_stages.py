"""Stages that are unlike, each with its own program on its own devices, equal one device: loss and all gradients, under every schedule."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshloom.core.tree import named_leaves
from meshloom.parallel.schedules import Schedule, make, read
from meshloom.parallel.simulate import simulate
from meshloom.parallel.slots import compile
from meshloom.runner import stages as under
from meshloom.runner.stages import Stage, calls, place, submeshes, value_and_grad

WIDTHS = (5, 7, 11, 3, 9)
"""Of the layers between the MLP's stages, all unlike."""


def near(got: Any, want: Any) -> None:
    """Equal to 1e-5 of the largest element of each array, and never nothing."""
    a, b = named_leaves(got), named_leaves(want)
    assert list(a) == list(b)
    for path, x in a.items():
        y = np.asarray(b[path], np.float64)
        assert x.dtype == jnp.float32 and np.abs(y).max() > 0, path
        assert np.abs(np.asarray(x, np.float64) - y).max() <= 1e-5 * np.abs(y).max(), path


def mlp(parts: int, depths: tuple[int, ...] = (1, 3, 1, 2), batch: P = P()) -> tuple[list[Stage], list]:
    """Stages of 1 to 3 layers between widths that are odd, the last with a loss."""

    def run(w: dict, x: Any, data: dict, first: bool, last: bool) -> Any:
        x = data["x"] if first else x
        for layer in w["layers"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.sum(jnp.square(x - data["y"]) * data["weight"][:, None]) if last else x

    rng, stages, params = np.random.default_rng(0), [], []
    for i in range(parts):
        into, out = WIDTHS[i], WIDTHS[i + 1]
        sizes = [into, *[out] * depths[i]]
        of = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)
        params.append({"layers": [{"w": of(a, b), "b": of(b)} for a, b in pairwise(sizes)]})
        first, last = i == 0, i == parts - 1
        takes = ("x",) * first + ("y", "weight") * last
        stages.append(Stage(lambda w, x, d, first=first, last=last: run(w, x, d, first, last), takes, P(), batch))
    return stages, params


def rows(n: int, parts: int) -> dict[str, np.ndarray]:
    """A batch whose rows count unequally."""
    rng = np.random.default_rng(1)
    of = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {"x": of(n, WIDTHS[0]), "y": of(n, WIDTHS[parts]), "weight": rng.integers(0, 4, n).astype(np.float32)}


def one_device(stages: list[Stage], params: list, batch: dict) -> tuple[jax.Array, list]:
    """The truth: the stages one after another on the whole batch, differentiated at once."""

    def loss(params: list) -> Any:
        x: Any = ()
        for stage, w in zip(stages, params):
            x = stage.run(w, x, {name: jnp.asarray(batch[name]) for name in stage.takes})
        return x

    return jax.value_and_grad(loss)(params)


def own(tmp_path: Path) -> Schedule:
    """A table of a user's own, with its micro-batches out of order."""
    path = tmp_path / "own.csv"
    path.write_text("F2,F0,,B2,F1,B0,,B1\n,F2,B2,F0,B0,F1,B1,\n")
    return read(path)


SCHEDULES: dict[str, Callable[[Path], Schedule]] = {
    "gpipe": lambda _: make("gpipe", 3, 4),
    "gpipe apart": lambda _: make("gpipe", 3, 4, packed=False),
    "1f1b": lambda _: make("1f1b", 3, 4),
    "1f1b apart": lambda _: make("1f1b", 3, 5, packed=False),
    "zb": lambda _: make("zb", 3, 4),
    "zb apart": lambda _: make("zb", 3, 4, packed=False),
    "interleaved2": lambda _: make("interleaved2", 2, 4),
    "interleaved4": lambda _: make("interleaved4", 1, 3, packed=False),
    "one stage": lambda _: make("1f1b", 1, 3),
    "one micro-batch": lambda _: make("1f1b", 4, 1),
    "own": own,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_uneven_stages_on_uneven_devices_equal_one_device(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name](tmp_path)
    parts = schedule.stages * schedule.chunks
    stages, params = mlp(parts, batch=P("data"))
    meshes = submeshes([{"data": n} for n in (1, 3, 2, 1)[: schedule.stages]])
    batch = rows(6 * schedule.micro, parts)
    held = place(stages, schedule, meshes, params)
    loss, grads = value_and_grad(stages, schedule, meshes)(held, batch)
    near((loss, grads), one_device(stages, params, batch))
    for i, grad in enumerate(grads):
        assert {d for a in jax.tree.leaves(grad) for d in a.devices()} == set(meshes[i % schedule.stages].devices.flat)


@pytest.mark.parametrize("micro, n", [(3, 15), (7, 7)])
def test_odd_micro_batches_and_a_second_size(micro: int, n: int) -> None:
    """One function serves batches of several sizes, and parameters that nobody placed."""
    stages, params = mlp(3)
    run = value_and_grad(stages, make("1f1b", 3, micro), submeshes([{"x": 2}, {"x": 1}, {"y": 5}]))
    for size in (n, 2 * n):
        near(run(params, rows(size, 3)), one_device(stages, params, rows(size, 3)))


VOCAB, WIDTH = 13, 6
TAKES = (("source",), (), ("target",), ("target", "count"))


def attention(w: dict, x: jax.Array, memory: jax.Array, mask: jax.Array) -> jax.Array:
    """x + what it finds in the memory, where the mask is 1."""
    scores = jnp.einsum("btd,bsd->bts", x @ w["q"], memory @ w["k"])
    return x + jax.nn.softmax(jnp.where(mask[:, None] > 0, scores, -1e9)) @ (memory @ w["v"])


def translator() -> tuple[list[Stage], list, list]:
    """An encoder of 1 + 2 layers and a decoder of 1 + 1: the message of stages 0 and 1 is (x, mask), of stage 2 a dict with the encoder's output. The
    embedding is the encoder's, the decoder's and the head's."""

    def enter(w: dict, _: Any, d: dict) -> Any:
        return w["embed"]["table"][d["source"]], (d["source"] > 0).astype(jnp.int32)

    def encode(w: dict, message: Any, d: dict) -> Any:
        x, mask = message
        for layer in w["layers"]:
            x = attention(layer, x, x, mask)
        return x, mask

    def decode(w: dict, message: Any, d: dict) -> Any:
        memory, mask = message
        x = attention(w["cross"], w["embed"]["table"][d["target"][:, :-1]], memory, mask)
        return {"x": jnp.tanh(x), "memory": memory, "mask": mask}

    def leave(w: dict, message: Any, d: dict) -> Any:
        x = attention(w["cross"], message["x"], message["memory"], message["mask"])
        log = jax.nn.log_softmax(x @ w["embed"]["table"].T + w["bias"])
        said = jnp.take_along_axis(log, d["target"][:, 1:, None], -1)[..., 0]
        return -jnp.sum(said * d["count"][:, None])

    rng = np.random.default_rng(2)
    of = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)
    layer = lambda: {name: of(WIDTH, WIDTH) for name in "qkv"}
    embed = {"table": of(VOCAB, WIDTH)}
    params = [
        {"embed": embed},
        {"layers": [layer(), layer()]},
        {"cross": layer(), "embed": embed},
        {"cross": layer(), "embed": embed, "bias": of(VOCAB)},
    ]
    split = {"cross": {"q": P(None, "tensor"), "k": P(None, "tensor"), "v": P()}, "embed": P()}
    specs = [P(), P(), split, P()]
    runs = (enter, encode, decode, leave)
    return [Stage(run, takes, spec, P("data")) for run, takes, spec in zip(runs, TAKES, specs)], params, specs


def sentences(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    source, target = rng.integers(0, VOCAB, (n, 9)), rng.integers(0, VOCAB, (n, 6))
    return {"source": source, "target": target, "count": rng.integers(0, 3, n).astype(np.float32)}


@pytest.mark.parametrize("schedule", [make("1f1b", 4, 3), make("gpipe", 4, 3, packed=False), make("zb", 4, 3)], ids=lambda s: s.name)
def test_encoder_and_decoder_with_trees_as_messages_and_a_tied_embedding(schedule: Schedule) -> None:
    stages, params, _ = translator()
    meshes = submeshes([{"data": 1}, {"data": 3}, {"data": 1, "tensor": 3}, {"data": 1}])
    run = value_and_grad(stages, schedule, meshes, tied=("embed",))
    held = place(stages, schedule, meshes, params, tied=("embed",))
    assert held[2]["cross"]["q"].sharding.shard_shape((WIDTH, WIDTH)) == (WIDTH, WIDTH // 3)
    loss, grads = run(held, sentences(9))
    want, apart = one_device(stages, params, sentences(9))
    table = sum(g["embed"]["table"] for g in (apart[0], apart[2], apart[3]))
    for g in (apart[0], apart[2], apart[3]):
        g["embed"] = {"table": table}
    near((loss, grads), (want, apart))
    assert grads[2]["cross"]["q"].sharding.is_equivalent_to(held[2]["cross"]["q"].sharding, 2)


def test_gradients_are_summed_in_fp32() -> None:
    """Of bf16 weights: as 64 micro-batches one by one, added in fp32; in bf16 the sum is another."""
    stage = Stage(lambda w, x, d: jnp.sum((d["x"] @ w["w"]).astype(jnp.float32)), ("x",))
    params, x = [{"w": jnp.ones((3, 2), jnp.bfloat16)}], np.random.default_rng(0).normal(size=(64, 3)).astype(jnp.bfloat16) + 1
    _, (got,) = value_and_grad([stage], make("gpipe", 1, 64), submeshes([{"data": 1}]))(params, {"x": x})
    each = [jax.grad(lambda w: stage.run(w, (), {"x": jnp.asarray(x[i : i + 1])}))(params[0])["w"] for i in range(64)]  # noqa: B023
    near(got["w"], sum(g.astype(jnp.float32) for g in each))
    assert np.abs(np.asarray(got["w"]) - np.asarray(sum(each), np.float32)).max() > 0.1


@pytest.mark.parametrize("name, stages", [("1f1b", 3), ("gpipe", 3), ("zb", 3), ("interleaved2", 2)])
def test_calls_are_those_of_a_step(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, jit, move = Counter(), jax.jit, jax.device_put

    def counted(kind: str, fn: Callable) -> Callable:
        def call(*a: Any, **k: Any) -> Any:
            made[kind] += 1
            return fn(*a, **k)

        return call

    schedule = make(name, stages, 4)
    parts, params = mlp(stages * schedule.chunks)
    meshes = submeshes([{"x": 1}] * stages)
    monkeypatch.setattr(jax, "jit", lambda *a, **k: counted("programs", jit(*a, **k)))
    run, held = value_and_grad(parts, schedule, meshes), place(parts, schedule, meshes, params)
    monkeypatch.setattr(jax, "device_put", counted("moves", move))
    made.clear()
    run(held, rows(8, len(parts)))
    assert dict(made) == calls(parts, schedule)._asdict()


@pytest.mark.parametrize("packed", [True, False])
def test_a_stage_keeps_as_many_inputs_as_its_schedule_says(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, most = make("1f1b", 4, 9, packed), Counter()
    backward = under._Flight.backward

    def seen(self: Any, m: int, part: int) -> None:
        most[part] = max(most[part], sum(p == part for _, p in self.kept))
        backward(self, m, part)

    monkeypatch.setattr(under._Flight, "backward", seen)
    stages, params = mlp(4)
    value_and_grad(stages, schedule, submeshes([{"x": 1}] * 4))(params, rows(9, 4))
    assert tuple(most[part] for part in range(4)) == simulate(compile(schedule)).kept == ((7, 5, 3, 1) if packed else (4, 3, 2, 1))


def ask(
    n: int = 6, micro: int = 3, meshes: list[Mesh] | None = None, edit: Callable[[list, list], None] | None = None, tied: tuple = ()
) -> None:
    """A step of the MLP with something changed."""
    stages, params = mlp(3)
    edit(stages, params) if edit else None
    value_and_grad(stages, make("1f1b", 3, micro), meshes or submeshes([{"data": 2}, {"data": 1}, {"data": 2}]), tied)(params, rows(n, 3))


def change(i: int, **over: Any) -> Callable[[list, list], None]:
    """Another stage i."""
    return lambda stages, params: stages.__setitem__(i, stages[i]._replace(**over))


def tie(of: Callable[[list], None]) -> Callable[[list, list], None]:
    """Parameters called `e` in every stage, then changed."""

    def edit(stages: list, params: list) -> None:
        for w in params:
            w["e"] = jnp.ones((2,))
        of(params)

    return edit


REFUSED = {
    "The stages need 4 + 5 = 9 devices, and there are 8. Give them fewer, or simulate more": lambda: submeshes([{"a": 4}, {"a": 5}]),
    "'1f1b' is a schedule of 3 stages, and 2 functions on 3 meshes were given. Give 3 functions and 3 meshes, or another": lambda: ask(
        edit=lambda s, p: s.pop()
    ),
    "and 3 functions on 2 meshes were given": lambda: ask(meshes=submeshes([{"data": 1}] * 2)),
    "'interleaved2' is a schedule of 2 stages with 2 chunks each, and 3 functions on 2 meshes were given. Give 4 functions": lambda: (
        value_and_grad(mlp(3)[0], make("interleaved2", 2, 4), submeshes([{"data": 1}] * 2))
    ),
    "There are 3 functions of stages, and parameters for 2. Give each its own, () for none.": lambda: ask(edit=lambda s, p: p.pop()),
    "'x' has 7 rows, which 3 micro-batches do not share evenly. The nearest that fit: 6 or 9.": lambda: ask(n=7),
    "'x' has 2 rows, which 3 micro-batches do not share evenly. The nearest that fit: 3.": lambda: ask(n=2),
    "stage 0 takes 'wheight', which the batch lacks. Did you mean 'weight'? It has: x, y, weight.": lambda: ask(
        edit=change(0, takes=("wheight",))
    ),
    "In stage 2 the data 'weight' has the shape [3, 3], which (None, 'data') does not cut evenly over the mesh {'data': 2}. Give": lambda: (
        ask(n=9, edit=change(2, batch=P("data")))
    ),
    "In stage 2 the message has the shape [3, 11], which ('data',) does not cut evenly over the mesh {'data': 2}. Give": lambda: ask(
        n=9, edit=change(2, batch=P("data"), takes=())
    ),
    "In stage 0 the parameter 'layers.0.b' has the shape [7], which ('data',) does not cut evenly": lambda: ask(
        edit=change(0, params=P("data"))
    ),
    "stage 2 does not run with the message of stage 1, x float32[2, 11], and the data weight float32[2], y float32[2, 3]. Change what": lambda: (
        ask(edit=change(1, run=lambda w, x, d: {"x": x @ w["layers"][0]["w"]}))
    ),
    "stage 0 does not run with no message and the data (nothing). Change what is sent, or the function that gets it, which says: 'x'": lambda: (
        ask(edit=change(0, takes=()))
    ),
    "stage 2 is the last and returns an array float32[2, 11]. Let it return the loss of its micro-batch, one number, a sum.": lambda: ask(
        edit=change(2, run=lambda w, x, d: x)
    ),
    "stage 0 has no gradient for 'ids' (int32). Hand integers over as data, or keep them in its function.": lambda: ask(
        edit=lambda s, p: p[0].update(ids=jnp.zeros((3,), jnp.int32))
    ),
    "'layer' is tied, and 0 of the functions of stages have it among their parameters, not 2 or more.": lambda: ask(tied=("layer",)),
    "'ee' is tied, and 1 of the functions of stages have it among their parameters": lambda: ask(
        edit=tie(lambda p: p[0].update(ee=jnp.ones(2))), tied=("ee",)
    ),
    "'e' is tied, and function 1 holds e float32[3], but function 0 e float32[2]. Give both the same shapes, or": lambda: ask(
        edit=tie(lambda p: p[1].update(e=jnp.ones(3))), tied=("e",)
    ),
    "'e' is tied, and stage 1 holds other numbers than stage 0. Give both the same.": lambda: place(
        mlp(2)[0], make("1f1b", 2, 2), submeshes([{"a": 1}, {"a": 2}]), [{"e": np.ones(2)}, {"e": np.zeros(2)}], tied=("e",)
    ),
}


@pytest.mark.parametrize("said", REFUSED, ids=lambda said: said[:40])
def test_refuses_in_a_sentence(said: str) -> None:
    with pytest.raises(ValueError) as e:
        REFUSED[said]()
    assert said in str(e.value)
