"""Adds the examples to the package; all else stands in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
EXAMPLES = (
    "scripts/quickstart.py", "scripts/jobs.py", "scripts/gpt_deepspeed.py", "scripts/pretrain_gpt_megatron.py",
    "scripts/megatron_cpu.py", "scripts/slurm/deepspeed.sbatch", "scripts/slurm/megatron.sbatch",
    "scripts/slurm/apart.sh", "docs/runbook.md",
)
"""What `megatron_recycle.tools` finds in a checkout's scripts/ and docs/, and in a wheel beside it."""


class Build(build_py):
    """A wheel has the examples too, from the one place where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # those of the checkout are found
        for name in EXAMPLES:
            target = Path(self.build_lib, "megatron_recycle", "examples_data", name.removeprefix("scripts/"))
            self.mkpath(str(target.parent))
            self.copy_file(str(HERE / name), str(target))


setup(cmdclass={"build_py": Build})
