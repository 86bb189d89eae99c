"""Messages between stages: their names, and the shapes of their tensors as a channel's header encodes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import Message, Worker

__all__ = ["HEADER_SIZE", "Chunks", "Message", "Meta", "boundary", "decode_header", "encode_header", "in_words",
           "meta_of", "wire"]

Meta = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""dtype and shape of each tensor of a message."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16,
           torch.int32, torch.int64, torch.bool)
HEADER_SIZE = 128
"""Numbers in a header."""


Chunks = Sequence[Sequence[int]]
"""The chunks of each stage, counted through the model (`Problem.chunks_of`); (): each stage is one."""


def boundary(chunks: Chunks, reader: Worker, message: Message) -> int:
    """The boundary between two chunks that ``message`` crosses, by the number of the later chunk. All activations over
    a boundary have the same shapes, and so have the gradients that come back over it."""
    chunk = chunks[reader.stage][message.chunk] if chunks else reader.stage
    return chunk if message.kind == "F" else chunk + 1


def meta_of(tensors: Sequence[torch.Tensor]) -> Meta:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def encode_header(meta: Meta) -> torch.Tensor:
    """``meta`` as an int64 tensor of fixed size."""
    numbers = [len(meta)]
    for dtype, shape in meta:
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > HEADER_SIZE:
        raise UnsupportedError(f"a stage boundary of {len(meta)} tensors is too large to announce; "
                               "pass fewer tensors between layers")
    return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64)


def decode_header(header: torch.Tensor) -> Meta:
    numbers = deque(header.tolist())
    return tuple((_DTYPES[numbers.popleft()], tuple(numbers.popleft() for _ in range(numbers.popleft())))
                 for _ in range(numbers.popleft()))


def in_words(meta: Meta | None) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in meta or ())


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every backend can move."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
