"""Runs a script of Megatron's over the ordered backend, under the rules that all jobs are to keep:

    script.py scripts/megatron_cpu.py PATH/pretrain_gpt.py ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.ordered.jobs import install_for_megatron
from tests.ordered.rules import Rules

if __name__ == "__main__":
    rules = Rules.of_all()
    assert rules is not None, "pytest --ordered has started this"
    install_for_megatron(rules)
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
