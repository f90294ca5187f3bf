"""The actor's side of Ray: a worker engine that is reached by actor calls instead of a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.errors import InvalidTransition, Validation
from aiosync.service import WeightUpdateService

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiosync.routes import ServedEngine
    from aiosync.worker import WeightTransferEngine


class RayServed:
    """Base of an actor class that hosts a worker engine; `RayVLLMWeightSyncClient` reaches it.

    Call `serve_weights` in the actor's constructor. Every route of `serve` is answered, with the
    same bodies, by the one method `aiosync_request`; as it is a coroutine function the actor is an
    async one, whose calls run beside each other (an abort is not queued behind an update).
    """

    _aiosync_service: WeightUpdateService | None = None

    def serve_weights(
        self, engine: ServedEngine | WeightTransferEngine[Any, Any], *, name: str | None = None
    ) -> None:
        """Have this actor's weight calls answered by `engine`, which stays its owner's to close.

        Args:
            name: Names the replica in errors.
        """
        self._aiosync_service = WeightUpdateService(engine, name=name)

    async def aiosync_request(
        self, method: str, route: str, query: Mapping[str, Any], body: bytes
    ) -> tuple[int, str, bytes]:
        """One request of the control plane: status, content type and body of the answer."""
        service = self._aiosync_service
        if service is None:
            raise InvalidTransition("this actor has no engine: call serve_weights first")
        headers = {"content-type": "application/json"}
        texts = {name: str(value) for name, value in query.items()}
        answer = await service.dispatch(method, f"/{route}", texts, headers, body)
        if answer.stream is not None:
            await answer.stream.aclose()
            raise Validation(f"/{route} is an endless answer, which an actor call cannot give")
        return answer.status, answer.content_type, answer.body
