"""Error types of the plugin.

Every message says what happened and what to do about it: it is often the only thing the user of a thousand-worker job
sees. `PlanError` is not here: plans are pure data and import the standard library only, so `megatron_recycle.plan` has
its own (a `ValueError`).
"""

from __future__ import annotations

from collections.abc import Callable


class RecycleError(Exception):
    """Base of all errors raised by megatron_recycle, except `plan.PlanError`."""


class ConfigError(RecycleError):
    """A key, value or combination of settings that is not accepted; the message names the remedy."""


class UnsupportedError(RecycleError):
    """The model, optimizer or engine uses a feature that the plugin cannot keep correct yet."""


class LendingError(UnsupportedError):
    """Layers of ``stage`` cannot be lent as planned, or not any more; the job can go on without lending."""

    def __init__(self, message: str, stage: int) -> None:
        super().__init__(message)
        self.stage = stage


class SetUpError(RecycleError, RuntimeError):
    """A joining process asked for set-up results that no running process can give."""


class DataError(RecycleError):
    """Training data that cannot be addressed by iteration, pipeline and micro-batch, or whose readers disagree."""


class VerificationError(RecycleError):
    """A check of results failed, for instance peers whose parameters differ."""


class TransferError(RecycleError):
    """The state of a stage did not arrive, or does not fit; the worker that waits for it cannot come in."""


class SaveError(RecycleError):
    """A checkpoint cannot be written, for a reason of the disk that the message names. ``clear`` removes its partial
    files once all writers have stopped."""

    def __init__(self, message: str, clear: Callable[[], None] = lambda: None) -> None:
        super().__init__(message)
        self.clear = clear


class GenerationOver(RecycleError):
    """The generation cannot go on here: it was ended, or a transfer in it has failed.

    Raised in the training thread by `runtime.comm`, for any error of the communication library, and by the runtime when
    the coordinator has stopped the generation. The answer is a report, and a wait for the next generation. A user sees
    it only if it escapes, which is a bug.
    """


class FailureMet(GenerationOver):
    """A failure, not a wrong guess, has ended the generation here. Peers may still be in the same exchange, so no
    further exchange may use these groups."""


class JobEnded(RecycleError):
    """The coordinator ended the job.

    `status` is the exit status that the process should end with: 0 for an ordinary end, anything else for a
    job that cannot go on.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
