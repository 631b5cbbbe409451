"""The order of tokens over devices: every token once, each device an equal share of causal work, padding at the end and told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.batch import Batch
from meshloom.core.layout import ONE_DEVICE
from meshloom.core.mesh import make_mesh
from meshloom.core.order import arrange, arranged, padded, places, told, true_place
from meshloom.parallel.context import CONTEXT
from meshloom.parallel.sequence import SEQUENCE
from meshloom.parallel.tensor1d import TENSOR
from meshloom.parallel.ulysses import ULYSSES

RING, HYBRID = CONTEXT.layout(4), CONTEXT.layout(2) | ULYSSES.layout(2) | TENSOR.layout(2) | SEQUENCE.layout(2)


def test_a_device_of_a_ring_holds_a_piece_and_its_mirror() -> None:
    np.testing.assert_array_equal(arrange(CONTEXT.layout(2), np.arange(8)), [0, 1, 6, 7, 2, 3, 4, 5])
    got = arrange(RING, np.arange(32)).reshape(4, 2, 4)
    for device, (first, second) in enumerate(got):
        np.testing.assert_array_equal(first, 4 * device + np.arange(4))
        np.testing.assert_array_equal(second, 4 * (7 - device) + np.arange(4))


def test_causal_work_is_shared_evenly() -> None:
    work = arrange(RING, np.arange(64) + 1).reshape(4, -1).sum(1)  # token i sees i + 1 keys
    assert len(set(work)) == 1


@pytest.mark.parametrize("lay", [RING, HYBRID, ULYSSES.layout(4), ONE_DEVICE])
def test_every_token_once_and_devices_know_where_theirs_stood(lay) -> None:
    rows = arrange(lay, np.arange(64, dtype=np.int32))
    assert sorted(rows) == list(range(64))
    np.testing.assert_array_equal(true_place(lay, np.arange(64), 64), rows)
    for name in ("seq", "whole_seq", "attend_seq"):
        axes = lay.acts.get(name, ())
        if axes:
            count = 64 // lay.size(axes)
            local = lambda: places(lay, name, count)  # noqa: B023
            got = jax.jit(jax.shard_map(local, mesh=make_mesh(lay), in_specs=(), out_specs=P(axes)))()
            np.testing.assert_array_equal(got, rows)


@pytest.mark.parametrize(
    "lay, seq, length",
    [
        (RING, 32, 32),
        (RING, 30, 32),
        (RING, 8, 8),
        (ULYSSES.layout(3), 32, 33),
        (HYBRID, 30, 32),
        (HYBRID, 9, 16),
        (RING, 8 * 1024, 8 * 1024),
        (RING, 8 * 1021, 8 * 1022),  # a piece of 1,021 tokens, a prime number, would be one block or 1,021
        (TENSOR.layout(4) | SEQUENCE.layout(4), 30, 30),  # refused by `sequence`, not padded
        (ONE_DEVICE, 7, 7),
    ],
)
def test_lengths_are_padded_to_what_devices_share(lay, seq, length) -> None:
    assert padded(lay, seq) == length
    assert bool(told(lay, seq)) == (length > seq)


def test_padding_is_told() -> None:
    assert told(RING, 30) == "sequence: rows of 30 tokens are padded to 32 for context=4 (6.2% of the work, weight 0)"


def test_padding_stands_last_and_weighs_nothing() -> None:
    one = np.arange(1, 31)[None]
    batch = Batch(one, one + 1, np.ones((1, 30), np.float32), np.ones((1, 30), np.int32), one - 1, np.arange(1))
    got = arranged(RING, batch)
    back = np.argsort(true_place(RING, np.arange(32), 32))
    for name in ("tokens", "targets", "weights", "segments", "positions"):
        whole = np.asarray(getattr(got, name))[:, back]
        np.testing.assert_array_equal(whole[:, :30], getattr(batch, name))
        assert not whole[:, 30:].any()
    assert arranged(ONE_DEVICE, batch).tokens is batch.tokens or (arranged(ONE_DEVICE, batch).tokens == batch.tokens).all()
    targets = np.asarray(got.targets)[0, np.argsort(np.asarray(got.tokens)[0])]
    assert (targets[2:] == np.arange(2, 32)).all(), "each token keeps its own target, at every border"
    assert jnp.asarray(got.samples).shape == (1,)
