"""A program under a layout: one `shard_map` over all mesh axes, in which every tensor is this device's part."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh
from meshloom.core.spec import Spec
from meshloom.core.vary import varying
from meshloom.named.rules import Place, Rules, Sizes
from meshloom.named.rules import layout as read
from meshloom.named.tensor import Tensor, is_tensor, placed


class Program:
    """A function of tensors under a layout; call it like the function. It is jitted, and `jax.grad` and `jax.jit` go through it.

    layout: the mesh and the rules. fn: the function as it was given."""

    def __init__(self, fn: Callable, layout: Layout, devices: list | None = None) -> None:
        self.fn, self.layout, self._devices = fn, layout, devices
        self._mesh = None
        self._jit = jax.jit(lambda *args: self._run(self.mesh, *args))

    @property
    def mesh(self):
        """The mesh over the devices. Raises ValueError if there are too few."""
        self._mesh = self._mesh or make_mesh(self.layout, self._devices)
        return self._mesh

    def __call__(self, *args) -> Any:
        """fn of whole tensors: whole tensors, laid out by the rules; a result without names is a plain JAX scalar."""
        return self._jit(*self.place(args))

    def place(self, tree: Any) -> Any:
        """A tree of tensors and arrays on the devices, where the rules put them; other arrays whole on each."""

        def put(x: Any) -> Any:
            array = x.value() if is_tensor(x) else x
            if isinstance(array, Tracer):
                return x
            where = NamedSharding(self.mesh, self._partition(x))
            return Tensor(x.names, jax.device_put(array, where)) if is_tensor(x) else jax.device_put(array, where)

        return jax.tree.map(put, tree, is_leaf=is_tensor)

    def lower(self, *args) -> Any:
        """The program lowered for these arguments, tensors or specs; `.compile()` compiles it."""
        return self._jit.lower(*abstract(args, lambda x: NamedSharding(self.mesh, self._partition(x))))

    def jaxpr(self, *args) -> Any:
        """The traced program for these arguments, tensors or specs. Needs no devices."""
        return jax.make_jaxpr(lambda *args: self._run(self._nowhere, *args))(*abstract(args))

    def traced(self, *args) -> Place:
        """The place of the program's tensors after it was traced for these arguments, with the names and sizes of them all."""
        place = Place(self.layout)
        jax.make_jaxpr(lambda *args: self._run(self._nowhere, *args, place=place))(*abstract(args))
        return place

    @property
    def _nowhere(self) -> AbstractMesh:
        sizes = self.layout.sizes
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    def _partition(self, x: Any) -> PartitionSpec:
        """Where an argument lies. Refuses what the rules cannot split."""
        if not is_tensor(x):
            return PartitionSpec()
        place = Place(self.layout)
        place.check(x.names, tuple(x.sizes.values()))
        return place.partition(x.names)

    def _run(self, mesh, *args, place: Place | None = None) -> Any:
        """The program, traced.  place: of its tensors, made if not given."""
        given, tree = jax.tree.flatten(args, is_leaf=is_tensor)
        where = tuple(self._partition(x) for x in given)
        arrays = [x.value() if is_tensor(x) else x for x in given]
        place = (place or Place(self.layout)) if self.layout.sizes else None
        told: list[tuple] = []

        def body(*parts):
            mine = [Tensor(x.names, part, place) if is_tensor(x) else part for x, part in zip(given, parts)]
            out, out_tree = jax.tree.flatten(self.fn(*tree.unflatten(mine)), is_leaf=is_tensor)
            out = [placed(x, place) if is_tensor(x) else jax.numpy.asarray(x) for x in out]
            told.append((out_tree, [getattr(x, "names", None) for x in out]))
            return tuple(_result(x) for x in out)

        if place is None:
            values = body(*arrays)
        else:
            # traced once for the names of its results, and again with their places
            jax.eval_shape(jax.shard_map(lambda *parts: body(*parts)[:0], mesh=mesh, in_specs=where, out_specs=()), *arrays)
            place.check_seen()
            outs = tuple(place.partition(names or ()) for names in told[0][1])
            values = jax.shard_map(body, mesh=mesh, in_specs=where, out_specs=outs)(*arrays)
        out_tree, names = told[0]
        return out_tree.unflatten([Tensor(n, v) if n else v for n, v in zip(names, values)])


def _result(x: Any) -> jax.Array:
    """The part of a result that a device returns. Refuses plain arrays that differ between devices."""
    if is_tensor(x):
        return x.value()
    if varying(x):
        raise ValueError(
            f"A plain array of shape {x.shape} is returned that differs between the devices along {', '.join(sorted(varying(x)))}. "
            "Return tensors with names, or arrays made of numbers alone."
        )
    return x


def abstract(tree: Any, where: Callable | None = None) -> Any:
    """A tree of tensors, specs and arrays without their values.  where: tensor -> its sharding."""

    def one(x):
        t = Tensor(x.axes, jax.ShapeDtypeStruct(x.shape, x.dtype)) if isinstance(x, Spec) else x
        array = t.part if is_tensor(t) else jax.numpy.asarray(t)
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where(t) if where else None)
        return Tensor(t.names, shape) if is_tensor(t) else shape

    return jax.tree.map(one, tree, is_leaf=lambda x: is_tensor(x) or isinstance(x, Spec))


def program(fn: Callable, mesh: Sizes | Layout = "", rules: Rules = "", devices: list | None = None) -> Program:
    """fn laid out: `ml.program(loss, mesh="rows=2 cols=4", rules="batch:rows hidden:cols")`. No rules change what it returns; without a mesh it is
    fn on one device.  Rules that cannot be are refused, those about intermediate tensors at the first call, before anything is compiled."""
    return Program(fn, read(mesh, rules), devices)


def legal(fn: Callable, *args, mesh: Sizes | Layout) -> list[dict[str, tuple[str, ...]]]:
    """Every set of rules, each name on one mesh axis or on none, that the program can run under for these arguments (tensors or specs), by one
    tracing: `min(ml.legal(step, *args, mesh=mesh), key=lambda rules: ml.explain(step, *args, mesh=mesh, rules=rules).bytes)`."""
    return Program(fn, read(mesh)).traced(*args).legal()


def value_and_grad(fn: Callable, argnums: int | tuple[int, ...] = 0) -> Callable:
    """Like `jax.value_and_grad`, for a function that returns a tensor without names; inside a program and outside."""

    def scalar(*args):
        y = fn(*args)
        return y.array() if is_tensor(y) else y

    return jax.value_and_grad(scalar, argnums)


def grad(fn: Callable, argnums: int | tuple[int, ...] = 0) -> Callable:
    """Like `jax.grad`, for a function that returns a tensor without names; inside a program and outside."""
    both = value_and_grad(fn, argnums)
    return lambda *args: both(*args)[1]
