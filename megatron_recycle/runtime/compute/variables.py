"""Variables of the script that its model, loss function and data are computed with.

A failure may undo an iteration after training has returned to the script, and the script may have set a variable for
the next one by then: a weight in the loss that is annealed, a dataset's stage of difficulty, a hook. The iteration is
run again with what it was run with before, so these variables are found, and their values kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_recycle.runtime.compute.find_variables import holders_in
from megatron_recycle.runtime.compute.holders import GONE, Contents, Holder, Kept, alike, all_alike


@dataclass(frozen=True)
class Change:
    """A variable that has become another: ``holder`` has ``before`` and then ``after`` under ``name``."""

    holder: Holder
    name: Any
    before: Any
    after: Any

    def undo(self) -> None:
        """Raises UnsupportedError for a tensor that is too large for its values to have been kept."""
        self.holder.write(self.name, self.before)

    def redo(self) -> None:
        self.holder.write(self.name, self.after)


class Variables:
    """Variables within reach of a model and of further functions and objects, and their values at this moment.

    It watches closures of functions, the globals and attributes that their code names, attributes, buffers and hooks of
    modules, and items of short lists and dicts. It leaves out objects of threads, and the insides of torch, DeepSpeed,
    numpy and Python.

    Args:
        model: the stage.
        others: a loss function, a dataset and the like.

    Attributes:
        whole: whether all of them have been looked at.
    """

    def __init__(self, model: nn.Module, others: Iterable[Any]) -> None:
        self._names: set[str] = set()
        self._always, self.whole = holders_in([model, *others], self._names)
        self._watched: Sequence[Holder] = ()
        self._lately: list[Holder] | None = None  # of which nothing is kept yet
        self._empty: list[Any] = []
        self._kept: list[Kept] = []
        self._watch(self._always)

    def keep(self) -> None:
        """From now on these values are the ones to compare with."""
        if self._lately is not None:
            self._watch([*self._always, *self._lately])
        elif any(self._empty):
            self._watch(self._watched)
        else:
            self._kept = [kept if kept.stands() else Kept.of(kept.holder) for kept in self._kept]

    def changes(self) -> list[Change]:
        """The changes since `keep`. Insides of new values are watched from the next `keep` on, until other values
        come."""
        found = []
        filled = [Kept(Contents(container), {"": ()}) for container in self._empty if container]
        for kept in (*self._kept, *filled):
            if kept.stands() or kept.holder.gone():
                continue
            holder, before, now = kept.holder, kept.values, kept.holder.read()
            if not all_alike(before, now):
                found += [Change(holder, name, before.get(name, GONE), now.get(name, GONE))
                          for name in {**before, **now} if not alike(before.get(name, GONE), now.get(name, GONE))]
        if found:
            self._lately, whole = holders_in([change.after for change in found], self._names)
            self.whole = self.whole and whole
        return found

    def _watch(self, holders: Sequence[Holder]) -> None:
        """Keep the values of ``holders``. Most are empty containers, of hooks that a module does not have, which one
        look tells of all."""
        self._watched, self._lately = holders, None
        self._empty = [holder.container for holder in holders if isinstance(holder, Contents) and not holder.container]
        self._kept = [Kept.of(holder) for holder in holders if not isinstance(holder, Contents) or holder.container]
