"""Randomness that depends on what is computed, not on where (promise P4)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, iteration: int, pipeline: int, microbatch: int, stage: int) -> int:
    """A 63-bit seed for one stage's forward of one micro-batch."""
    key = f"{seed}:{iteration}:{pipeline}:{microbatch}:{stage}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run the block with torch's generators (CPU and ``device``) at ``seed``; put them back afterwards.

    Recomputation of checkpointed activations restores what its forward saved, so it needs nothing here.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
