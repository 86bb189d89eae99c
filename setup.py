"""Package definition. Exact tested versions are in scripts/constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
INIT = (HERE / "megatron_recycle/__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)
assert VERSION is not None, "megatron_recycle/__init__.py must state __version__"

setup(
    name="megatron-recycle",
    version=VERSION.group(1),
    description="Training that goes on when workers fail: ReCycle for DeepSpeed and Megatron",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_recycle", "megatron_recycle.*"]),
    package_data={"megatron_recycle": ["py.typed"]},
    install_requires=[
        "torch>=2.6",
        "ortools>=9.10",
        "numpy>=1.26",
        "rich>=13",
        "matplotlib>=3.8",
        "packaging>=22",
    ],
    extras_require={
        "deepspeed": ["deepspeed>=0.19.6,<0.20"],
        "megatron": ["megatron-core>=0.16,<0.20", "einops>=0.8"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "networkx>=3",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.10",
        ],
    },
    entry_points={"console_scripts": ["recycle = megatron_recycle.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
    ],
)
