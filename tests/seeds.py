"""How many seeds a random campaign tries: a few in the default tier, as many as CAMPAIGN_SEEDS says at night."""

from __future__ import annotations

import os


def seeds(usual: int) -> range:
    """``usual``, or CAMPAIGN_SEEDS if that is set: ``CAMPAIGN_SEEDS=5000 scripts/test.sh tests/memory``."""
    return range(int(os.environ.get("CAMPAIGN_SEEDS") or usual))
