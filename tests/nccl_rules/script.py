"""Runs a script of a framework's over the ordered backend, under the rules that all jobs are to keep:

    script.py megatron scripts/megatron_cpu.py PATH/pretrain_gpt.py ARGUMENTS
    script.py deepspeed PATH/train.py ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import ModuleType


def name_tests() -> None:
    """Let `tests` be this repository's, which is a folder: wherever it is in sys.path, Megatron-LM's checkout, which
    has a package of that name, would come before it."""
    tests = ModuleType("tests")
    tests.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["tests"] = tests


if __name__ == "__main__":
    name_tests()
    from tests.nccl_rules.jobs import install, install_for_megatron
    from tests.nccl_rules.rules import Rules

    rules = Rules.of_all()
    assert rules is not None, "pytest --nccl-rules has started this"
    {"megatron": install_for_megatron, "deepspeed": install}[sys.argv[1]](rules)
    del sys.argv[:2]
    sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
