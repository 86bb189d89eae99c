"""Releases of a framework, by their numbers."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

Release = tuple[int, ...]
"""The numbers of a version, such as (0, 16, 1), or the first ones of them."""


def release_of(version: str) -> Release:
    """The numbers of ``version`` without build labels ("0.16.1+g55ac" is 0.16.1); empty if it is no version."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()
