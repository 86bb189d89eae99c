"""The folder in a run's folder that keeps every plan in use, named by its digest."""

from __future__ import annotations

import logging
from pathlib import Path

from megatron_recycle.plan import Plan, PlanError
from megatron_recycle.plan.plan_file import PlanFile

log = logging.getLogger(__name__)


class PlanFolder:
    """Plan files by digest ("sha256:...", as in events). Training needs a plan but not its file: read and write errors
    are only logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, plan: Plan) -> None:
        """Write the plan's file."""
        try:
            self._folder.mkdir(exist_ok=True)
            plan.save(self._file(plan.digest))
        except OSError as error:
            log.warning("recycle: a plan could not be kept in %s: %s", self._folder, error)

    def load(self, digest: str) -> PlanFile | None:
        """The plan with this `digest`, or None if it was not kept."""
        try:
            plan = Plan.load(self._file(digest))
            if plan.digest != digest:
                raise PlanError(f"{self._file(digest)} holds another plan, {plan.digest}: it was edited")
            return plan.to_file()
        except PlanError as error:
            log.warning("recycle: a plan that is in use cannot be read again: %s", error)
            return None

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest.rpartition(':')[2][:16]}.json"
