"""What becomes of keys, values and prefixes that were computed under older weights."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, final

from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.foreign import LeftBehind, limited

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES = ("flush", "keep", "salt")
_WHAT = "emptying the cache"


@final
class CacheTie:
    """How an embedder's cache hangs on ``weights_id``.

    Args:
        policy: ``"flush"``: emptied by every change of the weights, while nobody generates.
            ``"keep"``: left alone; old entries stay in use. ``"salt"``: left alone, and each
            request has a ``salt`` of its weights for its keys, so that old entries are not found.
        flush: ``flush(weights_id)`` empties the cache; plain (it must not block) or async. Also
            called by a pause that asks for it, whatever the policy.

    Raises:
        Validation: No such policy, or ``"flush"`` without a function.
    """

    def __init__(self, policy: str = "keep", flush: Callable[[str], Any] | None = None) -> None:
        if policy not in POLICIES:
            raise Validation(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if policy == "flush" and flush is None:
            raise Validation('policy "flush" needs a function: flush(weights_id)')
        self.policy = policy
        self.left = LeftBehind()
        self._flush = flush

    @property
    def flushes(self) -> bool:
        """Whether a change of the weights empties the cache."""
        return self.policy == "flush"

    def salt(self, weights_id: str) -> str:
        """What goes into the keys of requests under these weights."""
        return weights_id if self.policy == "salt" else ""

    async def empty(self, weights_id: str) -> None:
        """Empty the cache, where the embedder said how.

        Raises:
            PhaseTimeout: It took too long.
            Refused: An earlier call that took too long still runs.
            Exception: What the embedder's function raised.
        """
        if self._flush is None:
            return
        self.left.check("a flush")
        result = self._flush(weights_id)
        if inspect.isawaitable(result):
            await limited(
                lambda: result,
                DEFAULTS.finish_s,
                grace=DEFAULTS.cleanup_s / 2,
                what=_WHAT,
                phase="pause",
                left=self.left,
            )
