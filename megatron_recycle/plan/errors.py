"""The two error types of the plan package, apart so that every module here can raise them."""

from __future__ import annotations


class PlanError(ValueError):
    """A problem or a plan that is malformed or cannot be solved; the message is one line that names the fault."""


class DeadlockError(PlanError):
    """An order of actions in which some action can never start; the message names that action and its worker."""
