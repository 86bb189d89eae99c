"""Error types of the plan package, in a module that all others here can import."""

from __future__ import annotations


class PlanError(ValueError):
    """Malformed or unsolvable problem or plan; the message is one line that names the fault."""


class DeadlockError(PlanError):
    """Order of actions in which some action can never start; the message names that action and its worker."""
