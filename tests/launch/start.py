"""`recycle run` with a plain interpreter for its workers, so that they need not load a framework.
"""

from __future__ import annotations

import argparse
import sys

from megatron_recycle.launch import command

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args()
    sys.exit(command.launch(args, [sys.executable, args.script, *args.arguments]))
