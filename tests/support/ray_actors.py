"""Ray actors for the tests: two that host a worker engine, and one with vLLM's method names."""

from __future__ import annotations

import threading
from typing import Any

import by_hand
import models
import ray
import torch

import aiosync


@ray.remote(num_cpus=0)
class EngineActor(aiosync.RayServed):
    """A worker engine of ours in an actor."""

    async def __init__(self, name: str, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self.model = models.make("small", seed)
        self.engine = aiosync.WeightTransferEngineFactory.create_engine(
            aiosync.WeightTransferConfig("ipc"), None, torch.device("cpu"), self.model, name=name
        )
        self.serve_weights(self.engine, name=name)

    async def facts(self) -> dict[str, Any]:
        version = self.engine.version
        return {
            "prints": models.fingerprint(self.model),
            "version": None if version is None else version.label,
            "state": self.engine.state.value,
            "weights": self.engine.weights.value,
        }


@ray.remote(num_cpus=0)
class HangingActor(aiosync.RayServed):
    """Its engine's init hangs until it is cancelled."""

    async def __init__(self) -> None:
        config = aiosync.WeightTransferConfig("by_hand")
        self.engine = by_hand.ByHand(config, None, "cpu", by_hand.tensors(), name="hand")
        self.engine.hold("init")
        self.serve_weights(self.engine)

    async def ended(self) -> str:
        await self.engine.wait_for(aiosync.State.FAILED, timeout=20)
        return self.engine.state.value

    async def begun(self) -> None:
        await self.engine.reached["init"].wait()


@ray.remote(num_cpus=0, max_concurrency=4)
class Methods:
    """The methods of ``vllm.LLM`` that a trainer calls: blocking, and without our headers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.gate = threading.Event()
        self.fail: str | None = None

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._note("init", request.init_info)

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, request: Any) -> None:
        self._note("update", request.update_info)
        if request.update_info.get("wait"):
            self.gate.wait(20)

    def finish_weight_update(self) -> None:
        self._note("finish")

    def update_weight_version(self, version: str) -> None:
        self._note("version", version)

    def abort_weight_update(self, reason: str = "") -> None:
        self._note("abort", reason)
        self.gate.set()

    def told(self) -> list[Any]:
        return self.calls

    def fail_at(self, call: str | None) -> None:
        self.fail = call

    def open(self) -> None:
        self.gate.set()

    def is_open(self) -> bool:
        """Whether `open` was called; waits a while for it."""
        self.calls.append(["asked"])
        return self.gate.wait(1)

    def _note(self, call: str, *what: Any) -> None:
        self.calls.append([call, *what])
        if self.fail == call:
            raise OSError(f"{call} went wrong here")


@ray.remote(num_cpus=0)
class OneByOne:
    """vLLM's names in an actor that does one thing at a time; payloads are plain dicts."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(f"init {init_info['n']}")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        while not ray.get(update_info["until"].remote()):
            pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")

    def told(self) -> list[str]:
        return self.calls


@ray.remote(num_cpus=0)
class Nothing:
    """No worker at all."""

    def start_weight_update(self) -> None:
        return


@ray.remote(num_cpus=0)
class RankActor:
    """A trainer rank in an actor of its own."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.model = models.make("small", seed)

    async def connect(self, urls: list[str], actors: dict[str, Any]) -> None:
        workers: list[Any] = [
            *urls,
            *(aiosync.RayMember(name, handle) for name, handle in actors.items()),
        ]
        self._connected = aiosync.connect(self.model, workers=workers)
        self.engine = await self._connected.__aenter__()

    async def send(self, word: str) -> dict[str, Any]:
        try:
            report = await self.engine.send_weights(ticket=word)
        except aiosync.AiosyncError as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"outcome": report.outcome, "prints": models.fingerprint(self.model)}

    async def close(self) -> None:
        await self._connected.__aexit__(None, None, None)
