"""The versions of megatron-core that this backend is written for; checked before it imports anything that another
version may lack."""

from __future__ import annotations

from megatron.core import __version__ as version
from packaging.version import InvalidVersion, Version

from megatron_recycle.errors import UnsupportedError

SUPPORTED = (0, 16)


def check_version() -> None:
    """Raises UnsupportedError that names the installed version if it is not one this was written for."""
    try:
        supported = Version(version).release[:2] == SUPPORTED
    except InvalidVersion:
        supported = False
    if not supported:
        raise UnsupportedError(f"megatron-core {version} is not supported: the schedule's parts that the plugin builds "
                               "on differ between versions; install megatron-core 0.16.1")
