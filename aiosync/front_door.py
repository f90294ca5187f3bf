"""`connect`: from a model and the URLs of its workers to an engine in one line."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, final

from aiosync.client import HTTPVLLMWeightSyncClient, capabilities_of
from aiosync.errors import PeerLost, Validation
from aiosync.factory import WeightTransferTrainerFactory
from aiosync.fleet import FleetClient, Member
from aiosync.fleet_health import NOBODY_LISTENS, is_refused
from aiosync.pause import arounds_of, pause_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from aiosync.client_protocol import VLLMWeightSyncClient
    from aiosync.pause import Pause
    from aiosync.round_options import Around, RoundOptions
    from aiosync.sources import Source
    from aiosync.trainer import TrainerWeightTransferEngine
    from statemachines.hub import TransitionHub

logger = logging.getLogger(__name__)
_AS_A_BLOCK = "connect opens nothing by itself: use `async with aiosync.connect(...) as sync:`"


def connect(
    model: Source,
    *,
    workers: Sequence[str | VLLMWeightSyncClient | Member] | str | FleetClient,
    backend: str = "auto",
    token: str | None = None,
    token_file: str | None = None,
    hub: TransitionHub | None = None,
    pause: Pause | None = None,
    around: Sequence[Around] = (),
    **options: Any,
) -> AbstractAsyncContextManager[TrainerWeightTransferEngine]:
    """An initialised trainer engine for `model`, closed when the block is left.

    Args:
        model: A ``torch.nn.Module``, or a `WeightSource`.
        workers: URLs (``http://host:port``, ``unix:///path``), clients, or `Member` objects; or a
            `FleetClient` with a policy of its own.
        backend: ``"auto"`` takes what the workers were started with and says so in the log; or
            a backend's name.
        token, token_file: What the workers' servers ask for.
        hub: Watch through a hub of your own, the init included.
        pause, around: Of every round that does not give its own; see `RoundOptions`.
        options: Fields of the backend's trainer init info.

    Raises:
        Validation: No worker was given, or the backend is unknown.
        PeerLost, Unauthorized, ProtocolMismatch: A worker could not be reached or used; named. It
            does not wait for workers that are not up yet: `FleetClient.wait_ready` does.
    """

    defaults: RoundOptions = {"pause": pause_of(pause), "around": arounds_of(around)}

    async def opened() -> TrainerWeightTransferEngine:
        fleet = _fleet(workers, token, token_file)
        info = _init_info(await _choose(backend, fleet.members), options)
        engine: TrainerWeightTransferEngine = await WeightTransferTrainerFactory.trainer_init(
            info, client=fleet, source=model, hub=hub
        )
        engine.round_defaults = defaults
        return engine

    return _Connection(opened)


@final
class _Connection:
    """No generator: a loop that ends closes all generators at once, nested ones too early."""

    def __init__(self, opened: Callable[[], Awaitable[TrainerWeightTransferEngine]]) -> None:
        self._opened = opened
        self._engine: TrainerWeightTransferEngine | None = None

    async def __aenter__(self) -> TrainerWeightTransferEngine:
        try:
            self._engine = await self._opened()
        except PeerLost as error:
            if is_refused(error):
                error.next_step = error.next_step or NOBODY_LISTENS
            raise
        return self._engine

    async def __aexit__(self, *exc: object) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no {name} here: {_AS_A_BLOCK}")

    def __await__(self) -> NoReturn:
        raise TypeError(_AS_A_BLOCK)

    def __enter__(self) -> NoReturn:
        raise TypeError(_AS_A_BLOCK)

    def __exit__(self, *exc: object) -> None:
        """Never reached; Python looks for it before it calls `__enter__`."""


def _fleet(workers: Any, token: str | None, token_file: str | None) -> FleetClient:
    if isinstance(workers, FleetClient):
        if token is not None or token_file is not None:
            raise Validation("connect: a fleet's members have their own tokens; give it to those")
        return workers
    if not isinstance(workers, Iterable):
        raise Validation(
            f"workers must be a fleet, or a list of URLs, clients or members, not {workers!r}"
        )
    urls = [workers] if isinstance(workers, str) else list(workers)
    if not urls:
        raise Validation("connect needs at least one worker")
    return FleetClient([_member(each, n, token, token_file) for n, each in enumerate(urls)])


def _member(worker: Any, index: int, token: str | None, token_file: str | None) -> Member:
    if isinstance(worker, Member):
        return worker
    if isinstance(worker, str):
        client = HTTPVLLMWeightSyncClient(worker, token=token, token_file=token_file)
        return Member(worker, client)
    if isinstance(worker, FleetClient):
        raise Validation("workers=[FleetClient]: give the fleet itself: workers=fleet")
    return Member(str(getattr(worker, "name", None) or f"worker-{index}"), worker)


async def _choose(backend: str, members: Sequence[Member]) -> str:
    """``"auto"`` is the backend that the first worker of ours was started with."""
    if backend != "auto":
        return backend
    peer = (await capabilities_of(members[0].client)).peer
    chosen = str((peer.detail.get("backend") if peer is not None else None) or "ipc")
    logger.info("backend 'auto' chose %s: what %s was started with", chosen, members[0].name)
    return chosen


_OF_FLEETS = set(inspect.signature(FleetClient).parameters) - {"members"}


def _init_info(backend: str, options: dict[str, Any]) -> Any:
    cls = WeightTransferTrainerFactory.engine_class(backend).init_info_cls
    fields = {field.name for field in dataclasses.fields(cls)}
    options.setdefault("rank", 0)
    if "packed" in fields:
        options.setdefault("packed", True)
    unknown = sorted(set(options) - fields)
    if meant := [name for name in unknown if name in _OF_FLEETS]:
        raise Validation(
            f"connect: {meant[0]} belongs to FleetClient(..., {meant[0]}=), then"
            " connect(workers=fleet)"
        )
    if unknown:
        known = ", ".join(sorted(fields))
        raise Validation(
            f"connect: backend {backend!r} has no {', '.join(unknown)}; it has {known}"
        )
    return cls(**options)
