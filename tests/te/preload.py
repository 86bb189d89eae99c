"""Imported first by the server that the workers of `tests.te.job` are forked from."""

from __future__ import annotations

import os
from pathlib import Path

from tests.te import stand_in
from tests.te.job import FOLDER

stand_in.install(Path(os.environ[FOLDER]))
