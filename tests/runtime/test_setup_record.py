"""A process that joins goes through its set-up alone: it is told what its rank was told at the start, or refused."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from megatron_recycle.errors import SetUpError
from megatron_recycle.runtime.comm import standalone as coming
from megatron_recycle.runtime.setup_record import SetUpRecorder

RANKS = 2


def script(rank: int, run: str) -> Any:
    """What a script may learn from others before it trains; the second run has another name of its own."""
    flags = torch.tensor([1, 1, 0] if rank == 0 else [0, 0, 0])
    dist.broadcast(flags, 0)
    name = [run if rank == 0 else None]
    dist.broadcast_object_list(name, 0)
    everybody: list[Any] = [None] * RANKS
    dist.all_gather_object(everybody, (rank, "hello"))
    total = torch.tensor([float(rank + 1)])
    later = dist.all_reduce(total, group=dist.new_group([0, 1]), async_op=True)
    dist.barrier()
    for parameter in nn.Linear(20, 20).parameters():
        dist.broadcast(parameter.data.view(torch.uint8), 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [("a",), ("b",)] if rank == 0 else None, src=0)
    received = torch.zeros(1)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(received, 0)
    alone = dist.new_group([rank], use_local_synchronization=True)
    own = torch.full((2,), float(rank))
    copy = torch.zeros(2)
    dist.all_gather_into_tensor(copy, own, group=alone)
    ranks = torch.tensor([rank + 1])
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("data", "pipe"))
    dist.all_reduce(ranks, group=mesh.get_group("data"))
    later.wait()
    dist.monitored_barrier()
    libraries = [(dist.get_backend(group), dist.get_backend_config(group), c10d._get_object_coll_device(group),
                  sorted(c10d._device_capability(group))) for group in (None, alone, mesh.get_group("data"))]
    return flags.tolist(), name, everybody, total.item(), mine, received.item(), copy.tolist(), ranks.item(), libraries


def another_course(rank: int, run: str) -> None:
    dist.broadcast(torch.zeros(3), 0)  # of another type


def too_little(rank: int, run: str) -> None:
    dist.broadcast(torch.tensor([1, 1, 0]), 0)


def _start(rank: int, folder: Path, answer: Any) -> None:
    recorder = SetUpRecorder().begin()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    told = script(rank, "first")
    answer.send((told, json.dumps(recorder.close())))


def _join(rank: int, record: str, body: Callable[[int, str], Any], answer: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), RECYCLE_COORDINATOR="here:1", RECYCLE_TOKEN="token",
                      TORCH_DIST_INIT_BARRIER="1")
    coming.ask_record = lambda *_: json.loads(record)
    setup = coming.stand_alone()
    begun = dist.is_initialized()
    dist.init_process_group("gloo")
    try:
        assert dist.is_initialized() and not begun  # what it asks before is as at the start, too
        told = body(rank, "second, with a longer name")
        unasked = coming.came_to_nothing()
        setup.close()
    except SetUpError as error:
        answer.send(str(error))
        return
    try:
        dist.all_reduce(torch.ones(1))
    except SetUpError as error:
        answer.send((told, unasked, coming.came_to_nothing(), str(error)))


def _in_processes(body: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What ``body(*arguments, pipe)`` sends, one process for each; forked from one that has torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.runtime.test_setup_record"])
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    processes = [context.Process(target=body, args=(*one, theirs)) for one, (_, theirs) in zip(arguments, pipes)]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(60), "no answer"
        return [ours.recv() for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, str]]:
    """Of each rank of the start: what its script was told, and the record."""
    folder = tmp_path_factory.mktemp("store")
    return _in_processes(_start, [(rank, folder) for rank in range(RANKS)])


def test_one_that_joins_is_told_what_its_rank_was_told(started):
    again = _in_processes(_join, [(rank, record, script) for rank, (_, record) in enumerate(started)])
    for (told, _), (told_again, unasked, asked, refusal) in zip(started, again):
        assert json.dumps(told_again) == json.dumps(told) and "first" in told_again[1]
        assert "come to its end without training" in unasked and asked is None
        # From then on its groups know nothing any more.
        assert "torch.distributed.all_reduce([1] x float32) over 2 ranks" in refusal


def test_nothing_is_kept_of_parameters(started):
    for _, record in started:
        assert len(record) < 2000


@pytest.mark.parametrize(("body", "names"), [
    (another_course, ["nobody can answer torch.distributed.broadcast([3] x float32)", "did torch.distributed.broadcast"
                      "([3] x int64)"]),
    (too_little, ["left out", "torch.distributed.broadcast([1] x int64)"])])
def test_one_whose_set_up_takes_another_course_is_refused_by_name(body, names, started):
    refusal, = _in_processes(_join, [(0, started[0][1], body)])
    assert all(name in refusal for name in names), refusal


def test_what_is_too_long_to_be_kept_is_refused_when_it_is_asked_for():
    recorder = SetUpRecorder()
    recorder.note("load", lambda: {"iteration": 4})
    for _ in range(10_000):
        recorder.note("again", lambda: None)
    record = recorder.close()
    assert len(record) < 6000 and record[-1] == {"what": "more than was kept"}
    from megatron_recycle.runtime.setup_record import SetUpReplay
    replay = SetUpReplay(record)
    assert replay.note("load", dict) == {"iteration": 4}
    with pytest.raises(SetUpError, match="more than was kept"):
        for _ in range(10_000):
            replay.note("again", dict)
