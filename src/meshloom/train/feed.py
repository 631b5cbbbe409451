"""From the loader's rows to arrays on the devices; every process reads the rows of its own devices only."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshloom.core.batch import Batch
from meshloom.core.order import arrange, padded
from meshloom.data.loader import Drawn, Loader
from meshloom.plan.plan import Plan
from meshloom.train.gradient import batch_shardings


class Feed:
    """Rows of a global batch [micro, rows / micro, seq] for this process, in the order in which the plan's devices hold their tokens (`core.order`);
    without segments where rows hold one document each or one stream (padding stands last there, so no token sees it).  micro: as the plan's
    where not given."""

    def __init__(self, plan: Plan, rows: int, seq: int, micro: int = 0):
        self.layout, self.where, self.micro = plan.layout, batch_shardings(plan), micro or plan.micro
        micro, seq = self.micro, padded(plan.layout, seq)
        self.per_micro = rows // micro
        sharding: NamedSharding = self.where.tokens  # type: ignore  # a Batch of shardings
        parts = sharding.addressable_devices_indices_map((micro, self.per_micro, seq)).values()
        spans = [part[1].indices(self.per_micro)[:2] for part in parts if part is not None]
        self.first, self.last = min(lo for lo, _ in spans), max(hi for _, hi in spans)

    @property
    def mine(self) -> np.ndarray:
        """Places in the global batch of the rows that this process reads."""
        return np.arange(self.micro * self.per_micro).reshape(self.micro, -1)[:, self.first : self.last].ravel()

    def train(self, loader: Loader, start: int) -> Iterator[Batch]:
        """Batches without end from sample number `start` on."""
        return map(self.put, loader.batches(start, self.micro * self.per_micro, self.mine))

    def once(self, loader: Loader, limit: int = 0) -> Iterator[Batch]:
        """Every row of a held-out set once, or its first `limit`; the last batch is filled up with rows that weigh nothing."""
        return map(self.put, loader.once(self.micro * self.per_micro, self.mine, limit))

    def put(self, rows: Drawn) -> Batch:
        """This process's rows as parts of global arrays."""
        where = {name: getattr(self.where, name) for name in rows._fields}
        return Batch(**{name: None if where[name] is None else self._put(a, where[name]) for name, a in rows._asdict().items()})

    def _put(self, rows: np.ndarray, where: NamedSharding) -> jax.Array:
        rows = arrange(self.layout, rows) if rows.ndim > 1 else rows
        local = rows.reshape(self.micro, self.last - self.first, *rows.shape[1:])
        shape = (self.micro, self.per_micro, *rows.shape[1:])

        def part(index: tuple[slice, ...]) -> np.ndarray:
            lo, hi, _ = index[1].indices(self.per_micro)
            return local[:, lo - self.first : hi - self.first, *index[2:]]

        return jax.make_array_from_callback(shape, where, part)
