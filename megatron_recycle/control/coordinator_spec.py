"""Arguments of the coordinator's process, in JSON on its command line."""

from __future__ import annotations

from megatron_recycle.membership.next_life import JobLife
from megatron_recycle.plan.value import Value

DEPOSED = 75
"""Exit status of a coordinator that leads no more: its starter lets it stand by again."""


class CoordinatorSpec(Value, frozen=True):
    """A coordinator of a job of `size` workers, which listens on this `interface` only; `port` 0 is any.

    With `resume` it leads a job whose coordinator has died. `life`: the present life of the job. `node`: the number of
    its host among the job's. `embedded`: there is no launcher that reports exits. With a `store` (etcd://...) it stands
    by, and leads the `job` of that name there if none of the other `hosts` does; `begun`: decisions must be there.
    """

    size: int
    interface: str = "127.0.0.1"
    port: int = 0
    resume: bool = False
    life: JobLife = JobLife()
    node: str = "0"
    store: str = ""
    job: str = ""
    hosts: int = 1
    begun: bool = False
    embedded: bool = False
