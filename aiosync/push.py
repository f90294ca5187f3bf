"""Rounds whose tensors the caller pushes, one after the other: ``engine.session(version)``.

The round runs in the background over a source whose pass yields what is pushed. A pass asks for
the next tensor once the last one has been copied out; that is when `PushSession.send` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, final

import anyio

from aiosync.concurrency import run_to_end
from aiosync.errors import Busy, Validation
from aiosync.round_options import NEXT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    import torch

    from aiosync.handle import WeightUpdate
    from aiosync.metadata import ParamMeta
    from aiosync.passes import Pair
    from aiosync.report import Report
    from aiosync.round_options import Next, RoundOptions, RoundSettings
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version

T = TypeVar("T")


@final
class Offers:
    """What one session has to give: one tensor at a time. On the event loop."""

    def __init__(self) -> None:
        self._is_complete = self._is_over = self._is_asking = False
        self._offer: Pair | None = None
        self._changed = anyio.Event()

    async def asks(self) -> bool:
        """Wait until a pass asks for its first tensor; False if the round ended instead."""
        while not self._is_asking and not self._is_over:
            await self._changed.wait()
        return not self._is_over

    def complete(self) -> None:
        """Nothing more will be offered: a pass may end."""
        self._is_complete = True
        self._change()

    def end(self) -> None:
        """The round is over; nothing more is taken."""
        self._is_over = True
        self._change()

    async def offer(self, name: str, tensor: torch.Tensor) -> bool:
        """Wait until the tensor has been copied out; False if the round ended instead."""
        if self._offer is not None:
            raise Busy(f"a send of {self._offer[0]} is under way; send one tensor after the other")
        mine = self._offer = (name, tensor)
        self._change()
        try:
            while self._offer is mine and not self._is_over:
                await self._changed.wait()
            return self._offer is not mine
        finally:
            if self._offer is mine:
                self._offer = None

    async def taken(self) -> AsyncIterator[Pair]:
        """What is offered, one after the other; each is copied out when the next is asked for."""
        while True:
            while self._offer is None:
                if self._is_complete:
                    return
                if not self._is_asking:
                    self._is_asking = True
                    self._change()
                await self._changed.wait()
            yield self._offer
            self._offer = None
            self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


@final
class PushSource:
    """Announces what `like` does, or the metadata of a session, and yields what it offers.

    One for all sessions of an engine, so that feed and plan are kept between them.
    """

    is_async = True

    def __init__(self, like: Any) -> None:
        self._like = like
        self._given: Sequence[ParamMeta] | None = None
        self._offers: Offers | None = None

    @property
    def metadata(self) -> Any:
        return self._like.metadata if self._given is None else self._given

    def owned_names(self, rank: int) -> list[str]:
        named = getattr(self._like, "owned_names", None)
        if self._given is None and named is not None:
            return list(named(rank))
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    @property
    def aliases(self) -> dict[str, str]:
        return {} if self._given is not None else dict(getattr(self._like, "aliases", None) or {})

    @property
    def left_out(self) -> list[str]:
        return [] if self._given is not None else list(getattr(self._like, "left_out", None) or ())

    def check(self, metadata: Sequence[ParamMeta] | None) -> None:
        """Refuse a session of which nobody says what comes."""
        if metadata is None and self._like is None:
            raise Validation("the engine has no source: say what comes, session(metadata=[...])")

    def begin(self, metadata: Sequence[ParamMeta] | None, offers: Offers) -> None:
        """It is the turn of the session that has `offers`."""
        self._given, self._offers = metadata, offers

    def iter_full(self) -> AsyncIterator[Pair]:
        assert self._offers is not None  # `begin` came first
        return self._offers.taken()


@final
class PushSession:
    """A round under way, fed by `send`. Made by ``engine.session``; use it as ``async with``.

    Entering the block waits until every worker is ready to receive, leaving it until every worker
    has confirmed the version; nothing is committed before. Leaving it by an exception cancels the
    round and lets the exception through; so does cancelling a `send`. Between two sends the
    engine's ``source_lane`` is free for the caller's own gathers.
    """

    def __init__(
        self,
        engine: TrainerWeightTransferEngine[Any],
        settings: RoundSettings,
        *,
        metadata: Sequence[ParamMeta] | None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metadata = metadata
        self._offers = Offers()
        self._update: WeightUpdate | None = None
        self._is_open = False

    @property
    def update(self) -> WeightUpdate:
        """The round's handle, for its progress and `cancel`."""
        if self._update is None:
            raise Validation("the session has not been entered; use `async with`")
        return self._update

    @property
    def version(self) -> Version:
        return self.update.version

    @property
    def report(self) -> Report | None:
        """The round's report once it is over, failed or not."""
        return self.update.report

    async def send(self, name: str, tensor: torch.Tensor) -> None:
        """Send one tensor; it may change once this returns.

        Names come in the order of the metadata; a wrong name, dtype or shape fails the round.

        Raises:
            Validation: The tensor is not the announced one, or the session is over.
            Busy: Another `send` is under way.
            Exception: What ended the round, now or before.
        """
        update = self.update
        if not self._is_open:
            raise Validation("the session is over", tensor=name)
        if not await self._guarded(self._offers.offer, name, tensor):
            await update.wait()

    async def __aenter__(self) -> Self:
        if self._update is not None:
            raise Validation("a session can be entered once")
        engine = self._engine
        side = engine.source_side.pushed
        source: PushSource = side.source
        this = engine.admission.make(self._settings, side)
        offers = self._offers
        stirred = anyio.Event()
        # Not before its turn: until then the source may be another session's.
        this.turn.then(lambda: source.begin(self._metadata, offers))
        this.over.then(offers.end)
        for milestone in (this.turn, this.over):
            milestone.then(stirred.set)
        engine.admission.join(this)
        self._update = engine.start_round(this)
        await self._guarded(stirred.wait)
        if not this.turn.is_set():
            await self._update.wait()
        # Not before: until the ranks have met the source lane is theirs, and a gather that the
        # caller puts there would wait for ranks that wait for this one.
        if not await self._guarded(self._offers.asks):
            await self._update.wait()
        self._is_open = True
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_open = False
        if error is not None:
            await self._give_up()
            return
        self._offers.complete()
        await self._guarded(self.update.wait)

    async def _guarded(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            return await fn(*args)
        except Exception:
            raise
        except BaseException:  # cancelled: the round may still be reading the caller's tensor
            await self._give_up()
            raise

    async def _give_up(self) -> None:
        update = self.update
        update.cancel()
        await run_to_end(update.wait, seconds=2 * self._settings.budget.cleanup)

    def __repr__(self) -> str:
        return f"<PushSession of {self._update!r}>"


def open_session(
    engine: TrainerWeightTransferEngine[Any],
    version: int | str | Version | Next = NEXT,
    *,
    metadata: Sequence[ParamMeta] | None = None,
    **options: Unpack[RoundOptions],
) -> PushSession:
    """A round for callers that hold the loop over the tensors themselves.

        async with engine.session(version=3) as session:
            for name, tensor in exporter():
                await session.send(name, tensor)
        print(session.report)

    A pause between two sends may not be longer than
    the budget's `stall`. With several trainer ranks each rank opens a session and sends what it
    owns; rank 0's leaving the block commits. A rank that leaves alone ends the round for all, but
    not a gather that its peers have entered by themselves.

    Args:
        version, options: As for `send_weights`; entering the block waits for the round's turn.
        metadata: What will be sent, in order; None: what the engine's source announces.

    Raises:
        Validation: The engine writes its own `send_weights`, which a session cannot feed; or an
            argument is wrong. With other trainer ranks the latter is raised by entering the block,
            on all of them.
    """
    if getattr(type(engine).send_weights, "is_override", False):
        raise Validation(
            f"{type(engine).__name__} overrides send_weights: it takes its tensors from its source"
        )
    given = engine.round_defaults | options
    settings = engine.admission.settings("session", version, given)
    announced = None
    try:
        announced = _announced(engine, settings, metadata)
    except (TypeError, Validation) as error:
        settings = engine.admission.refused(error, given)
    return PushSession(engine, settings, metadata=announced)


def _announced(
    engine: TrainerWeightTransferEngine[Any],
    settings: RoundSettings,
    metadata: Sequence[ParamMeta] | None,
) -> list[ParamMeta] | None:
    """What the session announces by itself; None: what the engine's source does."""
    if settings.source is not None:
        raise Validation(
            "session takes no source=: what is sent is what comes; say metadata= instead"
        )
    source: PushSource = engine.source_side.pushed.source
    source.check(metadata)
    return None if metadata is None else list(metadata)
