"""What a worker holds of a job that has lost another stage for good, in a file that stands for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_recycle.errors import RecycleError, SaveError
from megatron_recycle.observe.disk import unwritten
from megatron_recycle.runtime.copies import StateCopy
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import stage_tensors
from megatron_recycle.runtime.stepper import Stepper


def save_what_is_held(site: Site, stepper: Stepper, missing: Sequence[int]) -> str:
    """Write this stage's tensors, by name, and all that is no tensor, as text, into a file that `torch.load` reads with
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
