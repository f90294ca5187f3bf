"""Many members in simulation: how many calls a round makes, and that they are made at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from looped import looped

import aiosync
from aiosync.messages import PROTOCOL, PeerState
from transports.stream import StreamSummary

CALLS = (
    "start_weight_update",
    "update_weights",
    "prepare_weight_update",
    "finish_weight_update",
)


class Together:
    """Counts the calls, and lets none return before as many are out as were asked for."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.calls: dict[str, int] = {}
        self.open = self.most = 0
        self._all = asyncio.Event()

    async def called(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.open += 1
        self.most = max(self.most, self.open)
        gate = self._all
        if self.open == self.members:
            self.open = 0
            self._all = asyncio.Event()
            gate.set()
        await gate.wait()


class Simulated:
    """A member without a data plane."""

    def __init__(self, name: str, together: Together, broken: str = "") -> None:
        self.name = name
        self.broken = broken
        self._together = together
        self._state = PeerState(
            protocol=PROTOCOL,
            incarnation=name,
            features=["prepare", "abort", "status"],
            state="initialized",
            detail={"backend": "simulated"},
        )

    async def capabilities(self, *, refresh: bool = False) -> Any:
        return aiosync.Capabilities.of(self._state)

    async def _answer(self, method: str, header: Any, **changes: Any) -> Any:
        await self._together.called(method)
        if method == self.broken:
            raise aiosync.PeerLost(f"{self.name} is gone")
        fields = {f: getattr(self._state, f) for f in self._state.__struct_fields__}
        self._state = PeerState(**(fields | changes))
        return aiosync.Reply({}, peer=self._state)

    async def init_weight_transfer_engine(self, init_info: Any, *, header: Any = None) -> Any:
        return await self._answer("init_weight_transfer_engine", header, epoch=1)

    async def start_weight_update(self, *, header: Any = None) -> Any:
        self._version = header.version
        return await self._answer("start_weight_update", header, state="updating")

    async def update_weights(self, update_info: Any, *, header: Any = None) -> Any:
        return await self._answer("update_weights", header)

    async def prepare_weight_update(self, *, header: Any = None) -> Any:
        return await self._answer("prepare_weight_update", header, state="finalizing")

    async def finish_weight_update(self, version: Any = None, *, header: Any = None) -> Any:
        changes = {"state": "initialized", "version": self._version}
        return await self._answer("finish_weight_update", header, **changes)

    async def abort_weight_update(self, reason: str = "", *, header: Any = None) -> Any:
        return aiosync.Reply({}, peer=self._state)

    async def weight_update_status(self, *, header: Any = None) -> Any:
        return aiosync.Reply({}, peer=self._state)


@dataclass
class SimulatedInit(aiosync.TrainerInitInfo):
    backend: ClassVar[str] = "simulated"


class SimulatedTrainer(aiosync.TrainerWeightTransferEngine[SimulatedInit]):
    """Moves nothing: what is left is the control plane."""

    init_info_cls = SimulatedInit
    backend_name = "simulated"
    per_member = True
    reusable_after_abort = True

    def get_worker_init_payload(self):
        return {}

    def make_plan(self, feed):
        from aiosync.engines.streamed import plan_of

        return plan_of(feed.metadata, 1 << 16)

    def update_payload(self, round):
        return {}

    async def transmit(self, round):
        return StreamSummary(nbytes=0, chunks=0)


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [1, 64, 1000])
@pytest.mark.parametrize("policy", ["all", "quorum(1)"])
async def test_a_round_makes_four_calls_a_member_all_at_once(count, policy):
    together = Together(count)
    members = [aiosync.Member(f"m{n}", Simulated(f"m{n}", together)) for n in range(count)]
    fleet = aiosync.FleetClient(members, policy=policy)
    async with SimulatedTrainer(client=fleet, source=torch.nn.Linear(2, 2)) as trainer:
        await trainer.initialize()
        together.calls.clear()
        report = await trainer.send_weights(version=1)
        assert report.outcome == "committed"
        assert len(report.members) == count
        assert together.calls == dict.fromkeys(CALLS, count)
        assert together.most == count
        assert len(fleet.routable()) == count
        together.calls.clear()
        await trainer.send_weights(version=2)
        assert together.calls == dict.fromkeys(CALLS, count)


@pytest.mark.asyncio
async def test_a_hundred_of_a_thousand_are_left_behind():
    together = Together(1)
    broken = {n: CALLS[n // 10 % 4] for n in range(0, 1000, 10)}
    members = [
        aiosync.Member(f"m{n}", Simulated(f"m{n}", together, broken.get(n, "")))
        for n in range(1000)
    ]
    fleet = aiosync.FleetClient(members, policy="quorum(900)")
    async with SimulatedTrainer(client=fleet, source=torch.nn.Linear(2, 2)) as trainer:
        await trainer.initialize()
        report = await trainer.send_weights(version=1)
        assert report.outcome == "committed"
        assert len(fleet.routable()) == 900
        left = {m.name for m in report.members if m.outcome != "committed"}
        assert left == {f"m{n}" for n in broken}


@pytest.mark.asyncio
async def test_one_more_than_the_quorum_allows_and_nobody_commits():
    together = Together(1)
    broken = dict.fromkeys((1, 2, 3), "prepare_weight_update")
    members = [
        aiosync.Member(f"m{n}", Simulated(f"m{n}", together, broken.get(n, ""))) for n in range(10)
    ]
    fleet = aiosync.FleetClient(members, policy="quorum(8)")
    async with SimulatedTrainer(client=fleet, source=torch.nn.Linear(2, 2)) as trainer:
        await trainer.initialize()
        with pytest.raises(aiosync.PeerLost):
            await trainer.send_weights(version=1)
        assert "finish_weight_update" not in together.calls
        assert fleet.version is None


@pytest.mark.asyncio
async def test_sixty_four_workers_take_their_bytes_over_a_simulated_link():
    async with looped(workers=64) as it:
        report = await it.trainer.send_weights(version=1)
        assert report.outcome == "committed"
        assert all(it.is_equal(index) for index in range(64))
        methods = [method for _, method in it.calls]
        assert {m: methods.count(m) for m in CALLS} == dict.fromkeys(CALLS, 64)
        await it.assert_next_round_works(2)
