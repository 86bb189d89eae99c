"""What `emulated.py` measures: grids, rows, and what each row is to reach."""

from __future__ import annotations

from dataclasses import dataclass

F, B, W = 20, 22, 18
"""Costs of a stage's forward, input gradient and weight gradient, in units."""
LAYERS = {1: 4, 2: 8}
"""Of a stage, by its chunks: what the planner divides a unit by. A chunk has as many as a whole stage then, to lend."""
ACTIVE = 1e-9
"""A limit on the gradient norm that is always exceeded."""
BACKENDS = {"deepspeed": "emulated_stage.py", "megatron": "emulated_megatron.py"}
"""Backend -> the training script that runs on it, beside this file."""


@dataclass(frozen=True)
class Row:
    """One job. ``settings`` are the plugin's; None: the stock engine, under torchrun. ``gone``: whom SIGKILL takes
    (`Shape.victims`). ``moved``: its layers are where a published-style repartition moves them for good, from the
    beginning on."""

    name: str
    settings: dict[str, str] | None
    gone: str = ""
    clipping: float = 0.0
    moved: bool = False

    @property
    def chunks(self) -> int:
        """Of each stage; two are V-shaped."""
        return int((self.settings or {}).get("chunks", "1"))

    @property
    def layers(self) -> int:
        """Of each stage."""
        return LAYERS[self.chunks]


LEND, V = {"lend": "auto"}, {"chunks": "2"}
ROWS = (
    Row("stock 1F1B", None),
    Row("ours", {}),
    Row("re-routing, one gone", {}, "one"),
    Row("layers moved, one gone", {}, "one", moved=True),
    Row("lent layers, one gone", LEND, "one"),
    Row("re-routing, two gone", {}, "two"),
    Row("layers moved, two gone", {}, "two", moved=True),
    Row("lent layers, two gone", LEND, "two"),
    Row("re-routing, two of a stage gone", {}, "same"),
    Row("layers moved, two of a stage gone", {}, "same", moved=True),
    Row("lent layers, two of a stage gone", LEND, "same"),
    Row("re-routing, a host gone", {}, "host"),
    Row("lent layers, a host gone", LEND, "host"),
    Row("ours, V", V),
    Row("V, re-routing, one gone", V, "one"),
    Row("V, lent layers, one gone", {**V, **LEND}, "one"),
    Row("V, re-routing, two gone", V, "two"),
    Row("V, lent layers, two gone", {**V, **LEND}, "two"),
    Row("V, lent layers, two of a stage gone", {**V, **LEND}, "same"),
    Row("V, lent layers, a host gone", {**V, **LEND}, "host"),
    Row("ours, exact, one gone", {"reduction": "exact"}, "one"),
    Row("lent layers, exact, one gone", {**LEND, "reduction": "exact"}, "one"),
    Row("V, lent layers, exact, one gone", {**V, **LEND, "reduction": "exact"}, "one"),
    Row("adaptive, one gone", {"step": "barrier", "split_backward": "false"}, "one"),
    Row("decoupled, one gone", {"step": "barrier"}, "one"),
    Row("drop the pipeline, one gone", {"policy": "drop"}, "one"),
    Row("stock, clipping active", None, clipping=ACTIVE),
    Row("ours, clipping active", {}, clipping=ACTIVE),
)
MOVED = {
    ("3x4x6", "one"): (3, 5, 3, 5), ("3x4x6", "two"): (5, 5, 3, 3), ("3x4x6", "same"): (5, 5, 1, 5),
    ("4x4x8", "one"): (4, 5, 3, 4), ("4x4x8", "two"): (5, 5, 3, 3), ("4x4x8", "same"): (4, 5, 2, 5),
}
"""Layers of each stage in the best plan that `scripts/bench/lending.py` finds when they move for good."""

AIMS = {
    ("3x4x6", "lent layers, one gone"): ("ours", 0.89), ("3x4x6", "lent layers, two gone"): ("ours", 0.80),
    ("4x4x8", "lent layers, one gone"): ("ours", 0.90), ("4x4x8", "lent layers, two gone"): ("ours", 0.83),
    ("4x4x8", "V, lent layers, one gone"): ("ours", 0.95), ("4x4x8", "V, lent layers, two gone"): ("ours", 0.88),
    ("3x4x6", "ours, V"): ("1F1B", 1.44), ("3x4x6", "V, lent layers, one gone"): ("1F1B", 1.28),
}
"""Grid and row -> the least throughput, and of what: our own without a failure as the same program measures it, or
what 1F1B has in theory."""
NEAR = 0.03
"""How far over its plan a row may be."""


@dataclass(frozen=True)
class Shape:
    """Pipelines, stages, micro-batches of each pipeline."""

    pipelines: int
    stages: int
    microbatches: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        pipelines, stages, microbatches = map(int, text.split("x"))
        return cls(pipelines, stages, microbatches)

    def __str__(self) -> str:
        return f"{self.pipelines}x{self.stages}x{self.microbatches}"

    def victims(self, gone: str) -> list[str]:
        """Workers that are gone: one, two of different stages, two of the same, or a pipeline, which is on a host."""
        half, last = self.stages // 2, self.stages - 1 if self.stages > 2 else 0
        return {"": [], "one": [f"1:{half}"], "two": [f"1:{half}", f"0:{last}"], "same": [f"1:{half}", f"0:{half}"],
                "host": [f"1:{stage}" for stage in range(self.stages)]}[gone]

    def sizes(self, row: Row) -> tuple[int, ...]:
        """Layers of each stage."""
        return MOVED[str(self), row.gone] if row.moved else (row.layers,) * self.stages

    def has(self, row: Row) -> bool:
        """Whether the job can run: each stage keeps a worker, and it is known where layers move."""
        return (row.gone != "same" or self.pipelines > 2) and (not row.moved or (str(self), row.gone) in MOVED)

    @property
    def theory(self) -> int:
        """Units of a 1F1B iteration."""
        return (self.microbatches + self.stages - 1) * (F + B + W)

    @property
    def cap(self) -> int:
        return int(1.5 * self.stages)
