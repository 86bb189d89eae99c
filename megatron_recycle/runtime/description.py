"""A worker's description of its job for the coordinator, the same on all workers."""

from __future__ import annotations

import torch

from megatron_recycle.membership.description import Description, Lendable
from megatron_recycle.plan import Costs
from megatron_recycle.policy import POLICIES
from megatron_recycle.runtime.comm.backend import BACKENDS
from megatron_recycle.runtime.lent.layers import offer
from megatron_recycle.runtime.replica_check import compares
from megatron_recycle.runtime.site import Site

_SETTINGS = frozenset({
    "cap", "split_backward", "step", "policy", "clip_norm", "check_forward", "reduction", "keep_messages",
    "planner_budget", "slow_factor_out", "heartbeat_interval", "heartbeat_timeout", "report_timeout", "lend",
    "lend_layers", "seed", "max_restarts", "max_failures_per_host", "moves", "move_cost", "horizon", "on_leave",
    "leave_timeout", "poison", "guard"})
"""Settings that are sent as they are."""


def _lendable(site: Site) -> tuple[Lendable | None, ...] | None:
    """The layers that neighbours may run, of each of the stage's chunks; None: there are none."""
    if site.config.lend == "off" or not POLICIES[site.config.policy].reroutes:
        return None
    found = tuple(None if each.lending is None else offer(each.lending, site.config.lend_layers)
                  for each in site.trainable.neighbours.of.values())
    return found if any(found) else None


def description(site: Site) -> Description:
    """Facts about the job that must be the same on all workers."""
    place, stage, config = site.place, site.stage, site.config
    grid, chunks = place.grid, len(place.placement) or place.grid.stages
    own = {name: getattr(config, name) for name in _SETTINGS}
    return Description(
        **own, grid=grid, parts=place.parts, placement=tuple(place.placement), settings=stage.settings,
        block=config.block_size(grid.pipelines, max(grid.microbatches)),
        tied=tuple(map(tuple, stage.tied_stages)), model=stage.model,
        ties=tuple((tie.number, tuple(tie.stages)) for tie in stage.ties),
        costs=Costs.parse(config.costs, chunks).to_json() if config.costs else None,
        full_backward=site.may_be_full, compared=compares(config),
        # Where all are at the end of an iteration before any begins the next one, that end counts.
        objective="period" if config.step == "staggered" and site.closes else "makespan",
        lendable=_lendable(site),
        partner_cost=BACKENDS[place.backend].partner_cost,
        emergency=None if site.framework.save_last is None else config.emergency_checkpoint != "none",
        # No worker has all shards, and others' parameters may not have come.
        survivors=site.framework.folder is not None and config.emergency_checkpoint != "none" and stage.shards is None,
        state_copies=None if stage.shards is None else config.state_copies, backend=place.backend,
        torch=torch.__version__)
