"""The way back: a plain method on a lane that uses an async client.

A plain ``def send_weights`` (or ``trainer_init``) runs on a lane and calls its client as blocking
code does. Each call then waits, on the lane's thread, for the loop to have made it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, final

import anyio
import anyio.from_thread
import anyio.lowlevel

from aiosync.errors import TransportAborted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


@final
class LaneCalls:
    """Calls of one plain method into its loop; make it on the loop."""

    def __init__(self) -> None:
        self._token = anyio.lowlevel.current_token()
        self._scope = anyio.CancelScope()

    def bind(self, client: Any) -> Any:
        """`client` with methods that block instead of being awaited."""
        return _Blocking(client, self)

    def run(self, fn: Callable[[], Awaitable[Any]]) -> Any:
        """Have the loop await ``fn()``; from the lane's thread.

        Raises:
            TransportAborted: The round was cancelled meanwhile.
        """
        return anyio.from_thread.run(self._await, fn, token=self._token)

    def abort(self) -> None:
        """End the call that is out and refuse later ones; from any thread but the loop's."""
        anyio.from_thread.run_sync(self._cancel, token=self._token)

    def _cancel(self) -> None:
        self._scope.cancel()  # looked up on the loop, where it changes

    async def _await(self, fn: Callable[[], Awaitable[Any]]) -> Any:
        _HERE.set(None)  # anyio brings the lane's context along
        if not self._scope.cancel_called:
            scope = self._scope = anyio.CancelScope()
            with scope:
                return await fn()
        raise TransportAborted("the round was cancelled")


_HERE: contextvars.ContextVar[LaneCalls | None] = contextvars.ContextVar(
    "aiosync_lane_calls", default=None
)


def enter(context: contextvars.Context, calls: LaneCalls) -> None:
    """Make `calls` what `as_seen_here` finds in `context`."""
    context.run(_HERE.set, calls)


def as_seen_here(client: T) -> T:
    """`client` itself on a loop; its blocking form in a plain method on a lane."""
    calls = _HERE.get()
    if calls is None:
        return client
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        blocking: T = calls.bind(client)
        return blocking
    return client


@final
class _Blocking:
    def __init__(self, client: Any, calls: LaneCalls) -> None:
        self._client = client
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not inspect.iscoroutinefunction(method):
            return method

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            return self._calls.run(functools.partial(method, *args, **options))

        return call
