"""`recycle run` with a plain interpreter for its workers, so that they need not load a framework.

With RECYCLE_TEST_STORE=1 in its environment the job has torch's store, which takes seconds to load.
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_recycle.launch import command

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args()
    store = os.environ.get("RECYCLE_TEST_STORE") == "1"
    sys.exit(command.launch(args, [sys.executable, args.script, *args.arguments], store=store))
