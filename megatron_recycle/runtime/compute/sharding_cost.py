"""Memory cost of a sharded optimizer state for a worker: bytes per parameter, in words."""

from __future__ import annotations

from typing import NamedTuple


class Bytes(NamedTuple):
    """Bytes per parameter: of itself, of its summed gradient, and of the optimizer's state (a master if that is another
    tensor, and moments)."""

    parameter: int
    gradient: int
    state: int

    def kept(self, copies: int, shards: int, staggered: bool) -> float:
        """On a worker, with each of ``shards`` held ``copies`` times. Parameters and sums are whole; with ``staggered``
        steps the state of shards that a step changes is there twice, and their reduced gradient while the next one is
        summed up."""
        of_shards = self.state + (self.state + self.gradient if staggered else 0)
        return self.parameter + self.gradient + of_shards * min(copies, shards) / shards

    def stock(self, shards: int) -> float:
        """With a framework's own sharded optimizer, which keeps each shard once, and no more than it must."""
        return self.kept(1, shards, staggered=False)


def described(each: Bytes, copies: int, shards: int, staggered: bool) -> str:
    """One line: the cost of ``copies`` and ``staggered``, of other choices, and of the framework's own sharded
    optimizer."""
    numbers = sorted({1, min(2, shards), min(copies, shards), shards})
    names = ["all" if number == shards else str(number) for number in numbers]

    def row(staggered: bool) -> str:
        return ", ".join(f"{each.kept(number, shards, staggered):.1f}" for number in numbers)

    return (f"{each.kept(copies, shards, staggered):.1f} bytes per parameter of a worker, besides activations (state "
            f"copies: {names[numbers.index(min(copies, shards))]}, {'staggered' if staggered else 'barrier'}); with "
            f"{', '.join(names)} copies {row(False)} with step barrier, and {row(True)} with staggered; the sharded "
            f"optimizer without the plugin: at least {each.stock(shards):.1f}")
