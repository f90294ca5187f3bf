"""Which process answers at a member's address: one, after a restart another, never two in turn.

Processes that share a port, or stand behind one balancer, each answer some calls of a round. A
restart looks the same at first, and is mended by a new init. But a process that was replaced does
not come back: once it answers again, two are alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aiosync.errors import Fenced, InvalidTransition, Refused, RemoteError

if TYPE_CHECKING:
    from aiosync.errors import AiosyncError

_ADVICE = "let one process answer at this address: one API process per replica, no balancer"


@final
class Incarnations:
    """Those that have answered at one address.

    Attributes:
        initialised: The one our init was answered by.
    """

    def __init__(self) -> None:
        self.initialised: str | None = None
        self._last: str | None = None
        self._before: str | None = None

    def note(self, seen: str) -> None:
        """`seen` has answered.

        Raises:
            Refused: So had it, and another one since; names both.
        """
        if seen == self._last or not seen:
            return
        last, before = self._last, self._before
        self._last, self._before = seen, last
        if seen == before:
            raise Refused(
                f"two processes answer in turn ({seen} and {last}): a round would reach only one"
                " of them",
                next_step=_ADVICE,
                detail={"incarnations": [seen, last]},
            )

    def explain(self, error: AiosyncError, what: str) -> None:
        """Have a refusal of another process than the one that was initialised say so."""
        seen = error.detail.get("incarnation")
        if seen in (None, self.initialised) or self.initialised is None:
            return
        if isinstance(error, RemoteError) and isinstance(error, Fenced | InvalidTransition):
            error.message += (
                f" ({what} reached process {seen}, init had reached {self.initialised}: the worker"
                " was restarted, or two processes share its address)"
            )
            error.next_step = _ADVICE
