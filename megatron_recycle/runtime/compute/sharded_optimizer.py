"""An optimizer whose state is cut into shards, some of them on this worker.

The cuts are the framework's, and stay fixed for the job's life. Each shard is one or several slots, flat fp32
parameters, which the framework's own optimizer steps in place of the model's: element by element, so that twins have
the same bits. The model gets the stepped values of the worker's own shards; those of others come from their holders.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError

MASTER = "master"
ALIGNMENT = 2
"""Padding makes a group's length a multiple of this and the number of shards, as DeepSpeed's does."""
ELEMENTWISE: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam"), lambda group: 4 * (2 + bool(group.get("amsgrad")))),
    **dict.fromkeys(("Adagrad", "Lion", "FusedLion"), lambda group: 4),
    "SGD": lambda group: 4 * bool(group.get("momentum")),
    "RMSprop": lambda group: 4 * (1 + bool(group.get("momentum")) + bool(group.get("centered"))),
    **dict.fromkeys(("Adam8bit", "AdamW8bit"), lambda group: 3)}
"""Optimizers that step an element without regard to others, or only to those in its block of a slot (bitsandbytes' of 8
bits), and their bytes of state per element in a group with these settings."""


class Piece(NamedTuple):
    """Elements ``start`` to ``end`` of ``parameter``, ``offset`` into a group's part of the shard."""

    parameter: nn.Parameter
    start: int
    end: int
    offset: int


class Slot(NamedTuple):
    """A flat fp32 parameter of ``size`` elements in the optimizer's group ``group``; ``pieces`` lie in it end to end,
    and the rest is padding."""

    group: int
    size: int
    pieces: tuple[Piece, ...]


Cut = Sequence[Sequence[Slot]]
"""By shard, its slots."""


def trained(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """By group, the parameters of ``optimizer`` that get gradients."""
    return [[parameter for parameter in group["params"] if parameter.requires_grad]
            for group in optimizer.param_groups]


def piece_of(numel: int, count: int) -> int:
    """The length of each of ``count`` equal pieces of ``numel`` elements and their padding, as ZeRO-1 cuts them."""
    return -(-numel // (ALIGNMENT * count)) * ALIGNMENT


def even(groups: Sequence[Sequence[nn.Parameter]], count: int) -> Cut:
    """ZeRO-1's cut: the parameters of each group, laid end to end and padded, in ``count`` equal pieces; shard k is
    piece k of every group."""
    sizes = [piece_of(sum(parameter.numel() for parameter in group), count) for group in groups]
    found: list[list[list[Piece]]] = [[[] for _ in groups] for _ in range(count)]
    for number, (group, size) in enumerate(zip(groups, sizes)):
        begin = 0
        for parameter in group:
            end = begin + parameter.numel()
            for shard in range(begin // size, -(-end // size)):
                first, last = max(begin, shard * size), min(end, (shard + 1) * size)
                found[shard][number].append(Piece(parameter, first - begin, last - begin, first - shard * size))
            begin = end
    return [[Slot(number, size, tuple(pieces)) for number, (size, pieces) in enumerate(zip(sizes, of_shard))]
            for of_shard in found]


class ShardedOptimizer:
    """Takes an optimizer over a model's parameters, and lets it step flat fp32 shards of them instead.

    Args:
        optimizer: a torch optimizer that has not stepped yet.
        cut: its shards.
        own: the worker's initial shards.
        wire: the type in which gradients travel and are added up; None: that in which they are summed.
        least: minimum number of holders of each shard, whatever `state_copies` says.
        in_place: whether a slot that is a part of one fp32 parameter is that parameter's own memory, so that a script's
            writes there count.
        rounded: rounds masters' values to a parameter's type; None: as torch rounds.
        state_bytes: bytes of optimizer state per element; None: as in `ELEMENTWISE`.

    Attributes:
        count: number of shards.
        parameters: the model's parameters in the shards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, cut: Cut, own: Iterable[int],
                 wire: torch.dtype | None = None, least: int = 1, in_place: bool = False,
                 rounded: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None,
                 state_bytes: int | None = None) -> None:
        if type(optimizer).__name__ not in ELEMENTWISE:
            raise UnsupportedError(
                f"optimizer {type(optimizer).__name__} is not known to step each element by itself, so that its state "
                f"cannot be cut into shards: use one of {', '.join(ELEMENTWISE)}, or leave the sharding out "
                "(zero_optimization.stage 1, --use-distributed-optimizer)")
        self.optimizer = optimizer
        self.count = len(cut)
        self.wire = wire
        self.least = least
        self._cut = cut
        self._in_place = in_place
        self._state_bytes = state_bytes
        self._rounded = rounded or (lambda values, kind: values)
        self.parameters: list[nn.Parameter] = list({id(piece.parameter): piece.parameter for shard in range(self.count)
                                                    for piece in self.pieces(shard)}.values())
        self._masters: dict[int, list[nn.Parameter]] = {}
        self.add(own)

    # ---- a shard's contents

    @property
    def held(self) -> tuple[int, ...]:
        """The shards of this worker."""
        return tuple(sorted(self._masters))

    def masters(self, shard: int) -> Sequence[nn.Parameter]:
        """The flat fp32 parameters of a shard of this worker, by slot; the last ones end in padding."""
        return self._masters[shard]

    def pieces(self, shard: int) -> list[Piece]:
        """The parts of parameters in a shard, in order."""
        return [piece for slot in self._cut[shard] for piece in slot.pieces]

    def spans(self, shard: int, start_of: Mapping[int, int]) -> list[tuple[int, int]]:
        """The ranges of a shard in a flat buffer; ``start_of``: the start of each parameter there, by its `id`."""
        spans: list[tuple[int, int]] = []
        for piece in self.pieces(shard):
            begin = start_of[id(piece.parameter)] + piece.start
            end = begin + piece.end - piece.start
            if spans and spans[-1][1] == begin:
                spans[-1] = spans[-1][0], end
            else:
                spans.append((begin, end))
        return spans

    def values(self, shard: int) -> torch.Tensor:
        """The model's parameters in a shard, flat, in their own type."""
        parts = [_flat(piece) for piece in self.pieces(shard)]
        return torch.cat(parts) if parts else torch.empty(0)

    def length(self, shard: int) -> int:
        """The number of `values`."""
        return sum(piece.end - piece.start for piece in self.pieces(shard))

    def set_values(self, shard: int, values: torch.Tensor) -> None:
        """Write the `values` of a shard to the model."""
        for piece, part in zip(self.pieces(shard), self.parts(shard, values)):
            _flat(piece).copy_(part)

    def slots(self, shard: int) -> Sequence[Slot]:
        """The slots of a shard, whether or not this worker has it."""
        return self._cut[shard]

    @torch.no_grad()
    def refresh(self, shard: int) -> None:
        """Set the masters of a shard to the model's parameters."""
        for slot, master in zip(self._cut[shard], self._masters[shard], strict=True):
            for piece in slot.pieces:
                master.data[piece.offset:][:piece.end - piece.start] = _flat(piece)

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of a shard: a master, unless that is the model's memory, and the optimizer's state."""
        of_group = ELEMENTWISE[type(self.optimizer).__name__]
        in_model = self._in_place and all(parameter.dtype == torch.float32 for parameter in self.parameters)
        kept = self._state_bytes or max(map(of_group, self.optimizer.param_groups), default=0)
        return kept + (0 if in_model else 4)

    # ---- a step

    def split(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The part of ``packed`` for each shard of this worker, in order."""
        return list(packed.split([self.length(shard) for shard in self.held])) if self.held else []

    def parts(self, shard: int, values: torch.Tensor) -> list[torch.Tensor]:
        """The part of a shard's ``values`` for each of its `pieces`."""
        return list(values.split([piece.end - piece.start for piece in self.pieces(shard)])) if values.numel() else []

    def load(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Give each shard of this worker its gradient, one after the other, times ``factor``. The gradients are not
        changed, and not copied if possible."""
        for shard, values in zip(self.held, gradients, strict=True):
            values, begin = values.float(), 0
            for slot, master in zip(self._cut[shard], self._masters[shard], strict=True):
                end = begin + sum(piece.end - piece.start for piece in slot.pieces)
                part = values[begin:end]
                if end - begin < slot.size:
                    part = torch.cat([part, part.new_zeros(slot.size - (end - begin))])
                master.grad = part if factor == 1.0 else part * factor
                begin = end

    def step(self) -> None:
        """Update this worker's shards with the gradients of `load`, and their part of the model."""
        self.optimizer.step()
        for shard in self.held:
            self.copy_to_model(shard)
            for master in self._masters[shard]:
                master.grad = None

    @torch.no_grad()
    def copy_to_model(self, shard: int) -> None:
        """Set the model's parameters to this worker's masters."""
        for slot, master in zip(self._cut[shard], self._masters[shard], strict=True):
            for piece in slot.pieces:
                values = master.data[piece.offset:][:piece.end - piece.start]
                _flat(piece).copy_(self._rounded(values, piece.parameter.dtype))

    # ---- shards come and go

    def tensors(self, shard: int) -> dict[str, torch.Tensor]:
        """The state of a shard: ``master N`` and the optimizer's own (``exp_avg N``), for each slot N."""
        found = {}
        for number, master in enumerate(self._masters[shard]):
            found[f"{MASTER} {number}"] = master.detach()  # with its version
            found.update({f"{key} {number}": value for key, value in self.optimizer.state.get(master, {}).items()
                          if isinstance(value, torch.Tensor)})
        return found

    def numbers(self, shard: int) -> list[dict[str, Any]]:
        """By slot, the optimizer's other values of a shard."""
        return [copy.deepcopy({key: value for key, value in self.optimizer.state.get(master, {}).items()
                        if not isinstance(value, torch.Tensor)}) for master in self._masters[shard]]

    def add(self, own: Iterable[int]) -> None:
        """Hold shards ``own`` from now on, initialised from the model's parameters."""
        for shard in own:
            self._make(shard)
            self.refresh(shard)
        self._point()

    def take(self, shard: int, tensors: Mapping[str, torch.Tensor], numbers: Sequence[Mapping[str, Any]]) -> None:
        """Hold a shard from now on, with a twin's state; the tensors may be kept."""
        if shard not in self._masters:
            self._make(shard)
        states: list[dict[str, Any]] = [dict(own) for own in numbers]
        for name, tensor in tensors.items():
            key, number = name.split(" ")
            states[int(number)][key] = tensor
        for master, state in zip(self._masters[shard], states, strict=True):
            master.data.copy_(state.pop(MASTER))
            self.optimizer.state.pop(master, None)
            if state:
                self.optimizer.state[master].update(state)
        self._point()

    @torch.no_grad()
    def restore(self, shard: int, tensors: Mapping[str, torch.Tensor], numbers: Sequence[Mapping[str, Any]]) -> None:
        """Restore a shard of this worker to earlier `tensors` and `numbers`, and the model's part of it."""
        for number, (master, own) in enumerate(zip(self._masters[shard], numbers, strict=True)):
            master.data.copy_(tensors[f"{MASTER} {number}"])
            state = self.optimizer.state.pop(master, {})  # optimizers make theirs at the first step
            kept = {key: value.copy_(tensors[f"{key} {number}"]) for key, value in state.items()
                    if isinstance(value, torch.Tensor) and f"{key} {number}" in tensors}
            if kept or own:
                self.optimizer.state[master].update({**kept, **copy.deepcopy(dict(own))})
        self.copy_to_model(shard)

    def drop(self, shard: int) -> None:
        """Stop holding a shard."""
        for master in self._masters.pop(shard):
            self.optimizer.state.pop(master, None)
        self._point()

    def _make(self, shard: int) -> None:
        self._masters[shard] = [nn.Parameter(self._memory(slot)) for slot in self._cut[shard]]

    def _memory(self, slot: Slot) -> torch.Tensor:
        if self._in_place and [piece.end - piece.start for piece in slot.pieces] == [slot.size]:
            own = _flat(slot.pieces[0])
            if own.dtype == torch.float32:
                return own
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        return torch.zeros(slot.size, dtype=torch.float32, device=device)

    def _point(self) -> None:
        """Let the optimizer step all present shards."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [master for shard in self.held for slot, master in
                               zip(self._cut[shard], self._masters[shard]) if slot.group == number]


def _flat(piece: Piece) -> torch.Tensor:
    return piece.parameter.data.view(-1)[piece.start:piece.end]
