"""Host memory: a few megabytes shared by one launcher's processes, so that each parcel is fetched once per host.

It has no name in any file system and leaves nothing behind: the launcher makes it, and its workers inherit it. It holds
one content at a time, without a lock: a reader knows the digest of its content, and rejects any other or partial one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets

_LINK = "/proc/self/fd/{}"

log = logging.getLogger(__name__)


class HostMemory:
    """Make it with `create`, or find it with `given`.

    Attributes:
        name: a unique name.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name

    @classmethod
    def create(cls) -> HostMemory | None:
        """A new one; None where the system provides none: each process then fetches for itself."""
        name = f"recycle-{secrets.token_hex(8)}"
        try:
            return cls(os.memfd_create(name, os.MFD_CLOEXEC), name)
        except (OSError, AttributeError) as error:  # the C library is too old
            log.warning("recycle: no memory that this host's workers have in common: %s", error)
            return None

    @property
    def address(self) -> str:
        """The address for processes that inherit the descriptor under its number."""
        return f"{self.descriptor}:{self.name}"

    @classmethod
    def given(cls, address: str | None) -> HostMemory | None:
        """The memory at this address; None if it was not inherited, or its number is another file's by now."""
        number, _, name = (address or "").partition(":")
        try:
            if not number.isdecimal() or os.readlink(_LINK.format(number)) != f"/memfd:{name} (deleted)":
                return None
            return cls(os.open(_LINK.format(number), os.O_RDWR | os.O_CLOEXEC), name)  # a script may close that number
        except OSError:
            return None

    def write(self, content: bytes) -> None:
        """Replace the content. If there is no room for it, readers find none."""
        try:
            os.ftruncate(self.descriptor, len(content))
            done = 0
            while done < len(content):
                done += os.pwrite(self.descriptor, content[done:], done)
        except OSError as error:
            log.info("recycle: nothing is put into the memory of this host's workers: %s", error)

    def read(self, digest: str) -> bytes | None:
        """The content with this SHA-256, if it is there."""
        try:
            size = os.fstat(self.descriptor).st_size
            content = os.pread(self.descriptor, size, 0)
        except OSError:
            return None
        return content if content and hashlib.sha256(content).hexdigest() == digest else None

    def close(self) -> None:
        os.close(self.descriptor)
