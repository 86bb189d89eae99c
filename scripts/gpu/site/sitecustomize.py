"""Python runs this as it starts, where `one_gpu.py` has put the folder on PYTHONPATH: before torch is there."""

import os
import runpy
from pathlib import Path

if "RANK" in os.environ:
    one_gpu = runpy.run_path(str(Path(__file__).resolve().parent.parent / "one_gpu.py"))
    os.environ.update(one_gpu["variables"](os.environ))
