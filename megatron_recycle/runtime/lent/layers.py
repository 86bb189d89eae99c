"""The layers of a stage as they are lent: a backend's view of its own, and a worker's copies of its neighbours'."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.membership.description import Lendable
from megatron_recycle.runtime.lent.options import PLAIN, Options, put
from megatron_recycle.runtime.lent.terms import HOME, Span


class Lending(Protocol):
    """The layers of one chunk, for a backend whose stages can run others' too. Usually a stage has one.

    Attributes:
        first: number of the stage's first layer among all of the model.
        layers: of the chunk, in order: modules, or functions.
        lendable: how many of the first and of the last of them neighbours may run: modules with inputs and outputs that
            are alike. They leave out one layer at least.
        why: why these are not more, in words.
        beside: what the stage runs before or behind these layers, which nobody else does.
        like: the same number for chunks whose layers are alike, for a backend that knows its own stage's alone.
        refused: why the stage neither lends nor borrows any more, in words; nothing: it does.
    """

    @property
    def first(self) -> int: ...

    @property
    def layers(self) -> Sequence[Callable[..., Any]]: ...

    @property
    def lendable(self) -> tuple[int, int]: ...

    @property
    def why(self) -> str: ...

    @property
    def beside(self) -> Sequence[nn.Module]: ...

    @property
    def like(self) -> int: ...

    @property
    def refused(self) -> str: ...

    def build(self, number: int) -> nn.Module:
        """Another chunk's layer ``number``, as it is built there; whatever it holds. Asked for those alone that their
        stage lends."""

    def running(self, layers: Sequence[Callable[..., Any]]) -> AbstractContextManager[None]:
        """Inside the block the stage's forwards and backwards run these in place of the chunk's own. Entered inside
        `Stage.running_chunk`."""


def lendable(alike: Sequence[bool], first: bool, last: bool, most: int) -> tuple[int, int]:
    """How many of a chunk's first and of its last layers may be run by its neighbours: an unbroken run, at most
    ``most``, of those that are ``alike``, and always so that one layer stays. ``first`` and ``last``: chunks that have
    no neighbour there, or the stage's own next chunk."""
    head = tail = 0
    while head + tail < len(alike) - 1:
        one = head < most and not first and alike[head]
        if one:
            head += 1
        other = head + tail < len(alike) - 1 and tail < most and not last and alike[len(alike) - 1 - tail]
        if other:
            tail += 1
        if not one and not other:
            break
    return head, tail


def offer(lending: Lending, most: int) -> Lendable | None:
    """What the planner is told of a stage's layers; None: nothing may be lent."""
    head, tail = (min(count, most) for count in lending.lendable)
    if not head and not tail:
        return None
    own = lending.layers
    lent = [layer for layer in (*own[:head], *own[len(own) - tail:]) if isinstance(layer, nn.Module)]
    one = max(_work(layer) for layer in lent)
    like = [layer for layer in own if isinstance(layer, nn.Module) and type(layer) is type(lent[0])]
    # No matrices: layers are taken for alike.
    share = one / max(one, sum(map(_work, (*own, *lending.beside)))) if one else 1 / len(own)
    return Lendable(head, tail, len(like), share,
                    max(sum(tensor.nbytes for tensor in _tensors([layer])) for layer in lent), lending.like)


def said(lending: Lending | None, most: int) -> str:
    """One line of what a stage lends, for the log."""
    if lending is None:
        return "lends no layers: this framework's stages cannot run each other's yet"
    if offered := offer(lending, most):
        return (f"can lend its first {offered.head} and its last {offered.tail} layers, "
                f"{offered.bytes / 2**20:.1f} MiB each")
    return f"lends no layers: {lending.why}"


def _work(layer: Any) -> int:
    """A layer's multiplications for each of its inputs' vectors, as its matrices tell; a table takes none."""
    if isinstance(layer, functools.partial):  # a tied layer with a function of its own, most likely a product
        return sum(parameter.numel() for each in layer.args if isinstance(each, nn.Module)
                   for parameter in each.parameters())
    if not isinstance(layer, nn.Module):
        return 0
    tables = {id(parameter) for module in layer.modules() if isinstance(module, nn.Embedding)
              for parameter in module.parameters(recurse=False)}
    return sum(parameter.numel() for parameter in layer.parameters()
               if parameter.dim() > 1 and id(parameter) not in tables)


class Neighbours:
    """A worker's copies of layers next to one of its chunks, and the way of a micro-batch through those and its own.

    What a copy holds is given anew for each attempt: nothing of it outlasts one.

    Args:
        lending: of the chunk; None: it cannot run others' layers, nor others its own.
        adopt: told of each copy when it is built.
        beside: of the stage's other chunks.

    Attributes:
        draws: whether each layer draws random numbers of its own, so that they do not depend on who runs it.
        options: of the chunk's own layers.
    """

    def __init__(self, lending: Lending | None, adopt: Callable[[nn.Module], None], draws: bool,
                 beside: Sequence[Lending] = ()) -> None:
        self.draws = draws and lending is not None
        self._lending, self._adopt, self._beside = lending, adopt, beside
        self._before: list[nn.Module] = []
        """The last layers of the chunk before, in order."""
        self._behind: list[nn.Module] = []
        self._seed: Callable[[int], None] | None = None
        self.options = Options(self._watched)
        self._began = {number: _checksums([layer]) for number, layer in self._watched().items()}
        self._told: dict[bool, bytes] = {}
        """What the copies at an end were told the last time."""

    def _watched(self) -> Mapping[int, nn.Module]:
        """The chunk's own layers, by their numbers, if they may be lent."""
        if self._lending is None or not self.draws:
            return {}
        return {number: layer for number, layer in enumerate(self._lending.layers, self._lending.first)
                if isinstance(layer, nn.Module)}

    @property
    def lending(self) -> Lending:
        """The chunk's."""
        if self._lending is None or not self.draws:
            raise UnsupportedError("the plan lends layers, and this worker's stage can neither lend nor borrow any: "
                                   f"set lend to {'auto' if self._lending is not None else 'off'} on all ranks")
        return self._lending

    def hold(self, head: bool, count: int) -> None:
        """Have copies of so many layers of the chunk behind, of its ``head``, or of the end of the chunk before, and of
        no more. Raises UnsupportedError."""
        if not count:
            if head:
                self._behind = []
            else:
                self._before = []
            self._told.pop(head, None)
            return
        lending, last = self.lending, self.lending.first + len(self.lending.layers)
        if head:
            del self._behind[count:]
            while len(self._behind) < count:
                self._behind.append(self._built(last + len(self._behind)))
            return
        del self._before[:max(0, len(self._before) - count)]
        while len(self._before) < count:
            self._before.insert(0, self._built(lending.first - len(self._before) - 1))

    def _built(self, number: int) -> nn.Module:
        try:
            module = self.lending.build(number)
        except Exception as error:
            raise UnsupportedError(f"layer {number}, of another stage, cannot be built here "
                                   f"({type(error).__name__}: {error})") from error
        module.requires_grad_(True)  # who lends it picks those that it trains
        self._told = {}
        self._adopt(module)
        return module

    def borrowed(self, head: bool) -> Sequence[nn.Module]:
        """The copies, in order: those of the chunk behind, of its ``head``, or of the end of the chunk before."""
        return self._behind if head else self._before

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Of all copies."""
        return parameters_of([*self._before, *self._behind])

    def own(self, head: bool, count: int) -> Sequence[nn.Module]:
        """So many of the chunk's own layers at this end, in order."""
        layers = self.lending.layers
        found = layers[:count] if head else layers[len(layers) - count:]
        if count > self.lending.lendable[not head] or not all(isinstance(each, nn.Module) for each in found):
            raise UnsupportedError(f"the plan lends {count} layers at the {'head' if head else 'tail'} of a stage that "
                                   f"lends {self.lending.lendable[not head]}: set lend to off")
        return [each for each in found if isinstance(each, nn.Module)]

    def give(self, head: bool, count: int) -> torch.Tensor:
        """So many of the chunk's own layers at this end, `packed`. Raises UnsupportedError."""
        return packed(*self._lent(head, count))

    def _lent(self, head: bool, count: int) -> tuple[Sequence[nn.Module], bytes]:
        """So many layers at this end, and what is told of them. Raises UnsupportedError if they cannot be lent."""
        if self.lending.refused:
            raise UnsupportedError(self.lending.refused)
        layers, end = self.own(head, count), self.lending.first + len(self.lending.layers)
        first = self.lending.first if head else end - count
        for number, layer in enumerate(layers, first):  # nor has a helper room for anything else
            _check_alike([layer], self._began[number])
        self._check_apart(layers)
        return layers, self.options.told(first, first + count)

    def check(self, given: tuple[int, int], borrowed: bool = False) -> None:
        """Raises UnsupportedError if so many of the first and of the last layers cannot be lent, because of something
        that the script has made of them; ``borrowed``: or others' cannot be run here."""
        if borrowed and self.lending.refused:
            raise UnsupportedError(self.lending.refused)
        for head, count in zip((True, False), given, strict=True):
            if count:
                self._lent(head, count)

    def _check_apart(self, layers: Sequence[nn.Module]) -> None:
        """Raises UnsupportedError if the script has tied one of ``layers`` to another layer of the stage."""
        every = [layer for each in (self.lending, *self._beside) for layer in each.layers]
        holders = Counter(number for layer in every for number in {
            id(parameter) for part in (layer.args if isinstance(layer, functools.partial) else (layer,))
            if isinstance(part, nn.Module) for parameter in part.parameters()})
        tied = [name for layer in layers for name, parameter in layer.named_parameters() if holders[id(parameter)] > 1]
        if tied:
            raise UnsupportedError(f"a lent layer shares {tied[0]} with another layer since the job began: tie them "
                                   "before, on all ranks alike, or set lend to off")

    def take(self, head: bool, data: torch.Tensor) -> None:
        """Make the copies at this end what ``data`` was packed of. Raises UnsupportedError."""
        layers, first = self.borrowed(head), self.lending.first
        told = unpack(layers, data)
        start = first + len(self.lending.layers) if head else first - len(layers)
        put(told, dict(enumerate(layers, start)), self._told.get(head, b""))
        self._told[head] = told

    @contextmanager
    def running(self, span: Span, seed: Callable[[int], None]) -> Iterator[None]:
        """Inside the block the stage's forwards and backwards run the layers of ``span``. ``seed``: sets all random
        generators for a layer, by its number in the model."""
        if span == HOME and not self.draws:
            yield
            return
        lending = self.lending
        (first, last), (before, behind) = span.own, span.borrowed
        borrowed = self._before[len(self._before) - before:]
        layers = [*borrowed, *lending.layers[first:len(lending.layers) - last], *self._behind[:behind]]
        start = lending.first - before if before else lending.first + first
        if self.draws:
            layers = [self._drawing(start + place, layer) for place, layer in enumerate(layers)]
        self._seed = seed
        try:
            with lending.running(layers):
                yield
        finally:
            self._seed = None

    def _drawing(self, number: int, layer: Callable[..., Any]) -> Callable[..., Any]:
        """``layer``, which draws random numbers of its own whenever it is run, also again by a checkpoint."""
        if not isinstance(layer, nn.Module):
            def function(*inputs: Any) -> Any:
                self._draw(number)
                return layer(*inputs)

            return function
        if not any(isinstance(hook, _Draw) and hook.neighbours is self for hook in layer._forward_pre_hooks.values()):
            layer.register_forward_pre_hook(_Draw(self, number))
        return layer

    def _draw(self, number: int) -> None:
        if self._seed is not None:
            self._seed(number)


class _Draw:
    """A hook before a layer's forward."""

    def __init__(self, neighbours: Neighbours | None, number: int) -> None:
        self.neighbours, self._number = neighbours, number

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self.neighbours is not None:
            self.neighbours._draw(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Draw, (None, 0)  # in a copy that the script makes of the layer


def parameters_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Of ``layers``, in order."""
    return [parameter for layer in layers for parameter in layer.parameters()]


def packed(layers: Sequence[nn.Module], told: bytes) -> torch.Tensor:
    """All that ``layers`` hold, checksums of what they are, and what is ``told`` of their options, as bytes: `unpack`
    takes it into copies of them. Raises UnsupportedError."""
    if len(told) > _TOLD:
        raise UnsupportedError(f"a lent layer's attributes take {len(told)} bytes to tell, of {_TOLD}: set lend to off")
    tensors = [_bytes(tensor) for tensor in _tensors(layers)]
    device = tensors[0].device if tensors else torch.device("cpu")
    header = torch.tensor([*_checksums(layers), len(told)])
    text = torch.frombuffer(bytearray(told.ljust(_TOLD)), dtype=torch.uint8)
    return torch.cat([_bytes(header).to(device), text.to(device), *tensors])


def room(layers: Sequence[nn.Module]) -> torch.Tensor:
    """A tensor that takes what is `packed` of others like ``layers``."""
    tensors = _tensors(layers)
    return torch.empty(_HEADER + _TOLD + sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8,
                       device=tensors[0].device if tensors else None)


def unpack(layers: Sequence[nn.Module], data: torch.Tensor) -> bytes:
    """Make ``layers`` copies of what ``data`` was `packed` of; returns what was told. Raises UnsupportedError if they
    are not alike."""
    *theirs, length = data[:_HEADER].cpu().clone().view(torch.int64).tolist()
    _check_alike(layers, theirs)
    start = _HEADER + _TOLD
    for tensor in _tensors(layers):
        end = start + tensor.nbytes
        # Unseen by autograd: what an interrupted attempt has run with the same numbers may be yet to run backward.
        tensor.data.copy_(data[start:end].clone().view(tensor.dtype).view(tensor.shape))
        start = end
    return data[_HEADER:_HEADER + length].cpu().numpy().tobytes()


def likeness(layer: nn.Module, without: Collection[str] = ()) -> int:
    """A number that layers have alike whose modules, tensors and plain attributes are, but for attributes ``without``
    which they are compared."""
    kinds = [(name, type(module).__qualname__, sorted((key, value) for key, value in vars(module).items() if (
                  isinstance(value, PLAIN) and key not in without and not key.startswith("_"))))
             for name, module in layer.named_modules()]
    return zlib.crc32(repr((kinds, _kinds([layer]))).encode())


def hooked(layer: nn.Module) -> bool:
    """Whether something of the script's is called when ``layer`` runs, or on its gradients: copies do not have it."""
    return any(_hooks(module) for module in layer.modules()) or any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in layer.parameters())


_COMPARED = ("modules", "hooks", "parameters or buffers")
_HEADER = 8 * (len(_COMPARED) + 1)
_TOLD = 2**14
"""Bytes, and of options."""


def _check_alike(layers: Sequence[nn.Module], at_home: Sequence[int]) -> None:
    """Raises UnsupportedError if ``layers`` are not what these checksums are of."""
    other = [name for name, mine, home in zip(_COMPARED, _checksums(layers), at_home, strict=True) if mine != home]
    if other:
        raise UnsupportedError(f"a lent layer has other {' and '.join(other)} where it is at home than where it is "
                               f"built anew ({', '.join(type(layer).__name__ for layer in layers)}): the script has "
                               "changed it since the job began. Change it before, on all ranks alike, or set lend to "
                               "off")


def _checksums(layers: Sequence[nn.Module]) -> list[int]:
    """Of what `_COMPARED` names."""
    modules = [[(name, type(module).__qualname__) for name, module in layer.named_modules()] for layer in layers]
    hooks = [hooked(layer) for layer in layers]
    return [zlib.crc32(repr(each).encode()) for each in (modules, hooks, _kinds(layers))]


def _kinds(layers: Sequence[nn.Module]) -> list[Any]:
    return [[(name, tuple(tensor.shape), tensor.dtype)
             for name, tensor in (*layer.named_parameters(), *layer.named_buffers())] for layer in layers]


def _hooks(module: nn.Module) -> bool:
    # Those of its state dict are for saving and loading.
    return any(not isinstance(hook, _Draw) for key, found in vars(module).items()
               if key.endswith("_hooks") and "state_dict" not in key and found for hook in found.values())


def _tensors(layers: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
