"""A file that says a model's memory may be a mix of two versions, should the process die.

It matters where the memory outlives the process (mapped files, shared memory): the next process
would otherwise serve a half written model without knowing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from aiosync.errors import Validation


@final
class CrashMarker:
    """Set right before the first write of a swap, cleared right after the last one.

    Both are durable when they return, so that a crash of the machine is covered, too.

    Args:
        path: Of the file, on a local disk; its folder must exist. One path per model.

    Raises:
        Validation: There is no such folder.
    """

    __slots__ = ("path",)

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise Validation(f"marker {self.path}: its folder does not exist")

    @property
    def is_set(self) -> bool:
        """Whether a swap began and did not end: the weights are torn."""
        return self.path.exists()

    def set(self) -> None:
        """Leave the marker; blocks until it is on the disk."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, b"process %d is writing the model\n" % os.getpid())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._sync_folder()

    def clear(self) -> None:
        """Take the marker away; blocks until that is on the disk."""
        if self.is_set:
            self.path.unlink(missing_ok=True)
            self._sync_folder()

    def _sync_folder(self) -> None:
        descriptor = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"<CrashMarker {self.path}>"
