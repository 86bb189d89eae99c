"""Changes of the script between two iterations, while the last step may still be undone.

With staggered steps the verdict on a step arrives after training has returned to the script, and until then a failure
may undo the step too. Undo restores all that the step had changed: a learning rate that the script has set meanwhile,
or parameters that it has written to, would be lost. So the state on return is compared with the state when training
goes on. If they differ, the script's changes are set aside until the step is final, and made again on the final state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.stage import Stage

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 32  # words of 64 bits whose sum may overflow
_LONG = 2**18  # bytes from which on a parameter is added up in place
_BESIDE = 2**22  # bytes of the copies of smaller parameters, at most
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_NAMED = 3  # tensors that a message lists
_MAY_CHANGE = (
    "after iteration {}, whose step could still be undone: with staggered steps a stage steps before it knows whether "
    "gradients are clipped. Call engine.settle() before the change (parameters(), modules() and state_dict() of "
    'engine.module do), or set "step": "barrier"')

_Versions = Mapping[str, tuple[int, int, tuple[int, ...]]]


@dataclass(frozen=True)
class _Left:
    """The state that training left behind."""

    references: Mapping[str, Any]
    counters: Any
    tensors: _Versions
    shards: _Versions
    sums: _Sums
    open: bool
    """Whether the last step could still be undone."""


class Edits:
    """The script's changes to one stage since training last returned to it.

    Args:
        stage: the framework's side.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._left: _Left | None = None
        self._words = _Words({})

    def leave(self, open_: bool, watched: bool = False) -> None:
        """Training returns to the script. ``open_``: its last step may still be undone; ``watched``: look for the
        script's changes even if not."""
        self._left = None
        if open_ or watched:
            tensors = self._stage.state()
            self._left = _Left(self._stage.references, self._stage.counters(), _versions(tensors),
                               _of_shards(self._stage), self._summed(tensors), open_)

    def forget(self) -> None:
        """The state on return does not count any more."""
        self._left = None

    def found(self, final: bool = False) -> bool:
        """Whether the script has changed anything that a step changes, or depends on.

        ``final``: that step will not be undone, so that changes stand as they are. Then only changes are reported that
        would otherwise be refused: refusals must not depend on timing.
        """
        left = self._left
        if left is None:
            return False
        if final:
            return left.open and bool(self._written_shards(left) or (
                self._stage.may_guess_wrong and self._written(left)))
        return not self._alike_beside_tensors(left) or bool(self._written(left) or self._written_shards(left))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the block the job evaluates. Its leftovers, such as inputs that a module keeps, are no changes of the
        script's; they become the base of comparison if the script had changed nothing of the kind before."""
        clean = self._left is not None and self._alike_beside_tensors(self._left)
        yield
        if clean and self._left is not None:
            self._left = replace(self._left, references=self._stage.references, counters=self._stage.counters())

    def named(self) -> list[str]:
        """Names of the tensors that the script has changed."""
        return [] if self._left is None else self._written(self._left)

    @contextmanager
    def apart(self, iteration: int, remake: Callable[[], None]) -> Iterator[None]:
        """Inside the block, which makes the step of ``iteration`` final, everything is as training left it; afterwards
        the script's changes are made again on the final state.

        Args:
            remake: makes that step again, from the state before it.

        Raises:
            UnsupportedError: tensors were changed that were not final, and may not have been right.
        """
        found = self.found()
        left, self._left = self._left, None
        if left is None or not found:
            yield
            return
        references, counters = self._stage.references, self._stage.counters()
        written = self._written(left)
        state = self._stage.state()
        of_shards = self._written_shards(left)
        if of_shards or (written and (self._stage.may_guess_wrong or set(left.tensors) != set(state))):
            changed = [*of_shards, *written]
            named = ", ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if changed[_NAMED:] else "")
            raise UnsupportedError(f"the script changed {named} {_MAY_CHANGE.format(iteration)}")
        kept = {name: state[name].clone() for name in written}
        self._stage.refer(left.references)
        self._stage.set_counters(left.counters)
        if written:
            remake()
        yield
        now = self._stage.counters()
        self._stage.refer(references)
        self._stage.set_counters(merged(left.counters, counters, now))
        with torch.no_grad():
            state = self._stage.state()
            for name, tensor in kept.items():
                state[name].copy_(tensor)

    def refuse_loss(self, iteration: int) -> None:
        """Raises UnsupportedError if parameters that the script has taken out of the model may have had wrong values:
        results computed from them would be wrong too."""
        if self._left is not None and self._left.open and self._stage.may_guess_wrong:
            raise UnsupportedError(f"the script took parameters out of the model {_MAY_CHANGE.format(iteration)}")

    def _alike_beside_tensors(self, left: _Left) -> bool:
        """Whether references and counters are unchanged."""
        return (same(left.references, self._stage.references)
                and same(_of_now(left.counters), _of_now(self._stage.counters())))

    def _written(self, left: _Left) -> list[str]:
        """Names of the tensors that the script has written to, or replaced."""
        tensors = self._stage.state()
        versions = _versions(tensors)
        changed = {name for name in {**left.tensors, **versions} if left.tensors.get(name) != versions.get(name)}
        return sorted(changed | self._summed(tensors).others(left.sums))

    def _written_shards(self, left: _Left) -> list[str]:
        """Likewise for this worker's shards of its optimizer's state. Such changes cannot be made again: a failure may
        move the shards meanwhile."""
        now = _of_shards(self._stage)
        return sorted(name for name in left.shards.keys() & now.keys() if left.shards[name] != now[name])

    def _summed(self, tensors: Mapping[str, torch.Tensor]) -> _Sums:
        parameters = {name: tensor for name, tensor in tensors.items() if name.startswith("parameter ")}
        if not self._words.are_of(parameters):
            self._words = _Words(parameters)
        return self._words.sums()


def _of_now(counters: Mapping[str, Any]) -> dict[str, Any]:
    """``counters`` without entries for the next iteration, which a framework's loop sets before it begins."""
    return {name: value for name, value in counters.items() if name != "next"}


def _versions(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    return {name: (tensor.data_ptr(), tensor._version, tensor.stride()) for name, tensor in tensors.items()}


def _of_shards(stage: Stage) -> _Versions:
    shards = stage.shards
    return {} if shards is None else _versions({
        f"{name} of shard {shard}": tensor for shard in shards.held for name, tensor in shards.tensors(shard).items()})


@dataclass(frozen=True)
class _Sums:
    """Checksums of the parameters' bits, as whole numbers, each with the name of its parameter, which may have several.
    They stay on the parameters' device, so that training does not wait for them before it returns to the script."""

    names: tuple[str, ...]
    numbers: torch.Tensor

    def others(self, before: _Sums) -> set[str]:
        """The names that had another sum before."""
        if self.names == before.names:
            if torch.equal(self.numbers, before.numbers):
                return set()
            return {name for name, one, other in zip(self.names, self.numbers.tolist(), before.numbers.tolist())
                    if one != other}
        known, now = before._by_name(), self._by_name()
        return {name for name, numbers in now.items() if known.get(name, numbers) != numbers}

    def _by_name(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, number in zip(self.names, self.numbers.tolist()):
            found.setdefault(name, []).append(number)
        return found


class _Words:
    """The memory of ``parameters`` as whole numbers: writes by way of `.data` leave no version.

    A processor adds up 64 bits at a time five times as fast as shorter numbers, which torch widens first. But doubling
    all numbers adds a power of two to each word, and 4096 of these overflow to zero: hence short rows. Small parameters
    are first copied side by side, each from the beginning of a row: two torch calls for all of them, instead of two for
    each.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._places = _places(parameters)
        views = {name: _words(tensor) for name, tensor in parameters.items()}
        rows = {name: -(-view.nbytes // (8 * _ROW)) for name, view in views.items()}
        small = _first_of({name: view for name, view in views.items() if view.nbytes < _LONG})
        large = [name for name in parameters if name not in small]
        device = next((view.device for view in views.values()), None)
        self._beside = torch.zeros(sum(rows[name] for name in small), _ROW, dtype=torch.int64, device=device)
        self._small, self._slots, start = list(small.values()), [], 0
        for name, view in small.items():
            flat = self._beside.view(torch.int8).view(-1)[start:start + view.nbytes]
            self._slots.append(flat.view(view.dtype).view(view.shape))
            start += 8 * _ROW * rows[name]
        self._large = [_in_rows(views[name]) for name in large]
        self._names = *(name for name in small for _ in range(rows[name])), *large

    def are_of(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether they still lie there."""
        return self._places == _places(parameters)

    def sums(self) -> _Sums:
        # Both halves of a row's 64-bit sum count.
        large = [words.sum(1).view(torch.int32).sum() if in_rows else words.sum() for words, in_rows in self._large]
        if self._small:
            torch._foreach_copy_(self._slots, self._small)
        small = self._beside.sum(1)
        return _Sums(self._names, torch.cat([small, torch.stack(large)]) if large else small)


def _places(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    return [(name, tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in tensors.items()]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as whole numbers of the same size."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])


def _first_of(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The views that are copied side by side: as many as there is room for, on one device."""
    found: dict[str, torch.Tensor] = {}
    room = _BESIDE
    for name, view in views.items():
        room -= view.nbytes
        if room >= 0 and (not found or view.device == next(iter(found.values())).device):
            found[name] = view
    return found


def _in_rows(words: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``words``, if possible in rows of 64-bit words, and whether they are."""
    if words.is_contiguous():
        flat = words.view(-1)
        if flat.nbytes % (8 * _ROW) == 0 and flat.storage_offset() * flat.element_size() % 8 == 0 and flat.nbytes:
            return flat.view(torch.int64).view(-1, _ROW), True
        if flat.element_size() == 8:
            flat = flat.view(torch.int32)
        return flat, False
    return words, False


def same(one: Any, other: Any) -> bool:
    """Whether two trees of dicts, lists, tuples, numbers and tensors are alike; other objects: by ``==``."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other) or bool(one != one and other != other)
    except (ValueError, TypeError, RuntimeError):  # of arrays, say
        return False


def copied(tree: Any) -> Any:
    """`copy.deepcopy`, but fast for trees of dicts, lists, tuples and numbers."""
    return _copied(tree, {})


def _copied(tree: Any, known: dict[int, Any]) -> Any:
    """``known``: copies by the originals' `id`, as in `copy.deepcopy`, so that shared objects stay shared."""
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple:
        return tuple([_copied(item, known) for item in tree])
    if id(tree) in known:
        return known[id(tree)]
    if kind is dict:
        result: Any = known.setdefault(id(tree), {})
        for key, value in tree.items():
            result[key] = value if type(value) in _ATOMS else _copied(value, known)
        return result
    if kind is list:
        result = known.setdefault(id(tree), [])
        result += [item if type(item) in _ATOMS else _copied(item, known) for item in tree]
        return result
    return copy.deepcopy(tree, known)


def merged(before: Any, edited: Any, now: Any) -> Any:
    """``now`` with the changes from ``before`` to ``edited``; all are trees as for `same`."""
    if same(before, edited):
        return now
    if isinstance(edited, Mapping) and isinstance(before, Mapping) and isinstance(now, Mapping):
        result: Any = copy.copy(edited)
        result.update({key: merged(before[key], value, now[key]) for key, value in edited.items()
                       if key in before and key in now})
        return result
    if isinstance(edited, (list, tuple)) and isinstance(before, Sequence) and isinstance(now, Sequence):
        shared = min(len(before), len(edited), len(now))
        return type(edited)([merged(*items) for items in zip(before[:shared], edited, now)] + list(edited[shared:]))
    return edited
