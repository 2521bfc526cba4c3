"""A random order of any number of samples that is computed, not stored."""

import hashlib
import math

import numpy as np
import numpy.typing as npt

ROUNDS = 12
Words = npt.NDArray[np.uint64]


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where each index goes in a random permutation of range(size).

    A Feistel network on pairs (left, right) modulo about sqrt(size), walked until it is inside the range again:
    Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 and 5. Memory does not depend on `size`.

    Arguments: `index` int64 (N,), each in [0, size); `key` any integer, which chooses the permutation.
    Returns: int64 (N,).
    """
    left_size = math.isqrt(size - 1) + 1 if size > 1 else 1
    right_size = -(-size // left_size)
    keys = _round_keys(key)
    value = index.astype(np.uint64)
    outside = np.arange(value.size)
    while outside.size:
        value[outside] = _encipher(value[outside], left_size, right_size, keys)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def derive(*parts: int) -> int:
    """A 64-bit number that depends on all `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def _encipher(value: Words, left_size: int, right_size: int, keys: Words) -> Words:
    left, right = value % np.uint64(left_size), value // np.uint64(left_size)
    for place in range(0, ROUNDS, 2):
        left = (left + _mix(right + keys[place]) % np.uint64(left_size)) % np.uint64(left_size)
        right = (right + _mix(left + keys[place + 1]) % np.uint64(right_size)) % np.uint64(right_size)
    return right * np.uint64(left_size) + left


def _mix(value: Words) -> Words:
    # The finaliser of splitmix64 (Steele, Lea and Flood 2014): each bit in changes half the bits out.
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(key: int) -> Words:
    digest = hashlib.blake2b(str(key).encode(), digest_size=64).digest()
    digest += hashlib.blake2b(digest, digest_size=8 * ROUNDS - 64).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)
