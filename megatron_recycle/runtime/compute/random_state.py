"""Randomness that depends on what is computed, not on where (promise P4).

All generators that a user's code may draw from are set before each piece of work, from the job's seed and the work's
place, and restored when the script's own code goes on.
"""

from __future__ import annotations

import hashlib
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.find_generators import Found, generators_in, trackers_in

_ALIKE = "data-parallel-rng"  # Megatron's name of the generator that is the same on tensor-parallel parts


def seed_of(seed: int, *place: int | str) -> int:
    """A 63-bit seed for the work at ``place``; for a forward that is (iteration, pipeline, micro-batch, stage)."""
    key = ":".join(map(str, (seed, *place))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class Generators:
    """All random generators that the user's code may draw from on this worker.

    These are torch's generators of the CPU and of ``device``, Python's and numpy's global ones, and those found by
    `adopt` and `adopt_trackers`.

    Args:
        device: the worker's.
        part: tensor-parallel part, which draws other numbers than its siblings from named generators.
    """

    def __init__(self, device: torch.device, part: int = 0) -> None:
        self._part = part
        generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
        self._torch: list[_Source] = [_torch(generator) for generator in generators]
        self._others: list[_Source] = [
            _python(random), _legacy_numpy(lambda: sys.modules.get("numpy.random"))]
        self._known = {id(generator) for generator in generators}
        self._outside: list[tuple[_Source, Any]] = []

    def adopt(self, name: str, *holders: Any) -> None:
        """Also set the generators that ``holders`` keep (a model, a dataset, a function); messages name them by
        ``name`` and where they were found. Raises UnsupportedError if one cannot be set."""
        self._take((f"{name}: {path}", generator) for holder in holders for path, generator in generators_in(holder))

    def adopt_trackers(self) -> None:
        """Also set named generators that Megatron, or a derived project, keeps in modules, if there are any.

        Raises UnsupportedError if one cannot be set.
        """
        self._take(trackers_in(sys.modules))

    def seed(self, number: int, first: int | None = None) -> None:
        """Set all of them; torch's own to ``first``, if given."""
        # Not torch.manual_seed(): for every kind of device that was never used it formats a stack trace and keeps it,
        # milliseconds and memory for each forward.
        for source in self._torch:
            source.seed(number if first is None else first)
        for source in self._others:
            source.seed(number)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators after the block; with nested blocks, after the outermost, since code inside sets them
        for itself."""
        if self._outside:
            yield
            return
        with self._put_back() as self._outside:
            try:
                yield
            finally:
                self._outside = []

    @contextmanager
    def of_script(self) -> Iterator[None]:
        """Inside the block they are as before all blocks of `kept`: as the script has left them."""
        with self._put_back():
            for source, state in self._outside:
                source.restore(state)
            yield

    @contextmanager
    def _put_back(self) -> Iterator[list[tuple[_Source, Any]]]:
        before = [(source, source.state()) for source in (*self._torch, *self._others)]
        try:
            yield before
        finally:
            for source, state in before:
                source.restore(state)

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Run the block with all of them set to ``number``; restore them afterwards, as `kept` does."""
        with self.kept():
            self.seed(number)
            yield

    def _take(self, found: Iterable[Found]) -> None:
        for name, generator in found:
            if id(generator) in self._known:
                continue
            source = _source_of(generator, self._part)
            try:
                with self.kept():
                    state = source.state()
                    source.seed(1)
                    source.restore(state)
            except Exception as error:
                raise UnsupportedError(
                    f"{name} ({type(generator).__name__}) cannot be set to numbers that depend on the micro-batch only "
                    f"({type(error).__name__}: {error}): what it gives would depend on where a micro-batch runs. Draw "
                    "from torch's, Python's or numpy's global generators instead") from error
            self._known.add(id(generator))
            self._others.append(source)


class Seeds:
    """Sets ``generators`` for reading data.

    Args:
        generators: of the worker.
        seed: of the job.
        purpose: keeps random numbers of training apart from those of evaluation.
    """

    def __init__(self, generators: Generators, seed: int, purpose: str = "data") -> None:
        self.generators = generators
        self._seed = seed
        self._purpose = purpose

    def set(self, pipeline: int, number: int) -> None:
        """Set them for micro-batch ``number`` of ``pipeline``, counted from training's start; -1: before the first."""
        self.generators.seed(seed_of(self._seed, self._purpose, pipeline, number))


class _Source(NamedTuple):
    """One generator, or a set of them: functions that read its state, restore it, and set it to a number."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


def _torch(generator: torch.Generator) -> _Source:
    return _Source(generator.get_state, generator.set_state, generator.manual_seed)


def _python(generator: Any) -> _Source:
    """Source of a random.Random, or of the module, which has the same functions for the global one."""
    return _Source(generator.getstate, generator.setstate, generator.seed)


def _numpy(generator: Any) -> _Source:
    """Source of a numpy.random.Generator or RandomState, with any bit generator."""
    bits = generator.bit_generator

    def restore(state: Any) -> None:
        bits.state = state

    return _Source(lambda: bits.state, restore, lambda number: restore(type(bits)(number).state))


def _legacy_numpy(find: Callable[[], Any]) -> _Source:
    """Source of a RandomState, or of numpy.random, which has the same functions for the global one: it also keeps every
    second normal number for the next time. ``find()``: it, or None until it is loaded."""
    def state() -> Any:
        generator = find()
        return None if generator is None else generator.get_state(legacy=False)

    def restore(state: Any) -> None:
        if state is not None:
            find().set_state(state)

    def seed(number: int) -> None:
        if (generator := find()) is None:
            return
        try:
            generator.seed(number % 2**32)
        except TypeError:  # another bit generator than the usual one
            kind = getattr(sys.modules["numpy.random"], state()["bit_generator"])
            restore({**kind(number).state, "has_gauss": 0, "gauss": 0.0})

    return _Source(state, restore, seed)


class _Tracker:
    """Named generators, as states that are put into a device's generator while one of them is used."""

    def __init__(self, tracker: Any, part: int) -> None:
        self._tracker = tracker
        self._part = part
        self._makers: dict[tuple[str, int], torch.Generator] = {}

    def state(self) -> Any:
        return {name: _state_of(state) for name, state in self._tracker.get_states().items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        # Not tracker.add(), which saves and restores the device generator's state for each name.
        now, plain = self._tracker.get_states(), {}
        for name, state in states.items():
            if isinstance(now.get(name), torch.Generator):
                now[name].set_state(state)
                plain[name] = now[name]
            else:
                plain[name] = state
        self._tracker.set_states(plain)

    def seed(self, number: int) -> None:
        states: dict[str, Any] = {}
        for name, state in self._tracker.get_states().items():
            # As in stock, tensor-parallel parts differ in all of them but one.
            key = name if self._part == 0 or name == _ALIKE else f"{name} {self._part}"
            own = (number + zlib.crc32(key.encode())) % 2**63
            states[name] = self._made(state).manual_seed(own).get_state()
        self.restore(states)

    def _made(self, state: Any) -> torch.Generator:
        """A generator whose states are of the same kind as ``state``."""
        if isinstance(state, torch.Generator):
            key = "generator", state.device.index or 0
            return self._makers.setdefault(key, torch.Generator(state.device))
        for device in ("cpu", "cuda"):
            if (device, state.numel()) not in self._makers and (device == "cpu" or torch.cuda.is_available()):
                maker = torch.Generator(device)
                self._makers[device, maker.get_state().numel()] = maker
            if (device, state.numel()) in self._makers:
                return self._makers[device, state.numel()]
        raise TypeError(f"a state of {state.numel()} bytes is of no generator that torch has here")


def _state_of(state: Any) -> Any:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def _source_of(generator: Any, part: int) -> _Source:
    if isinstance(generator, torch.Generator):
        return _torch(generator)
    if isinstance(generator, random.Random):
        return _python(generator)
    if hasattr(generator, "get_states"):
        tracker = _Tracker(generator, part)
        return _Source(tracker.state, tracker.restore, tracker.seed)
    return _numpy(generator) if hasattr(generator, "bit_generator") else _legacy_numpy(lambda: generator)
