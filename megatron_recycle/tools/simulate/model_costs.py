"""Costs of a transformer's stages from a description of model and machine, by a stated formula.

Per layer and micro-batch of b sequences of s tokens, hidden size h (Narayanan et al., "Efficient large-scale language
model training on GPU clusters using Megatron-LM", 2021, section 5.1, without recomputation):

    forward           24 b s h^2 + 4 b s^2 h   FLOPs
    input gradient    the same (attention's two products twice: 24 b s h^2 + 8 b s^2 h)
    weight gradient   24 b s h^2

The last stage has the logits, 2 b s h V forward and as much for each gradient. A stage's FLOPs are divided over its
``tp`` GPUs, of which each reaches ``tflops``. Tensor parallelism adds two all-reduces per layer forward and two for
the input gradient: 2 (tp - 1) / tp times 2 b s h bytes each, at ``tp_gbps``. A hop is 2 b s h / tp bytes at
``net_gbps``. The step reduces gradients (4 bytes each, ring over the pipelines) at ``net_gbps`` and reads and writes
16 bytes per parameter at ``memory_gbps``. Bandwidths are in gigabytes a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_recycle.plan import Costs, PlanError

STATE_BYTES = 16
"""Parameter, master copy, two moments: bytes of state per parameter in mixed precision with Adam, gradient left out."""


@dataclass(frozen=True)
class Model:
    """Layers, hidden size, tokens of a sequence, sequences of a micro-batch, words."""

    layers: int
    hidden: int
    sequence: int = 2048
    batch: int = 1
    words: int = 51_200

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.sequence, self.batch, self.words) < 1:
            raise PlanError("model: layers, hidden size, sequence, batch and words must be at least 1")

    @property
    def parameters(self) -> int:
        """12 h^2 a layer, and the embedding."""
        return 12 * self.layers * self.hidden ** 2 + self.words * self.hidden


@dataclass(frozen=True)
class Machine:
    """Rates that a GPU and its links reach in practice."""

    tflops: float = 140.0
    tp_gbps: float = 200.0
    net_gbps: float = 20.0
    memory_gbps: float = 1500.0
    latency_us: float = 10.0

    def __post_init__(self) -> None:
        if min(self.tflops, self.tp_gbps, self.net_gbps, self.memory_gbps) <= 0 or self.latency_us < 0:
            raise PlanError("machine: speeds must be above 0")


MODELS = {
    "gpt3-medium": Model(24, 1024, 2048, 1),
    "gpt3-3.35b": Model(30, 3072, 2048, 1),
    "gpt3-6.7b": Model(32, 4096, 2048, 1),
    "gpt3-145b": Model(80, 12_288, 2048, 1),
    "gpt3-530b": Model(105, 20_480, 2048, 1),
}
"""Sizes of the GPT-3 and Megatron papers' models; 3.35 B is ReCycle's, by parameters."""


def costs(model: Model, machine: Machine, pipelines: int, stages: int, tp: int = 1) -> tuple[Costs, float]:
    """Costs in microseconds, and the seconds to copy a worker's state from a peer's GPUs.

    Layers are dealt evenly, the first stages have one more. Raises PlanError if a stage gets none.
    """
    if stages > model.layers:
        raise PlanError(f"model: {model.layers} layers cannot be dealt to {stages} stages")
    layers = [model.layers // stages + (stage < model.layers % stages) for stage in range(stages)]
    tokens, h = model.batch * model.sequence, model.hidden
    dense, attention = 24 * tokens * h ** 2, 4 * tokens * model.sequence * h
    logits = [0] * (stages - 1) + [2 * tokens * h * model.words]
    reduced = 2 * (tp - 1) / tp * 2 * tokens * h / (machine.tp_gbps * 1e3)  # microseconds of one all-reduce

    def us(flops: float) -> float:
        return flops / (tp * machine.tflops * 1e6)

    forward = [us(n * (dense + attention) + logits[s]) + 2 * n * reduced for s, n in enumerate(layers)]
    backward = [us(n * (dense + 2 * attention) + logits[s]) + 2 * n * reduced for s, n in enumerate(layers)]
    weight = [us(n * dense + logits[s]) for s, n in enumerate(layers)]
    each = [12 * n * h ** 2 + (model.words * h if s in (0, stages - 1) else 0) for s, n in enumerate(layers)]
    ring = 2 * (pipelines - 1) / pipelines
    step = [ring * 4 * count / tp / (machine.net_gbps * 1e3)
            + 2 * STATE_BYTES * count / tp / (machine.memory_gbps * 1e3) for count in each]
    hop = 2 * tokens * h / tp / (machine.net_gbps * 1e3) + machine.latency_us
    rows = [tuple(max(1, round(value)) for value in row) for row in (forward, backward, weight)]
    found = Costs(rows[0], rows[1], rows[2], round(hop), tuple(map(round, step)))
    return found, STATE_BYTES * max(each) / tp / (machine.net_gbps * 1e9)
