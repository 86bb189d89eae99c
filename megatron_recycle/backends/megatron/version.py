"""The versions of megatron-core that this backend is written for; checked before it imports anything that another
version may lack."""

from __future__ import annotations

from megatron.core import __version__ as version

from megatron_recycle.errors import UnsupportedError

SUPPORTED = "0.16"


def check_version() -> None:
    """Raises UnsupportedError that names the installed version if it is not one this was written for."""
    if version.rpartition(".")[0] != SUPPORTED:
        raise UnsupportedError(f"megatron-core {version} is not supported: the schedule's parts that the plugin builds "
                               f"on differ between versions; install megatron-core {SUPPORTED}.1")
