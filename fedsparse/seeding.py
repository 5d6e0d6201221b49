"""Random numbers that depend on what they are for, never on who ran first.

Every draw comes from a generator keyed by (run seed, purpose, round, client, ...), so that results do not
depend on the order in which clients finish, on the engine, or on the number of workers.
"""

import hashlib

import numpy as np


def entropy(seed: int, purpose: str, *keys: int | str) -> int:
    """Return 128 bits that depend on `seed`, `purpose` and every key, and on nothing else."""
    text = "\x1f".join([str(int(seed)), purpose, *(str(key) for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """Return a fresh generator for one purpose, e.g. ``generator(0, "cohort", server_round)``."""
    return np.random.Generator(np.random.PCG64(entropy(seed, purpose, *keys)))


def int_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """Return a 63-bit seed, for libraries that want an integer (torch, scikit-learn)."""
    return entropy(seed, purpose, *keys) & (2**63 - 1)
