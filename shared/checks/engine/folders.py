"""Temporary folders that the kernel and its ranks share."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

from shared.ranks.errors import RanksError

OF_THE_MACHINE = (errno.EACCES, errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NoFolder(RanksError):
    """This machine has no room for the files of a check, whatever the student's code does."""


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Make a temporary folder for ranks that may belong to another user.

    Ranks can also write in whatever this process puts into the folder meanwhile.

    Raises:
        NoFolder: If there can be no such folder, or this process cannot write into it because the disk is full.
    """
    folder = ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            previous = os.umask(0)
            try:
                yield folder
            finally:
                os.umask(previous)
    except OSError as error:
        if folder and error.errno not in _FULL:
            raise
        raise NoFolder(f"this check needs a temporary folder, and this machine has no room for it: {error}") from error
