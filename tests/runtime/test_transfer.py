"""How a stage's state is cut up, shared out and written down."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_recycle.runtime import bundle as transfer


@settings(deadline=None)
@given(some.lists(some.integers(0, 50), max_size=12), some.integers(1, 4), some.integers(1, 9))
def test_every_byte_is_sent_once_and_no_peer_sends_much_more_than_its_share(sizes, givers, limit):
    named = {str(index): size for index, size in enumerate(sizes)}
    cut = transfer.pieces(named, givers, limit)
    for name, size in named.items():
        spans = [(piece.start, piece.stop) for piece in cut if piece.name == name]
        assert [byte for start, stop in spans for byte in range(start, stop)] == list(range(size))
    shares = [sum(piece.stop - piece.start for piece in cut if piece.giver == giver) for giver in range(givers)]
    assert sum(shares) == sum(sizes) and max(shares) <= math.ceil(sum(sizes) / givers) + limit


@pytest.mark.parametrize("value", [
    None, True, 3, 0.1 + 0.2, math.inf, "text", (1, 2), [1, (2.5, None)], {"betas": (0.9, 0.999), 4: [], "a": {}},
    Counter({3: 1, 7: 2})], ids=repr)
def test_counters_come_back_equal_and_of_the_same_types(value: Any):
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(transfer.written(value, tensors))
    read = transfer.read(json.loads(text), tensors)
    assert read == value and type(read) is type(value) and repr(read) == repr(value)


def test_tensors_among_the_counters_travel_as_tensors():
    tensors = {"parameter 0": torch.zeros(2)}
    written = json.loads(json.dumps(transfer.written({"scale": torch.tensor(3.0)}, tensors)))
    assert len(tensors) == 2
    assert transfer.read(written, tensors)["scale"].item() == 3.0 and list(tensors) == ["parameter 0"]


def test_what_cannot_be_written_is_named_to_the_one_that_comes_in():
    written = transfer.written({"when": range(3)}, {})
    with pytest.raises(transfer.TransferError, match="range"):
        transfer.read(written, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float16])
def test_any_type_is_sent_as_its_bytes(dtype: torch.dtype):
    for tensor in (torch.ones(3, 2, dtype=dtype), torch.ones((), dtype=dtype), torch.ones(4, 3, dtype=dtype).t()):
        flat = transfer.bytes_of(tensor)
        assert flat.numel() == tensor.numel() * tensor.element_size()
        assert flat.view(dtype).reshape(tensor.shape).equal(tensor)
