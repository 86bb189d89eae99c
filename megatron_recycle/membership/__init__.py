"""Membership: the pure state machine that decides who is in the job and what happens next, and the worker's half of the
protocol. No clock, socket, file or thread."""

from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.inputs import THE_END
from megatron_recycle.membership.names import Process, workers_of
from megatron_recycle.membership.protocol import Offer
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.standing import Reconciliation, Standing
from megatron_recycle.membership.verdict import StepMode, Verdict

__all__ = ["THE_END", "Fault", "Offer", "Process", "Reconciliation", "Resume", "Standing", "StepMode", "Verdict",
           "workers_of"]
