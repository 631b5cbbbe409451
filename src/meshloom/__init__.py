"""Meshloom trains, fine-tunes, compresses and serves language models on any mesh of devices, from one description of a model.

The package itself is a language for distributed tensor programs: `import meshloom as ml`, then `ml.einsum(x, w, out="batch hidden")`. Its names
are imported when they are first used, so that commands start quickly."""

__version__ = "0.1.0"

_HOMES = {
    # module: its names that stand here
    "named.tensor": "Tensor tensor spec init",
    "named.elementwise": "map astype",
    "named.product": "einsum",
    "named.reduce": "sum mean max min any all logsumexp softmax log_softmax argmax top_k sort",
    "named.shape": "rename split merge slice pad concat shift cumsum",
    "named.loop": "scan",
    "named.index": "take one_hot range zeros full",
    "named.program": "program legal grad value_and_grad",
    "named.explain": "explain",
    "named.params": "shard",
    "named.step": "make_step",
    "auto.parallelize": "parallelize",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str):
    """A name of the language, or one of JAX's elementwise functions (`named.elementwise.FUNCTIONS`) on tensors."""
    from importlib import import_module
    from importlib.util import find_spec

    if name.startswith("_") or find_spec(f"meshloom.{name}"):  # a module of ours is not looked up here, but imported
        raise AttributeError(f"module 'meshloom' has no attribute '{name}'")
    if name in _HOME:
        value = getattr(import_module(f"meshloom.{_HOME[name]}"), name)
    else:
        elementwise = import_module("meshloom.named.elementwise")
        if name not in elementwise.FUNCTIONS:
            from meshloom.core.config import unknown

            raise AttributeError(unknown("name in meshloom,", name, (*_HOME, *elementwise.FUNCTIONS)))
        value = elementwise.of(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOME))
