"""Imported last by the server that test workers are forked from: what it has loaded is no garbage, and no collection in
a worker looks at it again, or copies its pages."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
