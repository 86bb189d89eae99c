"""Moves of layers between stages for two chunks per stage, and layers that cannot move. All stages send descriptions of
their layers first, since no process holds a whole pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import Chunks
from megatron_recycle.runtime.lent.layers import hooked, likeness

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"
_LEFT_OUT = ("training",)


class Piece(NamedTuple):
    """A tensor of a layer."""

    path: str
    """Its attribute path in the layer."""
    kind: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    same: int
    """Its number on its stage: pieces of one number are one tensor."""
    group: int | None
    """Its group in the optimizer."""
    called: str | None
    """Its name in that group, if groups have names."""


class Layer(NamedTuple):
    """A layer of a model's list, or another part of the model on a stage."""

    name: str
    """Its number; `tied(key)`; `LOSS`."""
    pieces: tuple[Piece, ...]
    likeness: int
    """Equal for layers that are built alike, whatever their values."""
    trouble: str
    """The reason why it cannot move; empty: it can."""
    bits: str = ""
    """For a tied layer: a checksum of its tied tensors."""
    beside: tuple[str, ...] = ()
    """For a tied layer: trained parameters that are not tied."""

    @property
    def size(self) -> int:
        """Elements of its parameters."""
        return sum(torch.Size(piece.shape).numel() for piece in self.pieces if piece.kind == PARAMETER)


LOSS = "loss_fn"


def tied(key: str) -> str:
    """The name of the layer that is tied by ``key``."""
    return f"tied_modules.{key}"


def words(name: str) -> str:
    """``name`` in a message."""
    return f"layer {name}" if name.isdigit() else "loss_fn" if name == LOSS else (
        f"tied layer {name.removeprefix(tied(''))!r}")


def tensors(layer: nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    """The tensors of ``layer`` with their kinds, by path; plain attributes included."""
    found = {path: (PARAMETER, one) for path, one in layer.named_parameters(remove_duplicate=False)}
    found |= {path: (BUFFER, one) for path, one in layer.named_buffers(remove_duplicate=False)}
    for prefix, module in layer.named_modules():
        found |= {f"{prefix}.{name}" if prefix else name: (ATTRIBUTE, one) for name, one in vars(module).items()
                  if isinstance(one, torch.Tensor)}
    return found


def ids(layers: Iterable[nn.Module]) -> set[int]:
    """The ids of all tensors of ``layers``."""
    return {id(one) for layer in layers for _, one in tensors(layer).values()}


def describe(layers: Mapping[str, nn.Module], grouped: Mapping[int, tuple[int, str | None]],
             ties: Mapping[str, Sequence[torch.Tensor]]) -> list[Layer]:
    """The descriptions of ``layers`` for other stages. ``grouped``: group and name of each of the optimizer's
    parameters, by id; ``ties``: the tied tensors of tied layers."""
    numbers: dict[int, int] = {}
    return [Layer(name, tuple(
                Piece(path, kind, tuple(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad,
                      numbers.setdefault(id(one), len(numbers)), *grouped.get(id(one), (None, None)))
                for path, (kind, one) in tensors(layer).items()),
            likeness(layer, _LEFT_OUT), _trouble(layer), _bits(ties.get(name, ())), tuple(
                path for path, one in layer.named_parameters()
                if name in ties and one.requires_grad and not any(one is other for other in ties[name])))
            for name, layer in layers.items()]


def built_alike(layer: nn.Module, description: Layer) -> bool:
    """Whether ``layer`` fits its stage's description, apart from the values of its tensors."""
    return likeness(layer, _LEFT_OUT) == description.likeness


def put(layer: nn.Module, piece: Piece, value: torch.Tensor) -> None:
    """Copy ``value`` into the tensor of ``layer`` at ``piece``, with the other stage's type and training flag."""
    target: torch.Tensor = attrgetter(piece.path)(layer)
    if target.dtype == value.dtype:
        target.data.copy_(value)  # keeps its own strides
    else:
        target.data = value
    if piece.kind == PARAMETER:
        target.requires_grad_(piece.trained)


def put_same(layer: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Put ``tensor`` itself into ``layer`` at ``path``."""
    prefix, _, name = path.rpartition(".")
    module = layer.get_submodule(prefix)
    if name in module._parameters:
        assert isinstance(tensor, nn.Parameter)
        module._parameters[name] = tensor
    elif name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, tensor)


def differs(layer: nn.Module, description: Layer) -> str:
    """The difference in tensors between ``layer``, built anew, and its stage's description; empty: none."""
    own = {path: (kind, tuple(one.shape)) for path, (kind, one) in tensors(layer).items()}
    described = {piece.path: (piece.kind, piece.shape) for piece in description.pieces}
    names = [path for path in {**own, **described} if own.get(path) != described.get(path)]
    return f"other tensors ({', '.join(names[:4])})" if names else ""


def _trouble(layer: nn.Module) -> str:
    if hooked(layer):
        return "has hooks, which cannot follow it: register them after deepspeed.initialize()"
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in layer.modules()):
        return "is compiled: compile after deepspeed.initialize()"
    return ""


def _bits(found: Sequence[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in found:
        digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if found else ""


class Told(NamedTuple):
    """The description that one stage sends: its layers, its optimizer's groups, and layers that cannot move."""

    layers: Sequence[Layer]
    given: bool
    settings: Sequence[Sequence[str]]
    members: Sequence[Sequence[str | None]]
    """Names of each group's parameters, in their order; None: not the model's."""
    faults: Sequence[str]


class Move(NamedTuple):
    """A layer's move from the stage that has built it to its new stage, perhaps the same."""

    layer: Layer
    source: int
    target: int


def groups_apart(descriptions: Sequence[Told]) -> list[str]:
    """The reasons why parameters cannot go into the groups of another stage; empty: they can."""
    first = descriptions[0]
    for stage, one in enumerate(descriptions):
        if (one.given, one.settings) != (first.given, first.settings):
            apart = (f"{len(one.settings)} and {len(first.settings)} of them" if len(one.settings) != len(
                first.settings) else "; ".join(sorted({word for mine, other in zip(one.settings, first.settings)
                                                       for word in {*mine} ^ {*other}})))
            return [f"the parameter groups of stages {stage} and 0 differ ({apart}): give the same groups on all "
                    "stages, in the same order, also where one is empty"]
    return []


def name_of(number: int, spec: Any) -> str | None:
    """The `Layer.name` of the layer ``number``; None: it is a function."""
    if isinstance(spec, TiedLayerSpec):
        return tied(spec.key)
    return str(number) if isinstance(spec, (LayerSpec, nn.Module)) else None


def layer_weights(specs: Sequence[Any], descriptions: Sequence[Told]) -> list[int]:
    """Elements of the parameters of each layer of the list."""
    sizes = {layer.name: layer.size for one in descriptions for layer in one.layers}
    return [sizes.get(name_of(number, spec) or "", 0) for number, spec in enumerate(specs)]


def moves_of(specs: Sequence[Any], chunks: Chunks, descriptions: Sequence[Told], wrong: list[str]) -> list[Move]:
    """The move of each layer, in the list's order; adds faults of layers that cannot move to ``wrong``."""
    by_name = [{layer.name: layer for layer in one.layers} for one in descriptions]
    moves: dict[str, Move] = {}
    for number, spec in enumerate(specs):
        source, target, name = chunks.stock_stage_of(number), chunks.stage_of(number), name_of(number, spec)
        if name is None:
            if source != target and (holds := _modules_in(spec)):
                wrong.append(f"layer {number} is a function that holds a module ({holds}), whose weights on another "
                             "stage are others: make it a layer, or a TiedLayerSpec")
        elif name not in moves:
            moves[name] = Move(by_name[source][name], source, target)
        elif moves[name].target != target:
            wrong.append(f"{words(name)} ends up on stages {moves[name].target} and {target}: with chunks ties must "
                         "be between layers of one stage, as those of the first and the last are")
    last = len(descriptions) - 1
    if LOSS in by_name[last]:
        moves[LOSS] = Move(by_name[last][LOSS], last, chunks.placement[-1])
    wrong += [f"{words(move.layer.name)} {move.layer.trouble}" for move in moves.values()
              if move.layer.trouble and move.source != move.target]
    wrong += _ties_apart(specs, chunks, by_name)
    wrong += _shared_apart(moves.values())
    return list(moves.values())


def _ties_apart(specs: Sequence[Any], chunks: Chunks, by_name: Sequence[Mapping[str, Layer]]) -> Iterator[str]:
    """Faults of tied layers whose copies differ."""
    for key in dict.fromkeys(spec.key for spec in specs if isinstance(spec, TiedLayerSpec)):
        found = [(number, spec) for number, spec in enumerate(specs) if name_of(number, spec) == tied(key)]
        stages = sorted({chunks.stock_stage_of(number) for number, _ in found})
        copies = [by_name[stage][tied(key)] for stage in stages]
        if len({(copy.bits, copy.likeness) for copy in copies}) > 1:
            yield (f"{words(tied(key))} differs between the stages that have it: change it on all of them alike, or "
                   "after deepspeed.initialize()")
        plain = {chunks.stock_stage_of(number) for number, spec in found if spec.forward_fn is None}
        gone = [copy.trouble for stage in stages if stage != chunks.stage_of(found[0][0])
                if (copy := by_name[stage][tied(key)]).trouble]
        yield from (f"{words(tied(key))} {trouble}" for trouble in gone[:1])
        if len(plain) > 1 and copies[0].beside:
            yield (f"{words(tied(key))} has parameters that are not tied ({', '.join(copies[0].beside)}), of which "
                   "DeepSpeed would train two, and a stage with both layers has one: name them in tied_weight_attr, or "
                   "give the other layer a forward_fn that leaves them out")


def _shared_apart(moves: Iterable[Move]) -> Iterator[str]:
    """Faults of tensors that layers share on one stage, but would no longer share."""
    shared: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        for piece in move.layer.pieces:
            shared.setdefault((move.source, piece.same), []).append(move)
    for found in shared.values():
        others = [move for move in found if move.target != found[0].target]
        if others:
            yield (f"{words(found[0].layer.name)} and {words(others[0].layer.name)} share a tensor and end up on "
                   f"stages {found[0].target} and {others[0].target}: use a TiedLayerSpec for layers of one stage")


def _modules_in(function: Any) -> str:
    """The names of modules and parameters that a function, or another callable, holds."""
    held = [function, getattr(function, "__self__", None), *getattr(function, "args", ()),
            *(getattr(function, "keywords", None) or {}).values(), *(vars(function).values() if hasattr(
                function, "__dict__") else ()), *(cell.cell_contents for cell in getattr(
                    function, "__closure__", None) or () if _filled(cell))]
    return ", ".join(type(one).__name__ for one in held if isinstance(one, (nn.Module, nn.Parameter)))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
