"""Imported first by the server that the workers of `tests.bridge.job` are forked from."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from tests.bridge import stand_in as bridge
from tests.te import preload as engine

assert engine
bridge.install(Path(os.environ[bridge.FOLDER]))
importlib.import_module("megatron.bridge.training.pretrain")
importlib.import_module("megatron.bridge.training.gpt_step")
