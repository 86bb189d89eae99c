"""The planner: a legal plan for any membership at once, a better one within a budget."""

from .api import improve, quick

__all__ = ["improve", "quick"]
