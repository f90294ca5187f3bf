"""The trainer's view of its workers: one link per member, calls that reach all of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar, final

import anyio
import msgspec

from aiosync.client import Capabilities, HTTPVLLMWeightSyncClient, adapt_client
from aiosync.concurrency import check_ended, collapse, raise_ranked, uncancelled
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, PhaseTimeout, ProtocolMismatch, RemoteError
from aiosync.foreign import stoppable
from aiosync.incarnations import Incarnations
from aiosync.replies import refuse_denial

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.messages import PeerState, RoundHeader
    from aiosync.version import Version
    from aiosync.weight_targets import Target

T = TypeVar("T")
logger = logging.getLogger(__name__)
_CLIENT_ENDS_S = 0.25  # what a client's call has to end in once it is cancelled
STOCK = Capabilities(protocol=0)


@final
class MemberLink:
    """One server of a member: its client, what it can do, and what it was last seen holding."""

    def __init__(self, name: str, client: Any, *, member: str | None = None) -> None:
        self.name = name
        self.member = member or name
        """The member that this server belongs to."""
        self.given: Any = client
        """The client as the member has it; `client` may be a wrapper."""
        self.client: Any = adapt_client(client)
        self.capabilities: Capabilities = STOCK
        self.peer: PeerState | None = None
        self.epoch = 0
        self.incarnations = Incarnations()
        self.progress_at = self.heard_at = time.monotonic()
        self.outcome = "pending"
        """Of the round: pending, aborted (confirmed), failed, committed, or unknown."""
        self.answered: str | None = None
        """The last phase whose call came back."""
        self.phase: str | None = None
        self.error: str | None = None
        self.seconds = 0.0
        self._size = 1
        self._weights_before: str | None = None

    @property
    def ends_at_once(self) -> bool:
        """Whether a call that is cancelled ends by itself: no code of others has a part in it."""
        # By its very type: a wrapper may well hand its client's attributes on.
        return type(self.client) is HTTPVLLMWeightSyncClient and self.client.is_alone

    @property
    def speaks_ours(self) -> bool:
        """Whether the peer answered our handshake (a stock vLLM does not)."""
        return self.capabilities.protocol > 0

    def forget_round(self) -> None:
        """A round is being admitted: what the last one left here is not this one's."""
        if self.outcome != "unknown":  # that lasts until the worker is asked, or takes a round
            self.outcome = "pending"
        self.answered = self.phase = self.error = None
        self.seconds = 0.0

    def begin_round(self) -> None:
        """From here on bytes may move."""
        self.forget_round()
        self.outcome = "pending"
        self.progress_at = self.heard_at = time.monotonic()
        self.note_weights()

    def note_weights(self) -> None:
        """What the member holds now is what it held before the round."""
        self._weights_before = self.weights_id

    @property
    def weights_id(self) -> str | None:
        """What it said last of its very weights; None: it does not say such things."""
        return None if self.peer is None else self.peer.detail.get("weights_id")

    @property
    def holds_the_same(self) -> bool:
        """Whether these are the weights from before the round, as far as one can say."""
        return self.weights_id is not None and self.weights_id == self._weights_before

    @property
    def known_incarnation(self) -> str | None:
        """The incarnation our init was answered by; another one means the worker restarted."""
        return self.incarnations.initialised

    @property
    def restarted(self) -> bool:
        return self.peer is not None and self.peer.incarnation != self.known_incarnation

    @property
    def untouched(self) -> bool:
        """Whether this round has done nothing to it but pause it."""
        return self.phase in (None, "pause")

    @property
    def version(self) -> Version | None:
        return self.peer.version if self.peer is not None else None

    def held(self, target: Target) -> Version | None:
        """What it was last seen holding of `target`."""
        return None if self.peer is None else self.peer.held(target)

    @property
    def world_size(self) -> int:
        """Worker ranks behind this server."""
        return self.peer.world_size if self.peer is not None else self._size

    @property
    def readers(self) -> int:
        """How many of those take the bytes: ranks that share their staging receive them once."""
        said = None if self.peer is None else self.peer.detail.get("readers")
        return said if type(said) is int and 0 < said <= self.world_size else self.world_size

    def has_verified(self, round: int) -> bool:
        """Whether its last answer says that all of the round is there, and right."""
        return self.peer is not None and self.peer.detail.get("verified") == round

    def supports(self, feature: str) -> bool:
        return feature in self.capabilities.features and hasattr(self.client, _METHOD[feature])

    async def probe(self) -> None:
        """Ask what the peer can do and what it holds now."""
        if not hasattr(self.client, "capabilities"):
            return
        ask = functools.partial(self.client.capabilities, refresh=True)
        what = f"capabilities of the client of {self.name}"
        answer = await stoppable(ask, grace=_CLIENT_ENDS_S, what=what)
        if not isinstance(answer, Capabilities):
            kind = type(answer).__name__
            raise ProtocolMismatch(f"capabilities() of the client gave {kind}, no Capabilities")
        self.capabilities = answer
        self.note(answer.peer)
        if self.peer is None and hasattr(self.client, "get_world_size"):
            with suppress(AiosyncError):  # a stock server that has no such route has one rank
                self._size = await self.client.get_world_size()

    def note(self, peer: PeerState | None) -> None:
        """Remember what a reply said about the peer.

        Raises:
            Refused: Two processes answer in turn.
        """
        before = self.peer
        if peer is not None:
            self.heard_at = time.monotonic()
        if peer is None or (before is not None and _is_older(peer, before)):
            return  # a heartbeat's answer may be overtaken by that of the call it runs beside
        self.peer = peer
        self.incarnations.note(peer.incarnation)
        if before is None or _progress(before) != _progress(peer):
            self.progress_at = time.monotonic()

    async def call(
        self, method: str, *args: Any, header: RoundHeader | None = None, **options: Any
    ) -> Any:
        """Call a client method; errors come back carrying this member's name."""
        extra = {"header": header} if header is not None and self.speaks_ours else {}
        extra |= options
        try:
            asked = functools.partial(getattr(self.client, method), *args, **extra)
            if self.ends_at_once:
                reply = await asked()
            else:
                what = f"{method} of the client of {self.name}"
                reply = await stoppable(asked, grace=_CLIENT_ENDS_S, what=what)
            refuse_denial(reply, replica=self.name, phase=_PHASE.get(method, method))
        except AiosyncError as error:
            # The fleet's name for the member wins over the client's own (a URL).
            error.replica = self.name
            error.locate(phase=_PHASE.get(method))
            self.incarnations.explain(error, _PHASE.get(method, method))
            if isinstance(error, RemoteError) and error.weights and self.peer is not None:
                self.peer = msgspec.structs.replace(self.peer, weights=error.weights)
            raise
        self.note(getattr(reply, "peer", None))
        return reply


_METHOD = {
    "prepare": "prepare_weight_update",
    "abort": "abort_weight_update",
    "status": "weight_update_status",
    "pause": "pause",
    "draft": "start_draft_weight_update",
}
_PHASE = {
    "init_weight_transfer_engine": "init",
    "start_weight_update": "start",
    "update_weights": "update",
    "prepare_weight_update": "prepare",
    "finish_weight_update": "finish",
    "abort_weight_update": "abort",
    "start_draft_weight_update": "start",
    "pause": "pause",
    "resume": "resume",
}


def _is_older(peer: PeerState, known: PeerState) -> bool:
    if peer.incarnation != known.incarnation:
        return False
    return bool(peer.detail.get("seq", 0) < known.detail.get("seq", 0))


def _progress(peer: PeerState) -> tuple[str, Any]:
    return peer.state, (peer.detail or {}).get("progress")


def links_of(client: Any) -> list[MemberLink]:
    """One link per server of a fleet's members, or one for a single client."""
    members = getattr(client, "members", None)
    if members is None:
        return [MemberLink(str(getattr(client, "name", None) or "worker"), client)]
    return [link for member in members for link in member.links()]


def fleet_of(client: Any) -> Any:
    """What a client that is a fleet knows of its members, else None."""
    return getattr(client, "roster", None)


def readers_before(link: MemberLink, links: Sequence[MemberLink]) -> int:
    """Readers behind the servers that come before `link`."""
    return sum(other.readers for other in links[: links.index(link)])


def own_info(
    init_info: dict[str, Any], link: MemberLink, links: Sequence[MemberLink]
) -> dict[str, Any]:
    """`init_info` for one of several servers that share a group: its ranks come after the others'.

    Only an int ``rank_offset`` is changed; it is the first server's.
    """
    offset = init_info.get("rank_offset")
    if isinstance(offset, bool) or not isinstance(offset, int):
        return init_info
    return {**init_info, "rank_offset": offset + readers_before(link, links)}


@final
class opened:  # noqa: N801 - read as `async with opened(links):`
    """Keep every client's connections open for the block, where the client knows how.

    A class, because the loop that ends takes no new generators, and engines are closed there too.

    Raises:
        PhaseTimeout: A client was not open within `seconds`. One that cannot be closed is only
            logged: what the block did is known by then.
    """

    def __init__(self, links: Sequence[MemberLink], *, seconds: float = DEFAULTS.connect_s) -> None:
        self._links = [link for link in links if hasattr(type(link.client), "__aenter__")]
        self._seconds = seconds
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> None:
        async with self._stack as stack:
            for link in self._links:
                await _enter(link, self._seconds)
                seconds = DEFAULTS.cleanup_s / len(self._links)
                stack.push_async_callback(_leave, link, seconds)
            self._stack = stack.pop_all()

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()


async def _enter(link: MemberLink, seconds: float) -> None:
    # No anyio scope: it may not end before one that the client opens here and keeps.
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            await link.client.__aenter__()
    except TimeoutError:
        if not limit.expired():
            raise
        text = f"the client was not open within {seconds:g} s"
        raise PhaseTimeout(text, replica=link.name, phase="admit") from None


async def _leave(link: MemberLink, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(seconds, 0.05)):
            await link.client.__aexit__(None, None, None)
    except Exception:
        logger.debug("%s: its client could not be closed", link.name, exc_info=True)


def unanswered(links: Sequence[MemberLink], phase: str) -> list[str]:
    """Names of the members that were called in `phase` and did not answer; their reports say so."""
    late = [link for link in links if link.phase == phase and link.answered != phase]
    for link in late:
        link.error = link.error or f"no answer to {phase}"
    return [link.name for link in late]


async def fan_out(
    links: Sequence[MemberLink],
    call: Callable[[MemberLink], Awaitable[T]],
    *,
    phase: str,
    linger: float,
    direct: bool = False,
) -> dict[str, T]:
    """Make one call to every member at once and wait for all of them.

    After the first failure the others get `linger` seconds to end by themselves, so that a cause
    that several members share is reported by each of them; then they are cancelled.

    Args:
        direct: `call` awaits nothing but its member's client.

    Raises:
        The root cause among the failures, named after its member; the others as its notes.
    """
    results: dict[str, T] = {}
    failures: list[BaseException] = []
    done = 0

    async def one(link: MemberLink) -> None:
        nonlocal done
        began = time.monotonic()
        link.phase, link.answered = phase, None
        try:
            results[link.name] = await uncancelled(functools.partial(call, link))
            link.error, link.answered = None, phase
        except Exception as error:  # noqa: BLE001  collected; raised below as one exception
            cause = collapse(error)
            if isinstance(cause, AiosyncError):
                cause.replica = link.name
                cause.locate(phase=phase)
            else:
                cause.add_note(f"replica {link.name}, phase {phase}")
            link.error = f"{type(cause).__name__}: {getattr(cause, 'message', cause)}"
            failures.append(cause)
            del cause  # this frame is in its traceback
        finally:
            link.seconds += time.monotonic() - began
            done += 1
        if failures and done < len(links):
            group.cancel_scope.deadline = min(
                group.cancel_scope.deadline, anyio.current_time() + linger
            )

    if direct and len(links) == 1 and links[0].ends_at_once:
        await one(links[0])  # nobody to wait for, and nothing that a group would have to hold
    else:
        async with anyio.create_task_group() as group:
            for link in links:
                group.start_soon(one, link)
    raise_ranked(failures)
    check_ended(all(link.name in results for link in links), phase)
    return results
