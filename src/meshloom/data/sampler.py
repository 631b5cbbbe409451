"""The order of samples: sample i is a pure function of (seed, i). Nothing is stored, and nothing is replayed to resume."""

import numpy as np

ROUNDS = 8
U64 = np.uint64


def mix(x: np.ndarray) -> np.ndarray:
    """A hash of every element, uint64 -> uint64 of the same shape.  Source: splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    x = np.asarray(x, U64) + U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def key(*parts: int | np.ndarray) -> np.ndarray:
    """One uint64 from whole numbers or arrays of them (broadcast), each of which changes it, in this order."""
    out = np.zeros(1, U64)
    for part in parts:
        out = mix(out ^ mix(np.atleast_1d(np.asarray(part)).astype(np.int64).view(U64)))
    return out


def permute(place: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where each place of 0..size-1 goes under the permutation that its key names.  place, keys: (n,) -> (n,) int64.

    A Feistel network over the next power of two; what falls outside 0..size-1 goes round again (on average under one more time).
    Source: Black and Rogaway 2002, 'Ciphers with arbitrary finite domains', cycle walking."""
    bits = max(1, int(size - 1).bit_length())
    low = U64(bits // 2)
    low_mask, high_mask = U64((1 << (bits // 2)) - 1), U64((1 << (bits - bits // 2)) - 1)
    x, keys = np.broadcast_arrays(np.asarray(place).astype(U64), np.asarray(keys, U64))
    x = x.copy()
    todo = np.arange(x.size)
    while todo.size:
        k = keys[todo]
        left, right = x[todo] >> low, x[todo] & low_mask
        for r in range(0, ROUNDS, 2):
            left ^= mix(mix(right + (k ^ U64(r)))) & high_mask
            right ^= mix(mix(left + (k ^ U64(r + 1)))) & low_mask
        x[todo] = (left << low) | right
        todo = todo[x[todo] >= U64(size)]
    return x.astype(np.int64)


def order(seed: int, source: int, number: np.ndarray, size: int, shuffle: bool = True) -> np.ndarray:
    """Which of a source's `size` samples is drawn as its number-th, counted over all epochs.  number: (n,) -> (n,) int64.

    Each epoch is another permutation, so every sample comes once an epoch."""
    number = np.asarray(number, np.int64)
    epoch, place = number // size, number % size
    return permute(place, size, key(seed, source, epoch)) if shuffle else place


def held_out(seed: int, count: int, fraction: float) -> np.ndarray:
    """Which of `count` documents are held out: (count,) bool, a pure function of (seed, document number)."""
    return key(seed, 0x5EED, np.arange(count)) < U64(min(int(fraction * 2.0**64), 2**64 - 1))
