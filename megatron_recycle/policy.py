"""The policies: a failure's consequences, each policy one value with all that the plugin asks of it.

With `reroute` and `drop` every micro-batch is run by the remaining workers, as guests of peers or dealt to whole
pipelines. `rollback` and `lossy_forward` leave the micro-batches of hit pipelines out until their workers are replaced:
each of the others runs its own, and the mean is over the micro-batches that were summed. `lossy_forward` goes on with
the iteration in flight where it stood, `rollback` makes it again. With `restart` a failure ends this life of the job. A
pipeline is *hit* if it has lost a worker, or a part of one, and *whole* if not.

A new policy is a name and an entry here, and its row in docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

PolicyName = Literal["reroute", "drop", "rollback", "lossy_forward", "restart"]
InFlight = Literal["planned", "whole", "again"]


@dataclass(frozen=True)
class Policy:
    """Consequences of a failure.

    Attributes:
        name: in settings.
        summary: for the settings' help.
        in_flight: the part of the iteration in flight that goes on where it stood; planned: all work of survivors, and
            the rest is planned; whole: the whole pipelines; again: nothing, it is made again.
        avoids_hit: whether hit pipelines are not used, as long as some pipeline is whole.
        leaves_out: whether their micro-batches are not run, and not by the whole ones either.
        always_whole: whether each micro-batch is run by the workers of one pipeline without failures too, so that whole
            pipelines can go on.
        ends_job: whether a failure ends this life of the job.
        not_exact: why gradients cannot have the same bits as without failures, and the remedy; empty: they can.
        gives_up: a warning for the start of the job; empty: none.
    """

    name: PolicyName
    summary: str
    in_flight: InFlight = "again"
    avoids_hit: bool = False
    leaves_out: bool = False
    always_whole: bool = False
    ends_job: bool = False
    not_exact: str = ""
    gives_up: str = ""

    @property
    def reroutes(self) -> bool:
        """Whether peers run the micro-batches of a dead worker, and go on with the iteration in flight."""
        return self.in_flight == "planned"


_LEFT_OUT = ("after a failure the samples of the hit pipelines are not trained until a replacement comes, and the "
             "result is not that of a run without failures; reroute loses none")
_NOT_ALL = ("leaves micro-batches of hit pipelines out, and reduction exact promises the bits of a run without "
            "failures; use reduction fast, or policy reroute")

POLICIES: Mapping[str, Policy] = MappingProxyType({each.name: each for each in (
    Policy("reroute", "peers take over the micro-batches", in_flight="planned"),
    Policy("drop", "the hit pipeline is left out and its micro-batches are dealt to the others",
           avoids_hit=True, always_whole=True,
           not_exact="deals single micro-batches out, which reduction exact cannot fold in a fixed order; use "
                     "reduction fast, or policy reroute",
           gives_up="after a failure whole pipelines train the micro-batches of the hit ones too; results agree to "
                    "rounding"),
    Policy("rollback", "both are left out until a replacement comes, and the iteration in flight is made again without "
                       "them",
           avoids_hit=True, leaves_out=True, not_exact=_NOT_ALL, gives_up=_LEFT_OUT),
    Policy("lossy_forward", "the same, but the others go on with that iteration where they stand",
           in_flight="whole", avoids_hit=True, leaves_out=True, always_whole=True, not_exact=_NOT_ALL,
           gives_up=_LEFT_OUT),
    Policy("restart", "all end, and `recycle run --job-restarts N` starts the script again from its last checkpoint",
           ends_job=True, gives_up="a failure costs all iterations since the script's last checkpoint"),
)})
"""Policies by name."""

DEFAULT = POLICIES["reroute"]
