"""What this worker has done of the iteration in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_recycle.plan import Action


@dataclass
class Ledger:
    """Where the worker stands; written by the training thread only.

    ``holds`` is the last iteration whose complete reduced gradient this worker has (stepped or not), ``stepped`` the
    last one that it stepped, ``committed`` the last one that it stepped for good; -1 for none. ``earlier`` counts
    the actions of the iteration before, as long as that is not committed.
    """

    iteration: int = 0
    attempt: int = 1
    holds: int = -1
    stepped: int = -1
    committed: int = -1
    earlier: int = 0
    done: list[Action] = field(default_factory=list)

    def stand_at(self, iteration: int) -> None:
        """Training begins with ``iteration``; everything before it is committed."""
        self.iteration, self.attempt = iteration, 0
        self.holds = self.stepped = self.committed = iteration - 1
        self.earlier = 0
        self.done.clear()

    def begin(self, iteration: int, attempt: int) -> None:
        self.earlier = len(self.done) if iteration == self.iteration + 1 and self.committed < self.iteration else 0
        self.iteration, self.attempt = iteration, attempt
        self.done.clear()

    def check_complete(self, planned: Sequence[Action]) -> None:
        """Every planned action was done once, in order, before the reduction (promise P1)."""
        if self.done != [action for action in planned if action.kind != "S"]:
            raise AssertionError(f"iteration {self.iteration}: did {self.done}, the plan says {list(planned)}")
