"""Lives of a job, as one host takes part in them: the script is started again where a grid cannot go on
(`--job-restarts`), with the variables that it would find after a restart of torchrun."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_recycle.membership.next_life import JobLife, Shape
from megatron_recycle.membership.protocol import End


@dataclass(frozen=True)
class Life:
    """One life of the job. `number` counts the restarts before it, at most `most`.

    `node` of `nodes` is this host (a spare has a number beyond them), `ranks` are those of this host, and `size` is the
    number of all. `shape` is common to this life and the previous one; `reason` is how the previous one ended.
    """

    size: int
    ranks: range
    node: int = 0
    nodes: int = 1
    number: int = 0
    most: int = 0
    shape: Shape | None = None
    reason: str = ""

    def after(self, end: End | None, host: str) -> Life | None:
        """The next life, if the coordinator's last word, ``end``, says that there is one with the host of this name."""
        if end is None or end.next_life is None:
            return None
        next_life = end.next_life
        share = next_life.shares.get(host)
        if share is None:
            return None
        return Life(next_life.size, range(share.first, share.first + share.count), share.node, next_life.nodes,
                    self.number + 1, self.most, next_life.shape, end.message)

    def told(self) -> JobLife:
        """This life in the coordinator's form."""
        return JobLife(self.number < self.most, self.number, self.most, self.reason, self.shape)

    def variables(self) -> dict[str, str]:
        """Variables of this life, as torchrun sets them."""
        return {"TORCHELASTIC_RESTART_COUNT": str(self.number), "TORCHELASTIC_MAX_RESTARTS": str(self.most)}

    def __str__(self) -> str:
        grid = ""
        if self.shape is not None:
            pipelines = self.size // self.shape.unit
            each = self.shape.microbatches // pipelines
            grid = f" ({pipelines} pipeline{'s' * (pipelines > 1)}, {each} micro-batches of each)"
        return f"restart {self.number} of {self.most}: the script starts again with {self.size} workers{grid}"
