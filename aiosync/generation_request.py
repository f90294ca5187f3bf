"""One generation inside the gate: what it runs under, and how it is told to stop or wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, final

import anyio

from aiosync.errors import GenerationAborted
from aiosync.generation_table import Span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiosync.generation_table import WeightsTag
    from aiosync.version import Version

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_NO_LABEL = "default"  # what vLLM calls weights that never had a version


@final
class GenerationRequest:
    """What ``async with gate.request()`` gives.

    Attributes:
        id: Names it for `GenerationGate.abort`.
        abort_reason: Why it has to stop; None while it need not.
    """

    __slots__ = (
        "_ended",
        "_park",
        "_scopes",
        "_spans",
        "_start",
        "_tag",
        "abort_reason",
        "count",
        "id",
        "parked",
        "salt",
        "woken",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        tag: WeightsTag,
        *,
        salt: str,
        park: Callable[[GenerationRequest], Awaitable[None]],
    ) -> None:
        self.id = id
        self.salt = salt
        """For the keys of a prefix cache that is tied by ``"salt"``; empty otherwise."""
        self.count = 0
        """Units of output so far, as told to `produced`."""
        self.abort_reason: str | None = None
        self.parked = False
        self.woken: anyio.Event | None = None
        self._tag = tag
        self._park = park
        self._spans: list[Span] = []
        self._start = 0
        self._scopes: set[anyio.CancelScope] = set()
        self._ended: anyio.Event | None = None

    @property
    def version(self) -> Version | None:
        """Of the weights it runs under now; None before the first commit."""
        return self._tag.version

    @property
    def weights_id(self) -> str:
        """Names exactly the weights it runs under now."""
        return self._tag.weights_id

    @property
    def aborted(self) -> bool:
        """Whether it has to stop; what it has by then is its partial output."""
        return self.abort_reason is not None

    @property
    def spans(self) -> list[Span]:
        """Which version produced which units of its output, in order."""
        return [*self._spans, self._span()]

    def produced(self, units: int = 1) -> None:
        """Count `units` (tokens) as produced under the present weights."""
        self.count += units

    async def checkpoint(self) -> None:
        """Stand here while generation is frozen; between two steps that use the model.

        Afterwards `version` may be another one: cached keys and values are the old one's.

        Raises:
            GenerationAborted: It has to stop. The request's own block swallows this.
        """
        self._check()
        await self._park(self)
        self._check()

    async def run(self, fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Await ``fn(*args)``; an abort cancels it.

        Raises:
            GenerationAborted: As `checkpoint`.
        """
        self._check()
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await fn(*args)
            finally:
                self._scopes.discard(scope)
        raise self._aborted()

    async def wait_aborted(self) -> str:
        """Return the reason once it has to stop; for those who stop their work themselves."""
        while self.abort_reason is None:
            if self._ended is None:
                self._ended = anyio.Event()
            await self._ended.wait()
        return self.abort_reason

    def abort(self, reason: str) -> bool:
        """Have it stop; False if it had to already."""
        if self.abort_reason is not None:
            return False
        self.abort_reason = reason
        for scope in tuple(self._scopes):
            scope.cancel()
        for event in (self.woken, self._ended):
            if event is not None:
                event.set()
        return True

    def move_to(self, tag: WeightsTag, salt: str) -> None:
        """From here on it runs under other weights; called by the gate."""
        if tag == self._tag:
            return
        if self.count > self._start:
            self._spans.append(self._span())
            self._start = self.count
        self._tag, self.salt = tag, salt

    def _span(self) -> Span:
        version = self._tag.version
        label = _NO_LABEL if version is None else version.wire
        return Span(label, self._tag.weights_id, self._start, self.count)

    def _check(self) -> None:
        if self.abort_reason is not None:
            raise self._aborted()

    def _aborted(self) -> GenerationAborted:
        return GenerationAborted(
            f"request {self.id} was aborted: {self.abort_reason}", detail={"request_id": self.id}
        )

    def __repr__(self) -> str:
        state: Any = "aborted" if self.aborted else "parked" if self.parked else "running"
        return f"<GenerationRequest {self.id} {state} weights={self.weights_id}>"
