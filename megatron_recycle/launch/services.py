"""The process of the job that its first launcher looks after: the coordinator."""

from __future__ import annotations

from megatron_recycle.errors import RecycleError
from megatron_recycle.launch.coordinator_process import DEPOSED, Service
from megatron_recycle.launch.processes import Say
from megatron_recycle.launch.shutdown import Ending


class Services:
    """Starts it again when it has died; where that does not help any more, the job ends.

    Attributes:
        coordinator: its process; None: another launcher looks after it.
    """

    def __init__(self, coordinator: Service | None, ending: Ending, say: Say) -> None:
        self.coordinator = coordinator
        self._ending = ending
        self._say = say

    @property
    def at_home(self) -> bool:
        """Whether the one that leads is this host's."""
        return self.coordinator is not None and not self.coordinator.standby

    def coordinator_died(self) -> Service | None:
        """Training goes on meanwhile; the new one reads the journal and finds the workers where they are. Returns it;
        None: nobody needs it any more, or it cannot be started."""
        died = self.coordinator
        if died is None or self._ending.end is not None or (self._ending.interrupted and not self._ending.saves):
            return None
        self._say(_what_died(died))
        self.coordinator = None
        try:
            self.coordinator = died.restart()
        except RecycleError as error:
            self._ending.give_up(f"no coordinator any more: {error}")
        return self.coordinator

    def progress(self) -> None:
        """An iteration was committed: what has died before may die again."""
        if self.coordinator is not None:
            self.coordinator.deaths.progress()
            self.coordinator.begun = True

    def end(self) -> None:
        """The job is over."""
        if self.coordinator is not None:
            self.coordinator.end()


def _what_died(died: Service) -> str:
    """Which of them, and what becomes of it: one of several may have stood by."""
    if not died.standby:
        return f"the coordinator (pid {died.child.pid}) has died; starting it again"
    if died.child.status() == DEPOSED:
        return f"this host's coordinator (pid {died.child.pid}) leads no more; starting it again to stand by"
    return (f"this host's coordinator (pid {died.child.pid}) has died; starting it again to stand by (if it led, "
            "another host's does within seconds)")
