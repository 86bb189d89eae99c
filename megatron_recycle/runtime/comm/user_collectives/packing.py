"""Tensors as bytes in CPU memory, as they travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_recycle.runtime.comm.comm import Comm

Tensors = Sequence[torch.Tensor]


def token() -> torch.Tensor:
    """Placeholder for an empty transfer."""
    return torch.zeros(1, dtype=torch.uint8)


def size(tensors: Tensors) -> int:
    """Size in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def buffer(tensors: Tensors) -> torch.Tensor:
    """A buffer for the bytes of tensors like these, as `packed` makes them."""
    return torch.zeros(max(1, size(tensors)), dtype=torch.uint8)


def packed(tensors: Tensors) -> torch.Tensor:
    """``tensors`` as a new tensor of bytes in CPU memory; never empty."""
    pieces = [tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in tensors if tensor.numel()]
    return torch.cat(pieces) if pieces else token()


def unpacked(data: torch.Tensor, like: Tensors) -> Tensors:
    """Tensors from the bytes that `packed` has made, with the types, shapes and devices of ``like``."""
    found, start = [], 0
    for tensor in like:
        end = start + size([tensor])
        # A copy: elements must begin at a multiple of their size.
        piece = data[start:end].clone().view(tensor.dtype).reshape(tensor.shape)
        found.append(piece.to(tensor.device))
        start = end
    return found


def rows_of_all(comm: Comm, rows: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """The rows of all members of ``comm``, which all call this; the first number of a row is not 0. Raises
    GenerationOver."""
    widths = torch.zeros(comm.size, dtype=torch.float64)
    widths[comm.rank] = len(rows)
    comm.sum(widths).wait()
    table = torch.zeros(comm.size, int(widths.max()), 2, dtype=torch.float64)
    if not table.numel():
        return set()
    if rows:
        table[comm.rank, :len(rows)] = torch.tensor(rows, dtype=torch.float64)
    comm.sum(table).wait()
    return {(key, number) for key, number in table.flatten(0, 1).tolist() if key}
