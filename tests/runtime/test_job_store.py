"""torch's store of a job is the coordinator's: groups are made of it, by whoever holds the token."""

from __future__ import annotations

import threading
from datetime import timedelta
from importlib import import_module
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_recycle.control.agent import Agent
from megatron_recycle.control.shelf_client import ShelfClient
from megatron_recycle.environment import Launched
from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm import job_store
from megatron_recycle.runtime.comm.job_store import open_store, tell_again
from megatron_recycle.runtime.comm.rendezvous import meet
from tests.membership.test_shelf import TOKEN, serving

LONG = timedelta(seconds=60)


def test_two_members_make_a_group_of_it_and_a_generation_that_is_over_waits_for_nobody():
    """As in a generation: each meets the other, gloo connects, and all of it through a PrefixStore, from C++."""
    with serving() as (control, _):
        launched = Launched(control=control, token=TOKEN)
        sums: list[float] = []

        def member(rank: int) -> None:
            store = open_store(launched, LONG, "recycle/g1/")
            meet(store, rank, [0, 1], lambda: False, 60, [f"word{rank}"])
            group = dist.ProcessGroupGloo(dist.PrefixStore("world", store), rank, 2, LONG)
            tensor = torch.tensor([float(rank + 1)])
            group.allreduce([tensor]).wait()
            sums.append(tensor.item())

        members = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
        for each in members:
            each.start()
        for each in members:
            each.join(60)
        assert sums == [3.0, 3.0]
        over = threading.Event()
        threading.Timer(0.05, over.set).start()
        with pytest.raises(GenerationOver):
            dist.PrefixStore("x", open_store(launched, LONG, "recycle/g2/", over.is_set)).get("nobody comes")


def test_what_a_process_has_put_there_is_there_after_the_coordinators_return_although_it_asks_for_nothing() -> None:
    with serving() as (control, _):
        launched = Launched(control=control, token=TOKEN)
        open_store(launched, LONG).set("k", "v")
    with serving(int(control.rpartition(":")[2])):
        link = Mock()
        Agent(control, TOKEN, "0:0", 0, "a worker", on_connect=lambda: tell_again(launched), link=link)
        link.call_args.kwargs["hello"]()
        assert ShelfClient(control, TOKEN).ask("get", ["k"], timeout=60).values == [b"v"]


def test_a_store_behaves_as_torchs_own(monkeypatch):
    """Also in the name of a TCPStore at the job's address; one at another port is torch's."""
    with serving() as (control, _):
        host, _, port = control.rpartition(":")
        for name, text in {"RECYCLE_COORDINATOR": control, "RECYCLE_TOKEN": TOKEN, "MASTER_ADDR": host,
                           "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1",
                           "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, text)
        for module in ("torch.distributed", "torch.distributed.rendezvous"):
            monkeypatch.setattr(import_module(module), "TCPStore", dist.TCPStore)
        job_store.take_over()
        own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        jobs = dist.TCPStore(host, int(port), is_master=False, timeout=LONG)
        assert isinstance(jobs, job_store.JobStore) and isinstance(own, dist.TCPStore)
        assert isinstance(dist.TCPStore(host_name="localhost", port=int(port)), job_store.JobStore)
        assert isinstance(jobs, dist.TCPStore) and not isinstance(own, job_store.JobStore)
        found = []
        for store in (dist.PrefixStore("p", own), dist.PrefixStore("p", jobs)):
            store.set("a", "1")
            store.append("a", "2")
            store.multi_set(["b", "c"], ["x", "y"])
            with pytest.raises(dist.DistStoreError):
                store.wait(["missing"], timedelta(milliseconds=10))
            found.append([store.get("a"), store.add("n", 3), store.add("n", -1), store.check(["a", "d"]),
                          store.compare_set("a", "12", "13"), store.compare_set("a", "12", "14"),
                          store.compare_set("new", "", "n"), store.compare_set("none", "x", "n"),
                          store.multi_get(["b", "c"]), store.delete_key("b"), store.delete_key("b"),
                          store.get("n")])
        assert found[0] == found[1]
        with pytest.raises(RuntimeError, match="3145728 bytes"):
            jobs.set("large", b"x" * (3 << 20))
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
