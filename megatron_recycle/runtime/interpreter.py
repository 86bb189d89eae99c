"""Runs a worker's listed actions, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Action

PHASES = {"F": "forward", "B": "backward", "W": "weight", "FB": "backward", "S": "reduce"}
"""What the observer is told when an action of a kind begins. A full backward is a backward, and has no weight phase."""


class Observer(Protocol):
    """Told of every phase as it begins (``reduced`` and ``stepped``: as it is done).

    Phases: forward, backward, weight, reduce, reduced (the complete gradient is held), step (the commit is
    known, the optimizer has not run), stepped, evaluate (a forward of an evaluation), boundary (it stands between two
    iterations and waits for those who come in or leave), recovering, joining. Those of actions, and evaluate, come
    with the action.
    """

    def on(self, phase: str, iteration: int, action: Action | None) -> None: ...


def execute(actions: Sequence[Action], handlers: Mapping[str, Callable[[Action], None]], *, iteration: int,
            observe: Callable[[str, int, Action | None], None], interrupted: Callable[[], bool]) -> None:
    """Run ``actions`` through ``handlers`` (by kind: "F", "B", "W", "FB", "S").

    Raises GenerationOver before the next action once ``interrupted()`` is true, and whatever a handler raises.
    """
    for action in actions:
        if interrupted():
            raise GenerationOver(f"the generation ended before {action} of iteration {iteration}")
        observe(PHASES[action.kind], iteration, action)
        handlers[action.kind](action)
