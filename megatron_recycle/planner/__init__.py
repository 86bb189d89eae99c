"""The planner: a legal plan for any membership at once, a better one within a budget."""

from .api import improve, plan_for, quick, recosted
from .cache import Cache, ahead
from .normalise import Prices, normalise
from .partners import PartnerPrice
from .redo import redo
from .worth import CopyPrice, worth

__all__ = ["Cache", "CopyPrice", "PartnerPrice", "Prices", "ahead", "improve", "normalise", "plan_for", "quick",
           "recosted", "redo", "worth"]
