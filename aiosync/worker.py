"""Base of the worker engines: five steps a backend implements, and what callers await.

The steps are `init_transfer_engine`, `start_weight_update`, `receive_weights`,
`finish_weight_update` and `shutdown`. What a subclass writes is the bare step; what callers get is
the step inside the life cycle (`aiosync.overrides`, `aiosync.worker_cycle`). The round itself
lives in a session (`aiosync.session`).
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias

from aiosync.concurrency import to_its_end
from aiosync.config import Update, check_factory, check_worker_config
from aiosync.config import WorkerInit as Init
from aiosync.driven_routes import driven_routes
from aiosync.errors import Validation
from aiosync.generation import GenerationGate
from aiosync.infos import parse_info
from aiosync.lane_slot import LaneSlot
from aiosync.overrides import step, wrap_steps
from aiosync.sinks import check_model, first_weights, sink_name
from aiosync.staging import check_shares
from aiosync.watchable import Watchable
from aiosync.weight_targets import MODEL
from aiosync.worker_controls import Controls
from aiosync.worker_copies import Copies, SendsCopies, copy_routes
from aiosync.worker_cycle import WorkerCycle
from aiosync.worker_deferring import Defers
from aiosync.worker_pausing import Pausing
from aiosync.worker_sinks import Sinks
from aiosync.worker_state import describe
from aiosync.worker_targets import Targets
from statemachines.machine import StateMachine
from statemachines.tables import ENGINE, State, Weights
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    import torch

    from aiosync.messages import PeerState, RoundHeader
    from aiosync.route_types import Route
    from aiosync.staging import StagingPlace
    from aiosync.version import Version
    from aiosync.weight_targets import Target
    from statemachines.hub import TransitionHub
    from transports.lane import LaneFactory, LaneLike

    # What callers see of a step; an implementation gets the typed info and no header, and may
    # block or be async.
    Info: TypeAlias = Mapping[str, Any]
    Awaited: TypeAlias = Coroutine[Any, Any, None]

_DOUBT = (Weights.INTACT, Weights.TORN, Weights.UNKNOWN)
_STEPS = {
    "init_transfer_engine": "init",
    "start_weight_update": "start",
    "receive_weights": "receive",
    "finish_weight_update": "finish",
    "shutdown": "shutdown",
}


class WeightTransferEngine(
    Watchable, Controls, Targets, Sinks, Defers, SendsCopies, ABC, Generic[Init, Update]
):
    """Takes weights into a model, on one worker rank.

    Cancelling a call leaves the work to the round's session; `abort_weight_update` and the lease
    end it. A call in the wrong order raises `InvalidTransition` with the triggers that are
    allowed, a call of somebody else `Fenced`.

    Args:
        config: A `WeightTransferConfig` or any object with a `backend`.
        vllm_config: Any object; kept for engines that want it.
        device: Where the model lives.
        model: A `torch.nn.Module`, a dict of tensors, or an object with ``load_weights``; needed by
            the time a round's tensors come, unless the sink has no use for it.
        hub: Watch through a hub of your own.
        name: Shown in events and errors.
        lane_factory: Makes the thread for blocking calls (simulation passes inline lanes).
        generation: A gate with settings of your own.

    Attributes:
        version: What the model holds since the last commit; None before the first.
        weights: Whether the model is whole. Kept apart from `state`: a failed channel with intact
            weights goes on serving.
        generation: Hold ``generation.request()`` around each use of the model.
        target_versions: Versions of the other targets (draft, adapters) by `Target.key`.
    """

    init_info_cls: ClassVar[type]
    update_info_cls: ClassVar[type]
    reusable_after_abort: ClassVar[bool] = False
    """Whether the channel can carry another round after one was given up."""
    one_update: ClassVar[bool] = False
    """Whether a round has one payload; the same one again is answered with its outcome."""
    uses_sink: ClassVar[bool] = False
    """Whether `receive_weights` fills the sink, which the base then verifies and commits."""
    shares_staging: ClassVar[bool] = False
    """Whether it takes part in staging that the ranks of a group share."""
    staging: StagingPlace | None = None
    """Its place in that, since the last init."""
    verified_round: int | None = None
    """The round that `receive_weights` has verified itself; the base does not do it again."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrap_steps(cls, _STEPS)

    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        device: torch.device | str | None,
        model: Any,
        *,
        hub: TransitionHub | None = None,
        name: str | None = None,
        lane_factory: LaneFactory = Lane,
        generation: GenerationGate | None = None,
    ) -> None:
        if config is not None:  # an engine of one's own may do without
            check_worker_config(config)
        check_factory("lane_factory", lane_factory)
        if self.uses_sink and model is not None:
            check_model(config, model)
        self.config = config
        check_shares(self)
        self.vllm_config = vllm_config
        self.parallel_config = getattr(vllm_config, "parallel_config", None)
        self.model_config = getattr(vllm_config, "model_config", None)
        self.device = device
        self.model = model
        self.begin_targets()
        self.name = name or f"{getattr(config, 'backend', 'custom')}-worker"
        self.rank = 0
        self.incarnation = secrets.token_hex(8)
        self.generation = generation or GenerationGate(name=self.name)
        self.version: Version | None = None
        self.received_digest: str | None = None
        """Of the bytes of the open round, once they are verified."""
        if getattr(config, "marker", None) is not None and not self.uses_sink:
            raise Validation("config.marker needs an engine that loads through a sink")
        self._weights = {MODEL.key: first_weights(config)}
        self.machine = StateMachine(ENGINE, name=self.name, role="worker", hub=hub)
        self.cycle = WorkerCycle(self)
        self._lane_factory = lane_factory
        self._lane_slot = LaneSlot(f"{self.name}-lane", lane_factory)
        self.begin_sinks()
        self.pausing = Pausing(self)
        self.copies = Copies(self)
        if self._weights[MODEL.key] is not Weights.INTACT:
            self.pausing.judge()

    # -- the steps a backend implements ----------------------------------------------------------

    @step
    @abstractmethod
    def init_transfer_engine(
        self, init_info: Init | Info, *, header: RoundHeader | None = None
    ) -> Awaited:
        """Open the channel; may be called again after `shutdown`."""

    @step
    @abstractmethod
    def start_weight_update(
        self, *, header: RoundHeader | None = None, aim: Target | None = None
    ) -> Awaited:
        """Get ready for a round."""

    @step
    @abstractmethod
    def receive_weights(
        self, update_info: Update | Info, *, header: RoundHeader | None = None
    ) -> Awaited:
        """Take the tensors the payload announces and load them into `model` (or the sink)."""

    @step
    @abstractmethod
    def finish_weight_update(
        self, weight_version: str | None = None, *, header: RoundHeader | None = None
    ) -> Awaited:
        """The round is complete; last work before the weights count as new."""

    @step
    @abstractmethod
    def shutdown(self, *, header: RoundHeader | None = None) -> Awaited:
        """Free the channel; idempotent."""

    def abort_receive(self) -> None:
        """Unblock a blocking step; called from another thread, must return at once."""

    def received_bytes(self) -> int:
        """Payload bytes received in the open round so far."""
        return 0

    def progress_at(self) -> float:
        """Monotonic time of the last byte received, for the lease."""
        return float("-inf")

    def channel_opened(self) -> None:
        """An init has succeeded; on the loop, must not block."""

    def round_began(self, header: RoundHeader | None) -> None:
        """The round that `header` is of has begun; on the loop, must not block."""

    async def leave_round(self, error: BaseException) -> None:
        """What giving a round up has to await before the weights are judged; time is limited."""
        if self.cycle.sink is not None:
            await self.cycle.sink.withdraw()

    # -- what callers use ------------------------------------------------------------------------

    async def update_weights(self, update_info: Any, *, header: RoundHeader | None = None) -> None:
        """Take one payload: a dict, or a list of dicts indexed by worker rank.

        Returns when the payload's tensors have been received (with `defers_processing`: queued).

        Raises:
            InvalidTransition: No round is open.
            Validation: The payload names a bad field; the round stays open.
        """
        payload = getattr(update_info, "update_info", update_info)
        if isinstance(payload, list):
            if not 0 <= self.rank < len(payload):
                raise Validation(
                    f"update_info has {len(payload)} entries, this worker's rank is {self.rank}",
                    rank=self.rank,
                    phase="update",
                )
            payload = payload[self.rank]
        await self.receive_weights(payload, header=header)

    async def prepare_weight_update(self, *, header: RoundHeader | None = None) -> None:
        """Check that all has been received and verified; nothing becomes visible yet."""
        await self.cycle.prepare(header=header)

    async def abort_weight_update(
        self, reason: str = "", *, header: RoundHeader | None = None
    ) -> None:
        """Give the open round up; a no-op when there is none (or a newer one).

        A round past its point of no return is left to finish: read the outcome from the state.
        """
        await self.cycle.abort(reason, header=header)

    def parse_init_info(self, init_info: Any) -> Init:
        """Typed init info out of a dict; `Validation` names the path of a bad field."""
        info: Init = parse_info(self.init_info_cls, init_info, what="init_info")
        return info

    def parse_update_info(self, update_info: Any) -> Update:
        """Typed update info out of a dict; `Validation` names the path of a bad field."""
        info: Update = parse_info(self.update_info_cls, update_info, what="update_info")
        return info

    @property
    def updates_plainly(self) -> bool:
        """Whether nobody's code runs before an update has found its round."""
        return type(self).update_weights is WeightTransferEngine.update_weights

    def touch(self, header: RoundHeader | None) -> None:
        """Renew the lease of the open round, and of a hold, if they are `header`'s owner's."""
        self.pausing.renew(header)
        self.cycle.touch(header)

    def own_routes(self) -> dict[str, Route]:
        """What `serve` answers beside vLLM's routes: a round's driver, copies to other workers."""
        return driven_routes(self.cycle) | copy_routes(self.copies)

    def peer_state(self) -> PeerState:
        """What every reply carries."""
        return describe(self)

    @property
    def weights(self) -> Weights:
        """Whether all it holds is whole; a sink that fills a model in place says so while it does.

        The worst of the model, its draft and its adapters.
        """
        sink, held = self.cycle.sink, self._weights
        if sink is not None and self.cycle.session is not None:
            held = held | {self.cycle.aim.key: Weights(sink.weights)}
        return max(held.values(), key=_DOUBT.index)

    @weights.setter
    def weights(self, value: Weights) -> None:
        self._weights[self.cycle.aim.key] = value

    @property
    def writes_early(self) -> bool:
        """Whether a round writes into the model before it is complete: generation is held then."""
        return not self.uses_sink or sink_name(self.config) in ("in_place", "layerwise")

    @property
    def verifies(self) -> bool:
        """Whether digests are checked (``verify="digest"``)."""
        return bool(getattr(self.config, "verify", "digest") == "digest")

    @property
    def lane(self) -> LaneLike:
        """The thread for this engine's blocking calls; replaced once it is poisoned."""
        return self._lane_slot.lane

    @property
    def lane_poisoned(self) -> bool:
        """Whether a blocking call is stuck for good."""
        return self._lane_slot.poisoned

    async def aclose(self) -> None:
        """End the engine: an open round fails first, then channel and lane go. Idempotent."""
        if self.state is not State.CLOSED:
            await to_its_end(self._close)

    async def _close(self) -> None:
        await self.cycle.close()
        self.free()

    def free(self) -> None:
        self.close_lane()
        self.drop_sinks()  # with spare memory as large as the model

    def close_lane(self) -> None:
        """Let the thread end after its last call."""
        self._lane_slot.close()

    def __repr__(self) -> str:
        version = self.version.label if self.version else None
        return (
            f"<{type(self).__name__} {self.name} {self.state.value}"
            f" weights={self.weights.value} version={version}>"
        )
