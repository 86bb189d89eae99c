"""A worker's description of its job to the coordinator, which all must have alike."""

from __future__ import annotations

from typing import Any

import torch

from megatron_recycle.plan import Costs
from megatron_recycle.policy import POLICIES
from megatron_recycle.runtime.chunked import lendings_of
from megatron_recycle.runtime.comm.backend import BACKENDS
from megatron_recycle.runtime.lent.layers import offer
from megatron_recycle.runtime.site import Site


def _lendable(site: Site) -> list[dict[str, Any] | None] | None:
    """Of each of the stage's chunks, the layers that their neighbours may run; None: there are none."""
    if site.config.lend == "off" or not POLICIES[site.config.policy].reroutes:
        return None
    found = [None if lending is None else offer(lending, site.config.lend_layers)
             for lending in lendings_of(site.stage, site.place).values()]
    return found if any(found) else None


def description(site: Site) -> dict[str, Any]:
    """Facts about the job that must be the same on all workers."""
    place, stage, config = site.place, site.stage, site.config
    grid = place.grid
    return {**stage.settings,
            "grid": {"stages": grid.stages, "microbatches": list(grid.microbatches)}, "parts": place.parts,
            "placement": list(place.placement),
            "block": config.block_size(grid.pipelines, max(grid.microbatches)), "cap": config.cap,
            "tied": [list(stages) for stages in stage.tied_stages], "model": stage.model,
            "ties": [[tie.number, list(tie.stages)] for tie in stage.ties],
            "costs": Costs.parse(config.costs, len(place.placement) or grid.stages).to_json() if config.costs else None,
            "split_backward": config.split_backward, "full_backward": site.may_be_full, "step": config.step,
            "policy": config.policy, "clip_norm": config.clip_norm, "check_forward": config.check_forward,
            # Where all are at the end of an iteration before any begins the next one, that end counts.
            "objective": "period" if config.step == "staggered" and site.closes else "makespan",
            "reduction": config.reduction, "keep_messages": config.keep_messages,
            "planner_budget": config.planner_budget, "slow_factor_out": config.slow_factor_out,
            "heartbeat_interval": config.heartbeat_interval, "heartbeat_timeout": config.heartbeat_timeout,
            "report_timeout": config.report_timeout,
            "lend": config.lend, "lend_layers": config.lend_layers, "lendable": _lendable(site),
            "seed": config.seed, "max_restarts": config.max_restarts,
            "max_failures_per_host": config.max_failures_per_host, "moves": config.moves,
            "move_cost": config.move_cost, "horizon": config.horizon,
            "partner_cost": BACKENDS[place.backend].partner_cost,
            "on_leave": config.on_leave, "leave_timeout": config.leave_timeout,
            "emergency": None if site.framework.save_last is None else config.emergency_checkpoint != "none",
            # Of shards nobody has all, and others' parameters may not have come.
            "survivors": site.framework.folder is not None and config.emergency_checkpoint != "none" and (
                stage.shards is None),
            "poison": config.poison, "guard": config.guard,
            "state_copies": None if stage.shards is None else config.state_copies, "backend": place.backend,
            "torch": torch.__version__}
