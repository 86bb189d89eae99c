"""The order of ranks, decided while a framework lays out its grid: see `membership.placement`."""

from __future__ import annotations

from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.environment import Launched
from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.placement import placement
from megatron_recycle.observe.log import get_logger


def spreads(options: Options, settings: RecycleConfig, stages: int, parts: int, size: int) -> bool:
    """Whether ranks are to be counted through a pipeline first; all processes get the same answer.

    A process that joins, perhaps on a host with another number of workers, counts as the job did at its start.
    """
    launched = Launched.read()

    def find() -> bool:
        if launched.local_size is None or launched.local_size >= size:  # unknown, or it makes no difference
            return False
        try:
            grid = placement(stages, parts, size, launched.local_size)
        except ConfigError:
            return False  # the framework's own message on its numbers is better
        spread = grid.spreads(settings.placement)
        if spread and launched.rank == 0:
            get_logger().info(
                "megatron-recycle: ranks are counted through a pipeline first: a host that is lost takes %d of %d "
                "copies of a stage along, and would take %d (placement framework leaves the order as it is)",
                grid.most(True), grid.pipelines, grid.most(False))
        return spread

    return bool(find() if options.setup is None else options.setup.note("the order of ranks", find))
