"""`recycle example`: starter training scripts and Slurm scripts, from a checkout or the installed package."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from megatron_recycle.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]

EXAMPLES = {
    "deepspeed": (("gpt_deepspeed.py",), "recycle run --nproc 4 {}/gpt_deepspeed.py --stages 2 --iterations 20"),
    "megatron": (("pretrain_gpt_megatron.py", "gpt_deepspeed.py", "megatron_cpu.py"),
                 "recycle run --nproc 4 {}/pretrain_gpt_megatron.py --stages 2 --iterations 20"),
}
"""Name of an example -> its files, and the command that runs it on four processes."""


def folder() -> Path:
    """Folder of the examples: in an installed package, else in scripts/. Raises ConfigError."""
    for found in (_PACKAGE / "examples_data", _PACKAGE.parent / "scripts"):
        if (found / "gpt_deepspeed.py").exists():
            return found
    raise ConfigError("this installation has no examples: install megatron-recycle anew, or use a checkout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle example`."""
    parser.add_argument("name", choices=tuple(EXAMPLES), help="the framework")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where to write it (default: here)")


def run(args: argparse.Namespace) -> int:
    """Copy an example's files, name them on stderr, and print the command that runs it; returns 0.

    Raises:
        ConfigError: one of the files is there already, or the folder cannot be made.
    """
    files, command = EXAMPLES[args.name]
    existing = next((args.folder / name for name in files if (args.folder / name).exists()), None)
    if existing is not None:
        raise ConfigError(f"{existing} is there already: give another folder")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            shutil.copyfile(folder() / name, args.folder / name)
    except OSError as error:
        raise ConfigError(f"{args.folder} cannot be written: {error.strerror}") from error
    paths = ", ".join(str(args.folder / name) for name in files)
    print(f"recycle example: wrote {paths}, which starts by", file=sys.stderr)
    print(command.format(args.folder))
    return 0
