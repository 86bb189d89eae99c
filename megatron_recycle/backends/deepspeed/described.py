"""What a stage tells the others of its layers before some of them move: a pipeline's layers are nobody's as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron_recycle.runtime.lent.layers import hooked, likeness

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"
_LEFT_OUT = ("training",)


class Piece(NamedTuple):
    """A tensor of a layer."""

    path: str
    """Its name in the layer."""
    kind: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    same: int
    """Its number on its stage: pieces of one number are one tensor."""
    group: int | None
    """The optimizer's group that it is in."""
    called: str | None
    """By which name, if the groups have names."""


class Layer(NamedTuple):
    """A layer of a model's list, or another part that a stage has of it."""

    name: str
    """Its number; `tied(key)`; `LOSS`."""
    pieces: tuple[Piece, ...]
    likeness: int
    """The same where a layer is built alike, but for its numbers."""
    trouble: str
    """Why it cannot move; nothing: it can."""
    bits: str = ""
    """Of a tied layer, a checksum of what is tied."""
    beside: tuple[str, ...] = ()
    """Of a tied layer, trained parameters that are not tied."""

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
    """The tensors of ``layer`` with their kinds, by path; also those that are plain attributes."""
    found = {path: (PARAMETER, one) for path, one in layer.named_parameters(remove_duplicate=False)}
    found |= {path: (BUFFER, one) for path, one in layer.named_buffers(remove_duplicate=False)}
    for prefix, module in layer.named_modules():
        found |= {f"{prefix}.{name}" if prefix else name: (ATTRIBUTE, one) for name, one in vars(module).items()
                  if isinstance(one, torch.Tensor)}
    return found


def ids(layers: Iterable[nn.Module]) -> set[int]:
    """Those of all tensors of ``layers``."""
    return {id(one) for layer in layers for _, one in tensors(layer).values()}


def describe(layers: Mapping[str, nn.Module], grouped: Mapping[int, tuple[int, str | None]],
             ties: Mapping[str, Sequence[torch.Tensor]]) -> list[Layer]:
    """What is told of ``layers``. ``grouped``: group and name of each parameter that the optimizer has, by id;
    ``ties``: what is tied of the tied ones."""
    numbers: dict[int, int] = {}
    return [Layer(name, tuple(
                Piece(path, kind, tuple(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad,
                      numbers.setdefault(id(one), len(numbers)), *grouped.get(id(one), (None, None)))
                for path, (kind, one) in tensors(layer).items()),
            likeness(layer, _LEFT_OUT), _trouble(layer), _bits(ties.get(name, ())), tuple(
                path for path, one in layer.named_parameters()
                if name in ties and one.requires_grad and not any(one is other for other in ties[name])))
            for name, layer in layers.items()]


def built_alike(layer: nn.Module, told: Layer) -> bool:
    """Whether ``layer`` is what its stage has told of it, but for the values of its tensors."""
    return likeness(layer, _LEFT_OUT) == told.likeness


def put(layer: nn.Module, piece: Piece, value: torch.Tensor) -> None:
    """Give the tensor of ``layer`` that ``piece`` names the bits of ``value``, and what else the other stage said."""
    target = getattr_at(layer, piece.path)
    if target.dtype == value.dtype:
        target.data.copy_(value)  # with the strides that it was built with
    else:
        target.data = value
    if piece.kind == PARAMETER:
        target.requires_grad_(piece.trained)


def put_same(layer: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Make ``tensor`` itself the one that ``layer`` has at ``path``."""
    prefix, _, name = path.rpartition(".")
    module = layer.get_submodule(prefix)
    if name in module._parameters:
        assert isinstance(tensor, nn.Parameter)
        module._parameters[name] = tensor
    elif name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, tensor)


def getattr_at(layer: nn.Module, path: str) -> torch.Tensor:
    """The tensor of ``layer`` at ``path``."""
    prefix, _, name = path.rpartition(".")
    found: torch.Tensor = getattr(layer.get_submodule(prefix), name)
    return found


def differs(layer: nn.Module, told: Layer) -> str:
    """What ``layer``, built anew, has otherwise than its stage has told; nothing: it is alike."""
    own = {path: (kind, tuple(one.shape)) for path, (kind, one) in tensors(layer).items()}
    asked = {piece.path: (piece.kind, piece.shape) for piece in told.pieces}
    names = [path for path in {**own, **asked} if own.get(path) != asked.get(path)]
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
