"""The versions of megatron-core that this backend supports; checked before any name is used that other versions may
lack, or use with another meaning."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from megatron_recycle.backends.releases import Release, release_of
from megatron_recycle.errors import UnsupportedError

TESTED: Mapping[Release, str] = {(0, 16): "0.16.1", (0, 17): "0.17.1", (0, 18): "0.18.2", (0, 19): "0.19.2"}
"""First two numbers of each supported version -> the tested release."""
_OF_CORE = "megatron.core.package_info"
_NUMBER = re.compile(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", re.MULTILINE)


def installed() -> str:
    """The version of this process's core; also while it is still being imported. Empty if it has none."""
    try:
        return str(import_module(_OF_CORE).__version__)
    except (ImportError, AttributeError):
        return ""


def release() -> Release:
    """The installed version's numbers, such as (0, 16, 1)."""
    return release_of(installed())


def is_supported() -> bool:
    """Whether this backend supports it, and the loop beside it. Only then private names of both are used."""
    return release()[:2] in TESTED and not _is_mixed()


def _is_mixed() -> bool:
    """Whether Megatron-LM's loop, if loaded, is of another version."""
    loop = of_the_loop()
    return loop is not None and loop[:2] != release()[:2]


def check_version() -> None:
    """Raises UnsupportedError, naming the installed version, if that is not supported, or if Megatron-LM's loop, if
    loaded, is of another."""
    if release()[:2] not in TESTED:
        raise UnsupportedError(
            f"megatron-core {installed()} is not supported: the schedule's parts that the plugin builds on differ "
            f"between versions; install megatron-core {' or '.join(TESTED.values())}")
    if _is_mixed():
        loop = of_the_loop() or ()
        raise UnsupportedError(
            f"megatron-core {installed()} with Megatron-LM {'.'.join(map(str, loop))} is not supported: its training "
            f"loop is written for the core of its own version; check out core_v{TESTED[release()[:2]]} of Megatron-LM, "
            "or let Python find the core of the same checkout first (PYTHONPATH)")


def of_the_loop() -> Release | None:
    """The core version of Megatron-LM's training loop, if it is loaded and has one."""
    for folder in getattr(sys.modules.get("megatron.training"), "__path__", ()):
        with suppress(OSError):
            found = _NUMBER.findall((Path(folder).parent / "core" / "package_info.py").read_text())
            return tuple(map(int, found))
    return None
