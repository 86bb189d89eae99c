"""The form in which a backend lists what it uses of its framework without a promise that it stays.

A framework may rename such a name, or change its meaning, in any release. So each backend lists all of them in one
module (`private.py` in its folder) with the releases that have them, and tests look each of them up in every release
that is installed. Nothing of a framework is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

Release = tuple[int, ...]
"""The numbers of a version, such as (0, 16, 1), or the first ones of them."""


@dataclass(frozen=True)
class Private:
    """Names of one module.

    Attributes:
        module: the dotted name.
        names: separated by blanks; ``Class.member`` is a method, an attribute of the class, or one that a method sets.
        since: the first release that has them; none: all supported ones.
        before: the first release without them; none: all supported ones have them.
    """

    module: str
    names: str
    since: Release = ()
    before: Release = ()

    def are_in(self, release: Release) -> bool:
        """Whether ``release`` is to have them."""
        return release >= self.since and (not self.before or release < self.before)


def release_of(version: str) -> Release:
    """The numbers of ``version``, whoever has built it ("0.16.1+g55ac" is 0.16.1); empty if it is no version."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()
