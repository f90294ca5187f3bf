"""Collective groups: ranks that meet under a fresh prefix, and move bytes from rank 0 to all.

A group is made for one epoch of one trainer and is never the process's default group. Whatever
goes wrong in a collective ends the group: its connections are shut down, so that every rank is
woken, and the next epoch meets in a new group. `transports.gloo_group` is one behind this
protocol; NCCL's is another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class CollectiveGroup(Protocol):
    """One rank's end of a group.

    Attributes:
        rank, size: 0 is the trainer.
        names: Of all ranks, for errors.
    """

    rank: int
    size: int
    names: Sequence[str]

    def join(self, *, timeout: float) -> None:
        """Meet the other ranks and connect to each of them.

        Raises:
            PhaseTimeout: Not all came within `timeout` seconds; names the missing.
            PeerLost: The store or a rank went away.
            TransportAborted: `abort` was called.
        """

    def broadcast(self, data: torch.Tensor, *, timeout: float) -> Any:
        """Begin to copy rank 0's bytes (contiguous 1-d uint8) into the others' `data`.

        All ranks call it in the same order with the same sizes: that is agreed before. The memory
        belongs to the group until `wait` has returned; a group that failed writes nothing more.

        Args:
            data: On the CPU.
            timeout: Of the `wait` that follows.
        """

    def wait(self, pending: Any, *, timeout: float) -> None:
        """Wait for a `broadcast`; at rank 0 its end does not mean that anything arrived.

        Raises:
            PhaseTimeout: It did not end within `timeout` seconds.
            PeerLost: A rank is gone; named where its connection shows it.
            TransportAborted: `abort` was called.
        """

    def announce(self, stage: str, value: bytes, *, last: bool = False) -> None:
        """Leave a short word for the others; the `last` one of a round says this rank is done."""

    def gather(self, stage: str, *, ranks: Sequence[int], timeout: float) -> list[bytes]:
        """Wait for the word of each of these ranks; names those that are missing, or gone."""

    def abort(self) -> None:
        """End the group: calls that wait raise, here and at the others; from any thread."""

    def close(self) -> None:
        """Free everything; returns at once, from any thread. Idempotent."""
