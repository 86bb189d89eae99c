"""A worker's actions, one after the other, for as long as its generation lasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_recycle.errors import GenerationOver
from megatron_recycle.membership import Standing
from megatron_recycle.plan import Action
from megatron_recycle.runtime.site import Site

Handler = Callable[[Action], None]


def execute(site: Site, standing: Standing, actions: Sequence[Action], handlers: Mapping[str, Handler],
            enter: Handler, of: str) -> None:
    """Run ``actions`` through ``handlers``, by kind; ``enter`` is called before each.

    Raises GenerationOver before the next action once a newer generation is announced, and the handlers' errors.
    """
    for action in actions:
        if site.interrupted(standing):
            raise GenerationOver(f"the generation ended before {action} of {of}")
        enter(action)
        handlers[action.kind](action)
