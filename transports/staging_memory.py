"""What one rank keeps, between rounds, of the staging memory that ranks of a host share."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from transports.segments import ALIGNMENT, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from transports import shm_messages as wire


@final
class StagingMemory:
    """One segment, or none.

    Args:
        forget: Called when a segment is given back: whoever looks into it lets go of it.

    Attributes:
        segment: Mapped by every rank that was given it.
        readers: To how many others the rank that made it has given it.
    """

    def __init__(self, forget: Callable[[], None] = lambda: None) -> None:
        self._forget = forget
        self.segment: Segment | None = None
        self.readers = 0
        self._private: torch.Tensor | None = None

    def fits(self, nbytes: int, readers: Sequence[wire.Hello]) -> bool:
        """Whether everybody who was ever given the segment is here and has it still.

        One who is missing (its process is stopped, or left behind by a group that has shrunk) may
        be copying out of it: what is in there must not change.
        """
        segment = self.segment
        return (
            segment is not None
            and segment.nbytes == size_for(nbytes)
            and len(readers) == self.readers
            and all(segment.key in reader.segments for reader in readers)
        )

    def renew(self, nbytes: int, readers: int, *, check: Callable[[], None]) -> Segment:
        """Make a segment for so many others; `check` is called now and then, and may raise.

        Raises:
            OutOfSharedMemory: There is not that much.
        """
        self.release()
        self.segment = Segment.create(size_for(nbytes), check=check)
        self.readers = readers
        return self.segment

    def take(self, segment: Segment) -> None:
        """Use what another rank made."""
        self.release()
        self.segment = segment

    def private(self) -> torch.Tensor:
        """The bytes as only this process may change them (`Segment.private`)."""
        assert self.segment is not None  # mapped before
        if self._private is None:
            self._private = self.segment.private()
        return self._private

    def release(self) -> None:
        """Give it back; tensors that look into it stay what they are, whatever comes later."""
        segment, self.segment = self.segment, None
        self._private, self.readers = None, 0
        if segment is not None:
            segment.close()
            self._forget()


def size_for(nbytes: int) -> int:
    """The segment's size: no segment is empty."""
    return max(nbytes, ALIGNMENT)


def name_of(rank: int) -> str:
    """What errors call a rank."""
    return f"rank {rank}"


def rank_of(name: str) -> int:
    """The rank that errors call so."""
    return int(name.removeprefix("rank "))
