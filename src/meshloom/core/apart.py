"""Results that are computed once, whatever uses them."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def apart(f: Callable, *args: Any) -> Any:
    """f(*args). On a CPU a computation of its own: XLA there drops barriers and fuses cheap operations (cosines and transposes are cheap to it)
    into each operation that uses them, where they are computed again for every element that is made of them."""

    def called(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(f)(*args)

    return lax.platform_dependent(*args, cpu=called, default=f)
