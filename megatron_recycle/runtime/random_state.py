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
    # Not torch.manual_seed(): for every kind of device that was never used it formats a stack trace and keeps it,
    # milliseconds and memory for each forward.
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before):
            generator.set_state(state)
