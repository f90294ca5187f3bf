"""A sink without a model: tensors are handed on to somebody else, who commits or gives up.

A sink is driven on a lane, the receiver usually lives on the event loop. So each call waits, on
the lane's thread, for the loop to have made it, within a limit of its own. When the round is
cancelled the call that is out is cancelled, too, and the lane comes back. One that does not end
then is left behind, and no round begins before its end: it could put a tensor of an older round
among those of a newer one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any, Protocol

from aiosync.defaults import DEFAULTS
from aiosync.destinations import Destinations
from aiosync.errors import (
    AiosyncError,
    InvalidTransition,
    TransportAborted,
    Validation,
    WrongThread,
)
from aiosync.foreign import discard, limited
from aiosync.metadata import meta_nbytes
from aiosync.sink_base import Sink
from statemachines.tables import Weights
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import torch

    from aiosync.lane_calls import LaneCalls
    from aiosync.metadata import ParamMeta
    from aiosync.version import Version

logger = logging.getLogger(__name__)
_ENDS_S = DEFAULTS.cleanup_s / 4  # what a call of the receiver's has to end in once cancelled
_PARTS = ("begin", "put", "commit", "abort")


class TensorReceiver(Protocol):
    """What takes the tensors of a `RelaySink`; the methods may also be plain functions.

    Plain ones run on the lane and may block (`abort` on one of its own). ``begin`` may be absent.
    """

    async def begin(self, metadata: list[ParamMeta], aliases: dict[str, str]) -> None:
        """A round begins; nothing may become visible before `commit`."""

    async def put(self, name: str, tensor: torch.Tensor) -> None:
        """One whole, verified tensor: a copy that is the receiver's own. Awaited one by one."""

    async def commit(self, version: Version | None) -> None:
        """All has been put: make it visible. Raising means that nobody knows what is."""

    async def abort(self) -> None:
        """The round that began is given up: what was put must not become visible."""


class RelaySink(Sink):
    """Hands each tensor on as it lands; the receiver has a commit and an abort of its own.

    The weights are intact until `commit` (the receiver must not show what was put before),
    unknown while the receiver commits and after a commit or an abort of its that failed.

    Args:
        receiver: A `TensorReceiver`; or give its parts by name.
        begin, put, commit, abort: The parts; `begin` is optional.
        device: Where tensors arrive; the CPU unless given.
        timeout: Seconds for `begin` and for each `put`; commit has `DEFAULTS.finish_s`, abort
            `DEFAULTS.cleanup_s`. A plain function that blocks longer cannot be ended; an async one
            that swallows its cancellation is left behind, and rounds are refused until it ends.

    Raises:
        Validation: A part is missing, or both forms were given.
    """

    mode = "relay"

    def __init__(
        self,
        receiver: TensorReceiver | None = None,
        *,
        begin: Callable[..., Any] | None = None,
        put: Callable[..., Any] | None = None,
        commit: Callable[..., Any] | None = None,
        abort: Callable[..., Any] | None = None,
        device: torch.device | str | None = None,
        timeout: float = DEFAULTS.stall_s,
    ) -> None:
        parts: dict[str, Any] = dict(zip(_PARTS, (begin, put, commit, abort), strict=True))
        if receiver is not None:
            if any(part is not None for part in parts.values()):
                raise Validation("give a receiver or its parts, not both")
            parts = {name: getattr(receiver, name, None) for name in _PARTS}
        missing = [name for name in _PARTS[1:] if not callable(parts[name])]
        if missing:
            raise Validation(f"the receiver of a RelaySink lacks {', '.join(missing)}")
        super().__init__(None, device=device)
        self._parts = parts
        self._timeout = timeout
        self._calls: LaneCalls | None = None
        self._began = False

    def attach(self, calls: LaneCalls) -> None:
        self._calls = calls

    def interrupt(self) -> None:
        if self._calls is not None:
            self._calls.abort()

    def memory(self, metadata: Sequence[ParamMeta]) -> int:
        """The largest tensor; a transport may have a few under way at once."""
        return max(map(meta_nbytes, metadata), default=0)

    async def withdraw(self) -> None:
        if not self._began:
            return
        self._began = False
        before, abort = self.weights, self._parts["abort"]
        self.weights = Weights.UNKNOWN  # until the receiver has said that it is not
        async with Lane("aiosync-relay-abort") as lane:

            async def tell() -> None:
                # A lane takes plain functions only; what an async one returns is awaited here.
                result = await lane.run(lambda: abort(), grace=_ENDS_S)
                if inspect.isawaitable(result):
                    await result

            await self._limited("abort", tell, DEFAULTS.cleanup_s)
        self.weights = before  # an abort does not mend what an earlier commit left

    def abort(self) -> None:
        """Tell the receiver, where that has not been done by `withdraw`.

        On the loop's own thread there is no waiting for it: the weights are unknown then.
        """
        if self._began and not _on_a_loop():
            self._began = False
            before, self.weights = self.weights, Weights.UNKNOWN
            try:
                self._call("abort", seconds=DEFAULTS.cleanup_s)
                self.weights = before
            except Exception:
                logger.warning("the receiver of a RelaySink could not be told", exc_info=True)
        elif self._began:
            self._began = False
            self.weights = Weights.UNKNOWN
        super().abort()

    def _adopt(self, model: Any) -> None:
        """There is no model here."""

    def _find(
        self, metas: list[ParamMeta], aliases: Mapping[str, str], *, partial: bool
    ) -> Destinations:
        del partial  # what is missing is the receiver's to judge
        self._aliases = dict(aliases)
        return Destinations([[] for _ in metas], [], [], 0)

    def _prepare(self, metadata: list[ParamMeta], found: Destinations) -> None:
        del found
        self.left.check("a RelaySink's round")
        self._began = True  # from here on it is owed an abort
        if self._parts["begin"] is not None:
            self._call("begin", metadata, self._aliases, seconds=self._timeout)

    def _destination(self, index: int) -> torch.Tensor:
        return self._scratch(index)

    def _take(self, indices: Sequence[int]) -> None:
        for index in indices:
            name, tensor = self._metadata[index].name, self._handed.pop(index)
            self._call("put", name, tensor, seconds=self._timeout, tensor=name)

    def _apply(self) -> None:
        self.weights = Weights.UNKNOWN
        self._began = False  # a receiver that was told to commit is not told to abort
        self._call("commit", self.target, seconds=DEFAULTS.finish_s)

    def _call(self, what: str, *args: Any, seconds: float, tensor: str | None = None) -> None:
        """Make one call of the receiver's, from the lane."""
        if _on_a_loop():
            raise WrongThread("a RelaySink waits for its loop: drive it from a lane")
        try:
            result = self._parts[what](*args)
            if inspect.isawaitable(result):
                self._await(result, what, seconds)
        except TransportAborted:
            raise
        except AiosyncError as error:
            raise error.locate(tensor=tensor)  # noqa: B904  the same error, now with its place
        except Exception as error:
            raise AiosyncError(
                f"{what} of the receiver failed: {type(error).__name__}: {error}",
                tensor=tensor,
                weights=self.weights,
            ) from error

    def _await(self, result: Awaitable[Any], what: str, seconds: float) -> None:
        calls = self._calls
        try:
            if calls is None:
                raise InvalidTransition("a RelaySink with an async receiver must be attached first")
            calls.run(lambda: self._limited(what, lambda: result, seconds))
        finally:
            discard(result)  # the loop may have refused to begin it

    async def _limited(self, what: str, fn: Callable[[], Awaitable[Any]], seconds: float) -> None:
        name = f"{what} of the receiver"
        await limited(fn, seconds, grace=_ENDS_S, what=name, phase=what, left=self.left)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
