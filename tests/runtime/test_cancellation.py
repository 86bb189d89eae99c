"""Whoever waits for a tensor of which a part has come is freed as well."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.tags import WORLD
from tests.runtime.comms import gloo

LARGE = 1 << 26


def waiting(call) -> tuple[threading.Thread, list[str]]:
    said: list[str] = []

    def run() -> None:
        try:
            call()
        except GenerationOver as error:
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, said


def cut_in_the_midst() -> tuple[Comm, Pending, Comm, Pending]:
    for _ in range(5):
        near, far = gloo(2, WORLD)
        tensor = torch.zeros(LARGE)
        receiving = near.receive(tensor, 1, 0)
        sending = far.send(torch.ones(LARGE), 0, 0)
        while not tensor[0]:
            pass
        far.abort()
        if not tensor[-1]:
            return near, receiving, far, sending
    pytest.skip("this machine moves 256 MiB faster than it can be cut off")


def test_a_transfer_that_was_cut_off_in_its_midst_is_left_on_both_sides():
    near, receiving, _far, sending = cut_in_the_midst()
    (receiver, heard), (sender, told) = waiting(receiving.wait), waiting(sending.wait)
    near.abort()
    for thread in receiver, sender:
        thread.join(60)
    assert not receiver.is_alive() and not sender.is_alive()
    assert all("gloo was in the midst of a transfer when its connection was closed" in said for said in (*heard, *told))
    assert "receiving activations or gradients from rank 1" in heard[0] and "to rank 0" in told[0]


def test_what_is_not_stuck_fails_and_ends_as_ever():
    near, far = gloo(2, WORLD)
    ones = [torch.ones(3), torch.ones(3)]
    threads = [waiting(end.sum(one).wait)[0] for end, one in zip((near, far), ones)]
    for thread in threads:
        thread.join(60)
    assert ones[0].tolist() == ones[1].tolist() == [2.0] * 3
    reducing, said = waiting(near.sum(torch.ones(3)).wait)
    near.abort()
    reducing.join(60)
    assert not reducing.is_alive()
    assert said and "adding up over 2 workers failed" in said[0]
