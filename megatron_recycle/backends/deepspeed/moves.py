"""Which layers move between stages where a stage gets two chunks, and which cannot: from what all stages have told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import Chunks
from megatron_recycle.backends.deepspeed.described import LOSS, Layer, tied, words


class Told(NamedTuple):
    """What one stage tells: its layers, what the groups of its optimizer say, what cannot move."""

    layers: Sequence[Layer]
    given: bool
    settings: Sequence[Sequence[str]]
    members: Sequence[Sequence[str | None]]
    """Names of each group's parameters, in their order; None: not the model's."""
    faults: Sequence[str]


class Move(NamedTuple):
    """A layer goes from the stage that has built it to another, or stays."""

    layer: Layer
    source: int
    target: int


def groups_apart(told: Sequence[Told]) -> list[str]:
    """Why parameters cannot go into the groups of another stage; nothing: they can."""
    first = told[0]
    for stage, one in enumerate(told):
        if (one.given, one.settings) != (first.given, first.settings):
            apart = (f"{len(one.settings)} and {len(first.settings)} of them" if len(one.settings) != len(
                first.settings) else "; ".join(sorted({word for mine, other in zip(one.settings, first.settings)
                                                       for word in {*mine} ^ {*other}})))
            return [f"the parameter groups of stages {stage} and 0 differ ({apart}): give the same groups on all "
                    "stages, in the same order, also where one is empty"]
    return []


def name_of(number: int, spec: Any) -> str | None:
    """By which `Layer.name` the layer ``number`` is told; None: it is a function."""
    if isinstance(spec, TiedLayerSpec):
        return tied(spec.key)
    return str(number) if isinstance(spec, (LayerSpec, nn.Module)) else None


def layer_weights(specs: Sequence[Any], told: Sequence[Told]) -> list[int]:
    """Elements of the parameters of each layer of the list."""
    sizes = {layer.name: layer.size for one in told for layer in one.layers}
    return [sizes.get(name_of(number, spec) or "", 0) for number, spec in enumerate(specs)]


def moves_of(specs: Sequence[Any], chunks: Chunks, told: Sequence[Told], wrong: list[str]) -> list[Move]:
    """Where each layer goes, in the list's order; adds to ``wrong`` what cannot."""
    by_name = [{layer.name: layer for layer in one.layers} for one in told]
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
    last = len(told) - 1
    if LOSS in by_name[last]:
        moves[LOSS] = Move(by_name[last][LOSS], last, chunks.placement[-1])
    wrong += [f"{words(move.layer.name)} {move.layer.trouble}" for move in moves.values()
              if move.layer.trouble and move.source != move.target]
    wrong += _ties_apart(specs, chunks, by_name)
    wrong += _shared_apart(moves.values())
    return list(moves.values())


def _ties_apart(specs: Sequence[Any], chunks: Chunks, by_name: Sequence[Mapping[str, Layer]]) -> Iterator[str]:
    """Copies of a tied layer that are not one and the same."""
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
    """Tensors that several layers share on one stage, and would not any more."""
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
    """What a function, or another callable that is no module, holds of a model."""
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
