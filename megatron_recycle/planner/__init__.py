"""The planner: a legal plan for any membership at once, and a better plan within a budget."""

from .api import improve, plan_for, quick, recosted
from .cache import Cache, ahead
from .connection_price import ConnectionPrice
from .lending_gain import CopyPrice, worth
from .normalise import Prices, normalise
from .redo import redo

__all__ = ["Cache", "ConnectionPrice", "CopyPrice", "Prices", "ahead", "improve", "normalise", "plan_for", "quick",
           "recosted", "redo", "worth"]
