"""Checkpoint interval for jobs that are restarted from the last checkpoint."""

from __future__ import annotations

import math


def young_daly(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two checkpoints that lose least time, by Young's formula in Daly's higher order.

    Args:
        save_seconds: cost of one checkpoint.
        mtbf_seconds: the mean time between two failures of the whole job.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006. Raises
    ValueError for times that are not above 0.
    """
    if not (0 < save_seconds < math.inf and 0 < mtbf_seconds < math.inf):
        raise ValueError(f"a checkpoint of {save_seconds} s and a failure every {mtbf_seconds} s: give seconds above 0")
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9) - save_seconds
