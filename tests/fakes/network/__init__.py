"""A network in memory, for tests: all processes of a job are threads of one process.

It has the interface of torch's (`network.Network`, `Comm`) and its manners. As gloo's, a send ends when its receive is
there, reads its tensor only then, and is lost if it is let go of before; a process that dies or aborts closes its
connections, which its partners notice by and by, or (cut off) never. With ``ordered``, NCCL's: what a process posts on
a communicator runs in that order, each operation after the one before it has ended, tags mean nothing, a dead partner
is silent, and after an abort everything says that it went well and left garbage.

Messages are delayed and overtake each other, as the seed says, but for those of one pair with one tag.
"""

from __future__ import annotations

from tests.fakes.network.ends import IN_MEMORY, Killed
from tests.fakes.network.fabric import Fabric
from tests.fakes.network.process import MemoryNetwork
from tests.fakes.network.schedule import Stuck

__all__ = ["IN_MEMORY", "Fabric", "Killed", "MemoryNetwork", "Stuck"]
