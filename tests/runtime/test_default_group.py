"""torch's default group while some of its ranks are gone, in a process that believes to be one of four."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron_recycle.runtime.comm.abort import foreign
from megatron_recycle.runtime.comm.default_group import World
from megatron_recycle.runtime.comm.threads import Threads

dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
left, peers = dist.new_group([1, 2, 3]), dist.new_group([0, 2])
def seen():
    return (dist.get_rank(), dist.get_world_size(), dist.get_rank(peers), dist.get_process_group_ranks(left),
            dist.get_process_group_ranks(peers))
before, world = seen(), World(Threads())
try:
    with world.renumbered(foreign(left)):
        print(seen())
        raise KeyError
except KeyError:
    print(seen() == before, before)
"""


def test_those_that_are_left_are_numbered_anew_in_all_groups_and_nobody_has_the_number_of_one_that_is_gone():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=110,
                          check=True)
    assert done.stdout.splitlines() == ["(1, 3, 1, [0, 1, 2], [3, 1])", "True (2, 4, 1, [1, 2, 3], [0, 2])"]
