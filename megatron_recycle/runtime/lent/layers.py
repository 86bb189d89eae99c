"""Lent layers of a stage: a backend's view of its own layers, and a worker's copies of its neighbours'."""

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
    """The layers of one chunk, for a backend whose stages can also run others'. Usually a stage has one chunk.

    Attributes:
        first: number of the chunk's first layer in the model.
        layers: of the chunk, in order: modules, or functions.
        lendable: how many of the first and of the last layers neighbours may run: modules with inputs and outputs that
            are alike. At least one layer stays.
        why: why no more are lendable, in words.
        beside: modules before or behind these layers that only this stage runs.
        like: the same number for chunks whose layers are alike, for a backend that only knows its own stage's.
        refused: why the stage neither lends nor borrows any more, in words; empty: it does.
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
        """Another chunk's layer ``number``, built as there, with any values. Called only for layers that their stage
        lends."""

    def running(self, layers: Sequence[Callable[..., Any]]) -> AbstractContextManager[None]:
        """Inside the block the stage's forwards and backwards run ``layers`` in place of the chunk's own. Entered
        inside `Stage.running_chunk`."""


def lendable(alike: Sequence[bool], first: bool, last: bool, most: int) -> tuple[int, int]:
    """How many of a chunk's first and of its last layers its neighbours may run: an unbroken run of layers that are
    ``alike``, at most ``most``, so that at least one layer stays. ``first`` and ``last``: no neighbour there, or it is
    the stage's own next chunk."""
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
    """The layers that a stage offers to the planner; None: nothing may be lent."""
    head, tail = (min(count, most) for count in lending.lendable)
    if not head and not tail:
        return None
    own = lending.layers
    lent = [layer for layer in (*own[:head], *own[len(own) - tail:]) if isinstance(layer, nn.Module)]
    one = max(_work(layer) for layer in lent)
    like = [layer for layer in own if isinstance(layer, nn.Module) and type(layer) is type(lent[0])]
    # No matrices: assume that all layers are alike.
    share = one / max(one, sum(map(_work, (*own, *lending.beside)))) if one else 1 / len(own)
    return Lendable(head, tail, len(like), share,
                    max(sum(tensor.nbytes for tensor in _tensors([layer])) for layer in lent), lending.like)


def said(lending: Lending | None, most: int) -> str:
    """One line about a stage's lendable layers, for the log."""
    if lending is None:
        return "lends no layers: this framework's stages cannot run each other's yet"
    if offered := offer(lending, most):
        return (f"can lend its first {offered.head} and its last {offered.tail} layers, "
                f"{offered.bytes / 2**20:.1f} MiB each")
    return f"lends no layers: {lending.why}"


def _work(layer: Any) -> int:
    """A layer's multiplications for each input vector, counted from its matrices; an embedding table takes none."""
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
    """A worker's copies of layers next to one of its chunks, and the run of a micro-batch through these and its own.

    A copy gets its values anew for each attempt: none of them outlasts it.

    Args:
        lending: of the chunk; None: the chunk can neither borrow nor lend layers.
        adopt: called with each copy when it is built.
        beside: of the stage's other chunks.

    Attributes:
        draws: whether each layer draws random numbers of its own, which then do not depend on the worker that runs it.
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
        self._options_set: dict[bool, bytes] = {}
        """By end, the options last set in its copies."""

    def _watched(self) -> Mapping[int, nn.Module]:
        """The chunk's own layers, by their numbers, if they may be lent."""
        if self._lending is None or not self.draws:
            return {}
        return {number: layer for number, layer in enumerate(self._lending.layers, self._lending.first)
                if isinstance(layer, nn.Module)}

    @property
    def lending(self) -> Lending:
        """The chunk's `Lending`. Raises UnsupportedError if it cannot lend or borrow."""
        if self._lending is None or not self.draws:
            raise UnsupportedError("the plan lends layers, and this worker's stage can neither lend nor borrow any: "
                                   f"set lend to {'auto' if self._lending is not None else 'off'} on all ranks")
        return self._lending

    def hold(self, head: bool, count: int) -> None:
        """Hold copies of exactly ``count`` layers: the first of the chunk behind (``head``), or else the last of the
        chunk before. Raises UnsupportedError."""
        if not count:
            if head:
                self._behind = []
            else:
                self._before = []
            self._options_set.pop(head, None)
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
        module.requires_grad_(True)  # the lender picks the parameters that it trains
        self._options_set = {}
        self._adopt(module)
        return module

    def borrowed(self, head: bool) -> Sequence[nn.Module]:
        """The copies, in order: of the first layers of the chunk behind (``head``), or the last of the chunk before."""
        return self._behind if head else self._before

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of all copies."""
        return parameters_of([*self._before, *self._behind])

    def own(self, head: bool, count: int) -> Sequence[nn.Module]:
        """The chunk's own first (``head``) or last ``count`` layers, in order."""
        layers = self.lending.layers
        found = layers[:count] if head else layers[len(layers) - count:]
        if count > self.lending.lendable[not head] or not all(isinstance(each, nn.Module) for each in found):
            raise UnsupportedError(f"the plan lends {count} layers at the {'head' if head else 'tail'} of a stage that "
                                   f"lends {self.lending.lendable[not head]}: set lend to off")
        return [each for each in found if isinstance(each, nn.Module)]

    def give(self, head: bool, count: int) -> torch.Tensor:
        """The chunk's own first (``head``) or last ``count`` layers, `packed`. Raises UnsupportedError."""
        return packed(*self._lent(head, count))

    def _lent(self, head: bool, count: int) -> tuple[Sequence[nn.Module], bytes]:
        """The layers of `own`, and their options. Raises UnsupportedError if they cannot be lent."""
        if self.lending.refused:
            raise UnsupportedError(self.lending.refused)
        layers, end = self.own(head, count), self.lending.first + len(self.lending.layers)
        first = self.lending.first if head else end - count
        for number, layer in enumerate(layers, first):  # a helper's buffer has no room for anything else
            _check_alike([layer], self._began[number])
        self._check_apart(layers)
        return layers, self.options.told(first, first + count)

    def check(self, given: tuple[int, int], borrowed: bool = False) -> None:
        """Raises UnsupportedError if the script's changes make it impossible to lend ``given`` of the first and of the
        last layers, or, if ``borrowed``, to run others' here."""
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
        """Load the copies at this end from ``data``, which was `packed` by the lender. Raises UnsupportedError."""
        layers, first = self.borrowed(head), self.lending.first
        options = unpack(layers, data)
        start = first + len(self.lending.layers) if head else first - len(layers)
        put(options, dict(enumerate(layers, start)), self._options_set.get(head, b""))
        self._options_set[head] = options

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
        """``layer``, drawing its own random numbers on every run, including a checkpoint's recomputation."""
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
    """All parameters of ``layers``, in order."""
    return [parameter for layer in layers for parameter in layer.parameters()]


def packed(layers: Sequence[nn.Module], options: bytes) -> torch.Tensor:
    """The values of ``layers``, checksums of their structure, and their options (``options``), as bytes: `unpack` loads
    them into copies. Raises UnsupportedError."""
    if len(options) > _OPTIONS_SIZE:
        raise UnsupportedError(f"a lent layer's attributes take {len(options)} bytes to tell, of {_OPTIONS_SIZE}: set "
                               "lend to off")
    tensors = [_bytes(tensor) for tensor in _tensors(layers)]
    device = tensors[0].device if tensors else torch.device("cpu")
    header = torch.tensor([*_checksums(layers), len(options)])
    text = torch.frombuffer(bytearray(options.ljust(_OPTIONS_SIZE)), dtype=torch.uint8)
    return torch.cat([_bytes(header).to(device), text.to(device), *tensors])


def room(layers: Sequence[nn.Module]) -> torch.Tensor:
    """A tensor that takes the `packed` bytes of others like ``layers``."""
    tensors = _tensors(layers)
    return torch.empty(_HEADER + _OPTIONS_SIZE + sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8,
                       device=tensors[0].device if tensors else None)


def unpack(layers: Sequence[nn.Module], data: torch.Tensor) -> bytes:
    """Load `packed` bytes into ``layers``; returns the options. Raises UnsupportedError if the structures differ."""
    *checksums, length = data[:_HEADER].cpu().clone().view(torch.int64).tolist()
    _check_alike(layers, checksums)
    start = _HEADER + _OPTIONS_SIZE
    for tensor in _tensors(layers):
        end = start + tensor.nbytes
        # Unseen by autograd: forwards of an interrupted attempt with the same values may still have to run backward.
        tensor.data.copy_(data[start:end].clone().view(tensor.dtype).view(tensor.shape))
        start = end
    return data[_HEADER:_HEADER + length].cpu().numpy().tobytes()


def likeness(layer: nn.Module, without: Collection[str] = ()) -> int:
    """A checksum of a layer's modules, tensors and plain attributes, except attributes ``without``: equal for layers
    that are alike."""
    kinds = [(name, type(module).__qualname__, sorted((key, value) for key, value in vars(module).items() if (
                  isinstance(value, PLAIN) and key not in without and not key.startswith("_"))))
             for name, module in layer.named_modules()]
    return zlib.crc32(repr((kinds, _kinds([layer]))).encode())


def hooked(layer: nn.Module) -> bool:
    """Whether hooks of the script are called when ``layer`` runs, or on its gradients: copies do not have them."""
    return any(_hooks(module) for module in layer.modules()) or any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in layer.parameters())


_COMPARED = ("modules", "hooks", "parameters or buffers")
_HEADER = 8 * (len(_COMPARED) + 1)
_OPTIONS_SIZE = 2**14
"""Bytes, for options."""


def _check_alike(layers: Sequence[nn.Module], at_home: Sequence[int]) -> None:
    """Raises UnsupportedError if ``layers`` do not have the checksums ``at_home``."""
    other = [name for name, mine, home in zip(_COMPARED, _checksums(layers), at_home, strict=True) if mine != home]
    if other:
        raise UnsupportedError(f"a lent layer has other {' and '.join(other)} where it is at home than where it is "
                               f"built anew ({', '.join(type(layer).__name__ for layer in layers)}): the script has "
                               "changed it since the job began. Change it before, on all ranks alike, or set lend to "
                               "off")


def _checksums(layers: Sequence[nn.Module]) -> list[int]:
    """One checksum for each item of `_COMPARED`."""
    modules = [[(name, type(module).__qualname__) for name, module in layer.named_modules()] for layer in layers]
    hooks = [hooked(layer) for layer in layers]
    return [zlib.crc32(repr(each).encode()) for each in (modules, hooks, _kinds(layers))]


def _kinds(layers: Sequence[nn.Module]) -> list[Any]:
    return [[(name, tuple(tensor.shape), tensor.dtype)
             for name, tensor in (*layer.named_parameters(), *layer.named_buffers())] for layer in layers]


def _hooks(module: nn.Module) -> bool:
    # Hooks of the state dict are for saving and loading.
    return any(not isinstance(hook, _Draw) for key, found in vars(module).items()
               if key.endswith("_hooks") and "state_dict" not in key and found for hook in found.values())


def _tensors(layers: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
