"""Errors that are the disk's own, so that a writer of expendable files can go on without them."""

from __future__ import annotations

import errno

_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE})


def of_disk(error: OSError) -> bool:
    """Whether the disk is full, broken or read-only; not a link, a missing right, a reader that is gone."""
    return error.errno in _ERRORS
