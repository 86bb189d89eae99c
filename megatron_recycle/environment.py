"""Environment of a worker: variables that its launcher sets, written and read side by side.

torch's own names are torchrun's, and every launcher sets them. Names that begin with RECYCLE_ come from `recycle run`
alone. Settings are not among them: see `config`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

COORDINATOR = "RECYCLE_COORDINATOR"
TOKEN = "RECYCLE_TOKEN"
SHORTEST_TOKEN = 16
"""Characters. Every connection begins with a greeting, and an eavesdropper can try tokens on it offline."""
RUN_DIR = "RECYCLE_RUN_DIR"
"""The run's folder; a user may set it too, since it is also the variable of the setting `run_dir`."""
HOST = "RECYCLE_HOST"
MEMORY = "RECYCLE_HOST_MEMORY"
JOINING = "RECYCLE_JOIN"
CHAOS = "RECYCLE_CHAOS"
MICROBATCHES = "RECYCLE_MICROBATCHES"

COORDINATORS_MODULE = "megatron_recycle.control.process"
"""Module that a coordinator's command line runs; its starters and its finders use the same name."""

HANDED_OVER = frozenset({COORDINATOR, TOKEN, HOST, MEMORY, JOINING, CHAOS, MICROBATCHES})
"""Variables that only `recycle run` sets; none of them is a setting."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A worker's start, as its launcher describes it. A foreign launcher leaves the first eight at their defaults.

    Attributes:
        control: "host:port" of the coordinator; None under torchrun and the like, which start none.
        token: the job's token.
        run_dir: the run's folder.
        host: the name by which the coordinator tells hosts apart.
        memory: the address of the memory shared by a host's workers; see `control.host_memory`.
        joining: whether this process joins a job that runs already.
        chaos: whether `recycle chaos` may hold this process at precise moments.
        microbatches: those of an iteration over all pipelines, if the job was started again and has to keep them.
        rank, size, local_rank, local_size: torch's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
        store: host and port of torch's store; None for a job whose processes met in another way.
    """

    control: str | None = None
    token: str = field(default="", repr=False)
    run_dir: str | None = None
    host: str | None = None
    memory: str | None = None
    joining: bool = False
    chaos: bool = False
    microbatches: int | None = None
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    store: tuple[str, int] | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Launched:
        """The start of this process, or of one with the variables `environ`."""
        environ = os.environ if environ is None else environ
        port = _number(environ, "MASTER_PORT")
        return cls(
            control=environ.get(COORDINATOR),
            token=environ.get(TOKEN, ""),
            run_dir=environ.get(RUN_DIR),
            host=environ.get(HOST),
            memory=environ.get(MEMORY),
            joining=environ.get(JOINING) == "1",
            chaos=bool(environ.get(CHAOS)),
            microbatches=_number(environ, MICROBATCHES),
            rank=_number(environ, "RANK"),
            size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK"),
            local_size=_number(environ, "LOCAL_WORLD_SIZE"),
            store=None if port is None or "MASTER_ADDR" not in environ else (environ["MASTER_ADDR"], port),
        )

    @property
    def by_recycle_run(self) -> bool:
        """Whether the launcher is `recycle run`: it spares siblings of a dead worker and starts processes again."""
        return self.control is not None

    def variables(self) -> dict[str, str]:
        """The variables of `recycle run` that `read` finds again. torch's are the launcher's to add."""
        given = {COORDINATOR: self.control, TOKEN: self.token, RUN_DIR: self.run_dir, HOST: self.host,
                 MEMORY: self.memory, JOINING: "1" if self.joining else None, CHAOS: "1" if self.chaos else None,
                 MICROBATCHES: None if self.microbatches is None else str(self.microbatches)}
        return {name: text for name, text in given.items() if text}


def not_handed_over(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables of a worker, for the workers of a job that a worker itself starts."""
    return {name: text for name, text in environ.items() if name not in HANDED_OVER}


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None
