"""Small models for the tests of this folder, without compiling anything to make them."""

import jax
import numpy as np

from meshloom.core.layout import ONE_DEVICE
from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.spec import is_spec
from meshloom.parallel.table import build
from meshloom.serve.engine import make_engine


def made_up(specs, scale=0.1):
    """Parameters with no bias at zero and no gain at one; padding rows are zero.  scale: of vectors; matrices have three times as much."""
    rng = np.random.default_rng(1)

    def one(s):
        value = np.zeros(s.shape, np.float32)
        used = tuple(slice(n) for n in s.used)
        value[used] = s.init.mean + rng.normal(0, 3 * scale if len(s.shape) > 2 else scale, s.used)
        return value

    return jax.tree.map(one, specs, is_leaf=is_spec)


def zeros(specs):
    """All parameters zero: a uniform model."""
    return jax.tree.map(lambda s: np.zeros(s.shape, np.float32), specs, is_leaf=is_spec)


def prepared(model, c, params, spelling="", gather="layer"):
    """An engine under a layout, and its weights."""
    lay = build(spelling, c, c.max_seq) if spelling else ONE_DEVICE
    mesh = make_mesh(lay) if lay.devices > 1 else None
    if mesh is not None:
        params = jax.device_put(params, shardings(mesh, lay, "rest", model.specs(c)))
    engine = make_engine(model, c, mesh, lay, gather=gather)
    return engine, engine.prepare(params)
