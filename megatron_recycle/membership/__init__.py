"""Who is in the job: a pure state machine, the coordinator around it, and the agent in every worker.

Standard library, `megatron_recycle.plan` and the leaves only; the planner comes in as a callable.
"""

from megatron_recycle.membership.agent import Agent, Ended, Go, Offer, Stop
from megatron_recycle.membership.coordinator import Coordinator, Timeouts
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.inputs import THE_END
from megatron_recycle.membership.learnt import ask_record
from megatron_recycle.membership.names import Process, workers_of
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.store import Journal, JournalError, JournalInUse
from megatron_recycle.membership.wire import WireError

__all__ = [
    "THE_END",
    "Agent",
    "Coordinator",
    "Ended",
    "Fault",
    "Go",
    "Journal",
    "JournalError",
    "JournalInUse",
    "Offer",
    "Process",
    "Resume",
    "Stop",
    "Timeouts",
    "WireError",
    "ask_record",
    "workers_of",
]
