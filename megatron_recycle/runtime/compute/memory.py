"""Measured bytes of a worker's micro-batches: activations, operands of delayed weight gradients, messages (promise P7).

A micro-batch holds its activations from its F to its B, and from its B to its W the operands of the delayed weight
gradients. The former are measured on early micro-batches: all have the same shapes, until the script says otherwise. On
a GPU the allocator counts them. On a CPU there is no such count: every tensor that the forward allocates is watched,
and those alive when the backward begins are counted, whatever holds them (autograd, a checkpoint, a module of the
user's).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_recycle.runtime.compute.device import Device
from megatron_recycle.runtime.compute.split import WeightQueue

_MEASURED = range(1, 3)
"""Measured forwards of this worker in a chunk: not the first, which also fills caches that stay."""

Item = tuple[int, ...]
"""Pipeline and micro-batch; if the stage has several chunks, also the chunk."""


class Held(NamedTuple):
    """Bytes of a micro-batch in one chunk.

    Attributes:
        before_b: held from its F to its B; 0 until measured.
        after_b: maximum held from its B to its W.
        message: size of the largest message from another stage.
    """

    before_b: int = 0
    after_b: int = 0
    message: int = 0


class ActivationMemory:
    """Bytes that this worker's micro-batches hold, as a running count, and in each chunk of its stage.

    Args:
        device: of the tensors.

    Attributes:
        peak: maximum held at a time in the last complete iteration.
        gathered: maximum of a W's inputs that were gathered from the worker's other parts; not in `peak`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._forwards: Counter[int] = Counter()  # these two by chunk
        self._held = defaultdict[int, Held](Held)
        self._watched: dict[Item, tuple[int, list[StorageWeakRef | int]]] = {}
        self._between: set[Item] = set()
        self._queued: dict[Item, int] = {}
        self._peak = self.peak = self.gathered = 0

    def held(self, chunk: int = 0) -> Held:
        """Bytes that a micro-batch holds in a chunk of the stage, as far as measured."""
        return self._held[chunk]

    @property
    def message(self) -> int:
        """Bytes of the largest message that a micro-batch gets from another stage."""
        return max((held.message for held in self._held.values()), default=0)

    @property
    def now(self) -> int:
        """Bytes held now."""
        return sum(self._held[_chunk(item)].before_b for item in self._between) + sum(self._queued.values())

    def begin(self) -> None:
        """A new iteration."""
        self.peak, self._peak = self._peak, 0
        self.give_up()

    def give_up(self) -> None:
        """Nothing is held any more."""
        self._watched.clear()
        self._between.clear()
        self._queued.clear()

    def measure_again(self) -> None:
        """Micro-batches may have other shapes from now on."""
        self._forwards.clear()

    @contextmanager
    def forward(self, microbatch: Item, inputs: Sequence[torch.Tensor] | None) -> Iterator[None]:
        """Around the F of ``microbatch``, whose ``inputs`` came from another worker."""
        received = nbytes(inputs or ())
        before = self._device.allocated()
        if self._forwards[_chunk(microbatch)] not in _MEASURED:
            yield
        elif before is not None:
            yield
            taken = (self._device.allocated() or 0) - before
            self._watched[microbatch] = received, [max(0, taken)]
        else:
            with _Watch() as watch:
                yield
            self._watched[microbatch] = received, list(watch.seen.values())
        self._forwards[_chunk(microbatch)] += 1
        self._between.add(microbatch)
        self._passed(microbatch, received)
        self._count()

    def begin_backward(self, microbatch: Item, gradients: Sequence[torch.Tensor]) -> None:
        """Before the B of ``microbatch``, for which ``gradients`` came from another worker."""
        self._passed(microbatch, nbytes(gradients))
        if microbatch in self._watched:
            received, watched = self._watched.pop(microbatch)
            # A storage without references has given its memory back.
            held = sum(one if isinstance(one, int) else _size(one) for one in watched)
            chunk = _chunk(microbatch)
            self._held[chunk] = self._held[chunk]._replace(before_b=received + held)
            self._count()

    def end_backward(self, microbatch: Item, queue: WeightQueue) -> None:
        """After the B of ``microbatch``, which left ``queue`` for its W."""
        self._between.discard(microbatch)
        self._queued[microbatch] = held = nbytes([
            *(tensor for item in queue.deferred for tensor in item.kept),
            *(gradient for _, gradient in queue.formed)])
        before = self._held[chunk := _chunk(microbatch)]
        self._held[chunk] = before._replace(after_b=max(before.after_b, held))
        self._count()

    def gather(self, rows: WeightQueue, whole: WeightQueue) -> None:
        """In a W, all inputs of ``rows`` were gathered: ``whole``."""
        self.gathered = max(self.gathered, nbytes(
            item.inputs for own, item in zip(rows.deferred, whole.deferred, strict=True) if item is not own))

    def weight(self, microbatch: Item) -> None:
        """After the W of ``microbatch``."""
        del self._queued[microbatch]

    def drop(self, microbatch: Item) -> None:
        """The F of ``microbatch`` is lost."""
        self._watched.pop(microbatch, None)
        self._between.discard(microbatch)

    def _passed(self, microbatch: Item, size: int) -> None:
        before = self._held[chunk := _chunk(microbatch)]
        self._held[chunk] = before._replace(message=max(before.message, size))

    def _count(self) -> None:
        self._peak = max(self._peak, self.now)


def _chunk(item: Item) -> int:
    return item[2] if len(item) > 2 else 0


class _Watch(TorchDispatchMode):
    """Records every allocation of a tensor's memory; views and in-place results make none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let code compiled by torch.compile() run compiled, as in all other forwards: its bits may differ."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = set(_storages((args, kwargs)))
        for number, storage in _storages(result).items():
            if number not in given and number not in self.seen:
                self.seen[number] = StorageWeakRef(storage)  # keeps the number from being used again
        return result


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


def _size(reference: StorageWeakRef) -> int:
    if reference.expired():
        return 0
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory of ``tensors``, with shared memory counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
