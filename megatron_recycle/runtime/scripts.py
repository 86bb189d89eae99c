"""Where the scripts of a stage's workers stand when a recovery meets them.

A worker that has asked for the next iteration has made all of its script's changes before it. One that is met in
another call (a collective, an evaluation, a checkpoint) may still make some that its peers have made already. What
differs between peers then is no fault, and what is copied from one to another would be changed twice there, or never:
both have to wait until all have asked.
"""

from __future__ import annotations

import torch

from megatron_recycle.membership import Standing
from megatron_recycle.runtime.comm.handles import Groups


def some_are_between(groups: Groups, standing: Standing, comes_in: bool = False) -> bool:
    """Whether the script of some peer may still change something before the next iteration; all peers take part.
    ``comes_in``: not that of this worker, which gets everything in any case. Raises GenerationOver."""
    between = torch.tensor(float(not comes_in and standing.asked <= standing.stepped))
    groups.stage_control.sum(between).wait()
    return bool(between)
