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
from megatron_recycle.control.store_client import StoreClient
from megatron_recycle.environment import Launched
from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm import job_store
from megatron_recycle.runtime.comm.job_store import open_store, tell_again
from megatron_recycle.runtime.comm.rendezvous import meet
from tests.membership.test_rendezvous_store import TOKEN, serving

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=10)
CALLS = [
    ("set", "a", "1"), ("get", "a"), ("get", b"a"), ("set", "bytes", b"\x00\xff"), ("get", "bytes"), ("set", "", b""),
    ("get", ""), ("set", "\xfc", "\xf6"), ("get", "\xfc"), ("append", "a", "2"), ("append", "new", "1"), ("get", "a"),
    ("add", "n", 3), ("add", "n", -4), ("add", "n", 0), ("add", "n", True), ("get", "n"), ("add", "zero", 0),
    ("get", "zero"), ("check", ["a", "n"]), ("check", ["a", "none"]), ("check", []), ("wait", ["a"]), ("wait", []),
    ("wait", ["none"], SHORT), ("compare_set", "a", "12", "13"), ("compare_set", "a", "12", "14"),
    ("compare_set", "first", "", "x"), ("compare_set", "none", "x", "y"), ("check", ["none"]),
    ("multi_set", ["b", "c"], ["x", "y"]), ("multi_get", ["c", "b"]), ("multi_set", [], []), ("multi_get", []),
    ("multi_set", ["b"], ["x", "y"]), ("delete_key", "b"), ("delete_key", "b"), ("has_extended_api",),
    ("barrier", "all", 1), ("barrier", "nobody", 2, SHORT), ("set_timeout", SHORT), ("timeout",), ("get", "none"),
    ("set_timeout", LONG)]
"""What a script may ask a store for; ``timeout`` is no call."""
LACKS = ("queue_push", "queue_len", "queue_pop", "num_keys", "libuvBackend")
"""No queues; of keys there are the plugin's, too; and no server of torch's."""


def called(store, name, arguments):
    """The answer, or that there is none."""
    try:
        found = getattr(store, name)
        return found(*arguments) if callable(found) else found
    except RuntimeError:
        return RuntimeError


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
        assert StoreClient(control, TOKEN).ask("get", ["k"], timeout=60).values == [b"v"]


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
        for of in (lambda store: store, lambda store: dist.PrefixStore("p", store)):
            for name, *arguments in CALLS:
                found = [called(of(store), name, arguments) for store in (own, jobs)]
                assert found[0] == found[1], (name, arguments)
        names = [{key for key in store.list_keys() if "/" not in key} for store in (own, jobs)]
        assert names[0] - {"all", "nobody"} == names[1]  # where torch's barriers count
        assert (jobs.host, jobs.port) == (host, int(port)) and isinstance(jobs.clone(), job_store.JobStore)
        named = {name for name in dir(dist.TCPStore) if not name.startswith("_")}
        assert named == {name for name, *_ in CALLS} | {"list_keys", "host", "port", "clone"} | {*LACKS}
        for name, *arguments in (("queue_push", "q", "v"), ("queue_len", "q"), ("queue_pop", "q")):
            with pytest.raises(NotImplementedError, match="not implemented"):
                getattr(jobs, name)(*arguments)
        with pytest.raises(RuntimeError, match="3145728 bytes"):
            jobs.set("large", b"x" * (3 << 20))
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
