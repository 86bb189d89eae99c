"""The planner: a legal plan for any membership at once, a better one within a budget."""

from .api import improve, plan_for, quick, recosted
from .cache import Cache, ahead
from .normalise import Prices, normalise
from .profile import Profile, caps, drifted

__all__ = ["Cache", "Prices", "Profile", "ahead", "caps", "drifted", "improve", "normalise", "plan_for", "quick",
           "recosted"]
