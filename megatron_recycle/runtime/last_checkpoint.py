"""The end of a job that cannot go on: its workers save their state first.

All workers write a last checkpoint if every stage still has a worker. If a stage is lost for good, each survivor that
is to save writes its state into a file that stands for itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_recycle.control import Go
from megatron_recycle.errors import GenerationOver, RecycleError, SaveError
from megatron_recycle.observe.disk import unwritten
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.copies import StateCopy
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import stage_tensors
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.worker_extension import Meeting, WorkerExtension


class LastCheckpoint(WorkerExtension):
    """Saves all committed state of a job that ends. Both methods raise JobEnded, or GenerationOver if another member is
    lost before all have reported that they have saved."""

    def decided(self, site: Site, stepper: Stepper, go: Go) -> None:
        """A stage is lost for good: save this worker's state, if it is to, and wait for the end."""
        if not go.writers:
            return
        get_logger().error("megatron-recycle: the job ends, and the survivors save what they hold: %s", go.closing)
        stepper.standing.join(go.generation)
        place = error = ""
        if site.place.name in go.writers:
            with site.phases.copying():
                try:
                    stepper.reconcile_alone(stepper.standing.reconciliation(go.resume))
                    place = _save_what_is_held(site, stepper, go.missing)
                except Exception as failure:  # noqa: BLE001 - no error here may hide the reason for the job's end
                    error = _text(failure)
                    get_logger().error("megatron-recycle: what this worker holds is not saved", exc_info=failure)
        site.agent.saved(go.generation, place, error)
        raise GenerationOver("another member was lost before all had saved")

    def settle(self, meeting: Meeting) -> None:
        """Save the present state, the same on all peers, and wait for the end."""
        site, go = meeting.site, meeting.go
        if go.closing is None:
            return
        get_logger().error("megatron-recycle: the job ends after a last checkpoint: %s", go.closing)
        place = error = ""
        unsaved: SaveError | None = None
        with site.phases.copying():
            try:
                assert site.framework.save_last is not None, "this worker has said that it can save"
                place = site.framework.save_last()
            except GenerationOver:
                raise
            except Exception as failure:  # noqa: BLE001 - no error here may hide the reason for the job's end
                unsaved, error = failure if isinstance(failure, SaveError) else None, _text(failure)
                get_logger().error("megatron-recycle: no last checkpoint: %s", error,
                                   exc_info=None if isinstance(failure, RecycleError) else failure)
        try:
            site.agent.saved(go.generation, place, error)
        finally:
            if unsaved is not None:
                unsaved.clear()  # the others may have been writing until now
        raise GenerationOver("another member was lost before all had saved")


def _text(failure: Exception) -> str:
    return str(failure) if isinstance(failure, RecycleError) else f"{type(failure).__name__}: {failure}"


def _save_what_is_held(site: Site, stepper: Stepper, missing: Sequence[int]) -> str:
    """Write this stage's tensors, by name, and all other state, as text, into a file that `torch.load` reads with
    ``weights_only``: whole, or not at all. Returns its absolute path. Raises RecycleError if no folder is known, and
    SaveError."""
    folder = site.framework.folder() if site.framework.folder is not None else None
    if not folder:
        raise RecycleError("nothing says where to; give --recycle-emergency-checkpoint DIR")
    place, iteration = site.place, stepper.standing.committed
    copy = StateCopy.of(stage_tensors(site.stage), stepper.facts())
    held = {"iteration": iteration, "stage": place.me.stage, "part": place.part, "parts": place.parts,
            "stages": place.grid.stages, "missing": list(missing), "facts": copy.text, "tensors": dict(copy.tensors)}
    part = f"-part-{place.part}" if place.parts > 1 else ""
    path = Path(folder).absolute() / f"survivors-iteration-{iteration}" / f"stage-{place.me.stage}{part}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.{place.name.replace(':', '-')}.{os.getpid()}")
    try:
        with hidden.open("wb") as file:
            torch.save(held, file)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except (OSError, RuntimeError) as error:
        hidden.unlink(missing_ok=True)
        raise SaveError(unwritten(error, path) or str(error)) from error
    return str(path)
