"""The loopback link: what arrives, and every fault of the script, on two lanes."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statemachines.errors import InvalidTransition, Validation
from transports.digest import available
from transports.errors import (
    DigestMismatch,
    LanePoisoned,
    PeerLost,
    PhaseTimeout,
    TransportAborted,
)
from transports.lane import Lane
from transports.loopback import Fault, InlineLane, LoopbackLink
from transports.planning import ALIGNED, IPC_PACKED, NCCL_PACKED, plan_chunks

if TYPE_CHECKING:
    from transports.lane import LaneFactory, LaneLike
    from transports.stream import Receiver, Sender

pytestmark = pytest.mark.anyio

STALL = 20.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class Model:
    """Tensors, their plan, and a copy for each reader."""

    def __init__(self, sizes=(100, 3000, 0, 64, 700), *, limit=1024, rule=ALIGNED, readers=1):
        generator = torch.Generator().manual_seed(7)
        self.tensors = [
            torch.randint(1, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes
        ]
        self.plan = plan_chunks(sizes, [1] * len(sizes), limit=limit, rule=rule)
        self.copies = [[torch.zeros_like(t) for t in self.tensors] for _ in range(readers)]
        self.landed: list[list[int]] = [[] for _ in range(readers)]

    def send(self, sender: Sender, *, round: int = 1, stall: float = STALL, batch: int = 2):
        """One round, blocking."""
        sender.open(self.plan, len(self.copies), round=round, stall=stall)
        pairs = list(enumerate(self.tensors))
        for start in range(0, len(pairs), batch):
            sender.write(pairs[start : start + batch])
        return sender.finish()

    def receive(self, receiver: Receiver, reader: int = 0, *, round: int = 1, stall: float = STALL):
        self.landed[reader].clear()
        return receiver.receive(
            self.plan,
            self.copies[reader].__getitem__,
            self.landed[reader].extend,
            round=round,
            stall=stall,
        )

    def check(self, reader: int = 0) -> None:
        assert self.landed[reader] == list(range(len(self.tensors)))
        for copy, tensor in zip(self.copies[reader], self.tensors, strict=True):
            assert torch.equal(copy, tensor)


@asynccontextmanager
async def lanes(link: LoopbackLink, n: int = 1):
    with link:
        made = [Lane("sender-lane"), *(Lane(f"reader-lane-{i}") for i in range(n))]
        try:
            yield made
        finally:
            for lane in made:
                lane.close()


async def run_round(model: Model, link: LoopbackLink, made, *, number: int = 1, stall=STALL):
    """Both sides to their ends; what each returned or raised, sender first."""
    outcomes: list[object] = [None] * len(made)

    async def side(index: int, fn, half, *args) -> None:
        try:
            outcomes[index] = await made[index].run(
                lambda: fn(half, *args, round=number, stall=stall), abort=half.abort, grace=10.0
            )
        except Exception as exc:
            outcomes[index] = exc
        finally:
            half.close()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tg:
            tg.start_soon(side, 0, model.send, link.sender)
            for reader, receiver in enumerate(link.receivers):
                tg.start_soon(side, reader + 1, model.receive, receiver, reader)
    return outcomes


# -- what arrives


@pytest.mark.parametrize("rule", [ALIGNED, NCCL_PACKED, IPC_PACKED])
@pytest.mark.parametrize("digest", ["auto", "wsum64", None])
async def test_bytes_counts_and_digest(rule, digest):
    model = Model(limit=4096, rule=rule)
    link = LoopbackLink(digest=digest)
    async with lanes(link) as made:
        sent, received = await run_round(model, link, made)
    assert sent == received
    assert (sent.nbytes, sent.chunks) == (3864, len(model.plan.chunks))
    assert (sent.digest is None) == (digest is None)
    model.check()
    assert link.sender.progress.nbytes == link.receiver.progress.nbytes == 3864


async def test_several_readers():
    model = Model(readers=3)
    link = LoopbackLink(readers=3, depth=1)
    async with lanes(link, 3) as made:
        outcomes = await run_round(model, link, made)
    assert len({str(outcome) for outcome in outcomes}) == 1
    for reader in range(3):
        model.check(reader)


async def test_round_after_round_also_with_the_same_number():
    model = Model()
    link = LoopbackLink()
    async with lanes(link) as made:
        for number in (1, 2, 2, 3):
            for tensor in model.tensors:
                tensor += 1
            await run_round(model, link, made, number=number)
            model.check()


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 5)])
async def test_nothing_or_little_to_move(sizes):
    model = Model(sizes)
    link = LoopbackLink()
    async with lanes(link) as made:
        sent, _ = await run_round(model, link, made)
    assert sent.nbytes == sum(sizes)
    model.check()


async def test_sources_may_change_once_written_and_need_not_be_contiguous():
    tensors = [torch.arange(12, dtype=torch.float32).view(3, 4).t(), torch.tensor(5.0)]
    wanted = [tensor.clone() for tensor in tensors]
    copies = [torch.zeros(4, 3), torch.zeros(())]
    plan = plan_chunks([48, 4], [4, 4], limit=64, rule=ALIGNED)
    link = LoopbackLink()

    def send() -> None:
        link.sender.open(plan, 1, round=1, stall=STALL)
        for index, tensor in enumerate(tensors):
            link.sender.write([(index, tensor)])
            tensor.zero_()
        link.sender.finish()

    async with lanes(link) as (sending, receiving), anyio.create_task_group() as tg:
        tg.start_soon(sending.run, send)
        await receiving.run(
            lambda: link.receiver.receive(
                plan, copies.__getitem__, lambda _: None, round=1, stall=STALL
            )
        )
    assert all(torch.equal(copy, want) for copy, want in zip(copies, wanted, strict=True))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from([ALIGNED, NCCL_PACKED, IPC_PACKED]),
    st.integers(1, 5),
    st.integers(1, 3),
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
def test_any_sizes(anyio_backend, sizes, rule, batch, depth):
    model = Model(sizes, limit=400, rule=rule)
    link = LoopbackLink(depth=depth)

    async def main() -> None:
        async with lanes(link) as (sending, receiving), anyio.create_task_group() as tg:
            tg.start_soon(sending.run, lambda: model.send(link.sender, batch=batch))
            tg.start_soon(receiving.run, lambda: model.receive(link.receiver))

    anyio.run(main)
    model.check()


# -- faults


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_delay_changes_nothing_but_time(side):
    model = Model()
    link = LoopbackLink(script={side: [Fault.delay(0, 0.02), Fault.delay(2, 0.02)]})
    async with lanes(link) as made:
        await run_round(model, link, made)
    model.check()


async def test_delay_longer_than_the_stall_is_a_timeout_that_names_the_peer():
    model = Model()
    link = LoopbackLink(script={"sender": [Fault.delay(1, 600)]})
    async with lanes(link) as (sending, receiving), anyio.create_task_group() as tg:
        tg.start_soon(_send_until_aborted, model, link, sending)
        with pytest.raises(PhaseTimeout, match="no sign of sender") as caught:
            await receiving.run(lambda: model.receive(link.receiver, stall=1.0))
        assert (caught.value.replica, caught.value.phase) == ("sender", "receive")
        tg.cancel_scope.cancel()


async def _send_until_aborted(model: Model, link: LoopbackLink, lane: LaneLike) -> None:
    await lane.run(lambda: model.send(link.sender), abort=link.sender.abort, grace=10.0)


async def test_slow_reader_is_a_timeout_that_names_it():
    model = Model(readers=2)
    link = LoopbackLink(readers=2, depth=1, script={"receiver:1": [Fault.delay(0, 600)]})
    async with lanes(link, 2) as made, anyio.create_task_group() as tg:
        for reader, receiver in enumerate(link.receivers):
            tg.start_soon(_receive_until_aborted, model, receiver, made[reader + 1], reader)
        with pytest.raises(PhaseTimeout, match="reader 1") as caught:
            await made[0].run(lambda: model.send(link.sender, stall=1.0))
        assert caught.value.replica == "reader 1"
        link.sender.close()
        tg.cancel_scope.cancel()


async def _receive_until_aborted(model: Model, receiver, lane: LaneLike, reader: int = 0) -> None:
    try:
        await lane.run(lambda: model.receive(receiver, reader), abort=receiver.abort, grace=10.0)
    except PeerLost:
        pass


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_raised_error_arrives_and_the_peer_loses_its_connection(side):
    model = Model()
    error = OSError("ncclSystemError")
    link = LoopbackLink(script={side: [Fault.raises(1, error)]})
    async with lanes(link) as made:
        outcomes = await run_round(model, link, made)
        guilty, other = outcomes if side == "sender" else outcomes[::-1]
        assert guilty is error
        assert isinstance(other, PeerLost)
        assert other.replica == ("sender" if side == "sender" else "reader 0")
        await run_round(model, link, made, number=2)  # the script is used up
    model.check()


async def _cancel_in_fault(model: Model, link: LoopbackLink, made, side: str, grace: float) -> None:
    """Run a round; cancel the side that hangs once it has met its fault."""
    half, lane = (link.sender, made[0]) if side == "sender" else (link.receiver, made[1])
    async with anyio.create_task_group() as tg:
        if side == "sender":
            tg.start_soon(_receive_until_aborted, model, link.receiver, made[1])
            fn = model.send
        else:
            tg.start_soon(_tolerate_peer_lost, model, link, made[0])
            fn = model.receive
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(lambda: lane.run(fn, half, abort=half.abort, grace=grace))
                with anyio.fail_after(10):
                    while half._faults:
                        await anyio.sleep(0.001)
                scope.cancel()
        assert scope.cancelled_caught
    link.sender.close()
    link.receiver.close()


async def _tolerate_peer_lost(model: Model, link: LoopbackLink, lane: LaneLike) -> None:
    try:
        await lane.run(lambda: model.send(link.sender))
    except PeerLost:
        pass


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_hang_until_aborted(side):
    """The lane of the side that hangs is cancelled; the next round works."""
    model = Model()
    link = LoopbackLink(script={side: [Fault.hang_until_aborted(1)]})
    async with lanes(link) as made:
        await _cancel_in_fault(model, link, made, side, grace=10.0)
        assert not any(lane.poisoned for lane in made)
        await run_round(model, link, made, number=2)
    model.check()


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_hang_for_ever_poisons_until_it_is_released(side):
    model = Model()
    link = LoopbackLink(script={side: [Fault.hang_for_ever(1)]})
    async with lanes(link) as made:
        lane = made[0 if side == "sender" else 1]
        await _cancel_in_fault(model, link, made, side, grace=0.05)
        assert lane.poisoned
        with pytest.raises(LanePoisoned):
            await lane.run(int)
        fresh = [Lane("fresh-sender"), Lane("fresh-reader")]
        await run_round(model, link, fresh, number=2)
        model.check()
        link.release()
        with anyio.fail_after(10):
            while lane.busy:
                await anyio.sleep(0.001)
        await run_round(model, link, fresh, number=3)  # what was released disturbs nothing
        model.check()
        for made_later in fresh:
            made_later.close()


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("fault", [Fault.drop, Fault.corrupt])
@pytest.mark.parametrize("kind", available())
async def test_lost_or_changed_bytes_are_found(side, fault, kind):
    model = Model()
    link = LoopbackLink(digest=kind, script={side: [fault(2)]})
    async with lanes(link) as made:
        sent, received = await run_round(model, link, made)
        assert isinstance(received, DigestMismatch)
        assert "chunk 2" in str(received)
        assert isinstance(sent, PeerLost)
        assert 2 not in model.landed[0]  # nothing of the bad chunk counts as landed
        await run_round(model, link, made, number=2)
    model.check()


async def test_without_digests_counts_find_lost_bytes_only():
    model = Model()
    link = LoopbackLink(digest=None, script={"sender": [Fault.corrupt(0), Fault.drop(1)]})
    async with lanes(link) as made:
        _, received = await run_round(model, link, made)
    assert isinstance(received, DigestMismatch)
    assert "chunk 1: 0 of" in str(received)
    assert model.landed[0] == [0]  # the corrupted one passed
    assert not torch.equal(model.copies[0][0], model.tensors[0])


async def test_faults_of_chunks_without_bytes_change_nothing():
    model = Model((0, 0))
    faults = [Fault.drop(0), Fault.corrupt(0)]
    link = LoopbackLink(script={"sender": faults, "receiver": faults})
    async with lanes(link) as made:
        sent, received = await run_round(model, link, made)
    assert sent == received
    model.check()


async def test_fault_of_one_round_and_one_reader():
    model = Model(readers=2)
    error = OSError("only reader 1 in round 2")
    link = LoopbackLink(readers=2, script={"receiver:1": [Fault.raises(0, error, round=2)]})
    async with lanes(link, 2) as made:
        await run_round(model, link, made, number=1)
        model.check(0)
        model.check(1)
        sent, _, second = await run_round(model, link, made, number=2)
    assert second is error
    assert isinstance(sent, PeerLost)
    assert sent.replica == "reader 1"


# -- absent peers, abort, order of calls


async def test_absent_reader_is_a_timeout_that_names_it():
    model = Model(readers=2)
    link = LoopbackLink(readers=2)
    async with lanes(link, 2) as made, anyio.create_task_group() as tg:
        tg.start_soon(_receive_until_aborted, model, link.receivers[0], made[1])
        with pytest.raises(PhaseTimeout, match="reader 1") as caught:
            await made[0].run(lambda: model.send(link.sender, stall=1.0))
        assert (caught.value.phase, caught.value.round) == ("open", 1)
        link.sender.close()


async def test_absent_sender_is_a_timeout():
    model = Model()
    link = LoopbackLink()
    async with lanes(link) as (_, receiving):
        with pytest.raises(PhaseTimeout, match="sender"):
            await receiving.run(lambda: model.receive(link.receiver, stall=0.05))


async def test_abort_while_waiting_for_the_peer():
    model = Model()
    link = LoopbackLink()
    async with lanes(link) as made:
        for lane, half, fn in (
            (made[0], link.sender, lambda: model.send(link.sender)),
            (made[1], link.receiver, lambda: model.receive(link.receiver)),
        ):
            with anyio.move_on_after(0.05) as scope:
                await lane.run(fn, abort=half.abort, grace=10.0)
            assert scope.cancelled_caught
            assert not lane.poisoned
            half.close()
        await run_round(model, link, made)
    model.check()


async def test_abort_before_the_call_is_not_lost():
    """The lane may abort a call that has begun but has not reached the link."""
    model = Model()
    link = LoopbackLink()
    async with lanes(link) as made:
        for half, lane, fn in (
            (link.sender, made[0], model.send),
            (link.receiver, made[1], model.receive),
        ):
            half.abort()
            half.abort()
            with pytest.raises(TransportAborted, match=half.name):
                await lane.run(fn, half)
        # It has been noticed, so the next round needs no close().
        await run_round(model, link, made)
        model.check()
        link.sender.abort()
        link.sender.close()  # forgets it
        await run_round(model, link, made)
    model.check()


async def test_abort_between_two_calls_of_a_round():
    model = Model()
    link = LoopbackLink()
    async with lanes(link) as (sending, receiving), anyio.create_task_group() as tg:
        tg.start_soon(_receive_until_aborted, model, link.receiver, receiving)
        await sending.run(lambda: link.sender.open(model.plan, 1, round=1, stall=STALL))
        link.sender.abort()
        with pytest.raises(TransportAborted):
            await sending.run(link.sender.write, [(0, model.tensors[0])])
        with pytest.raises(TransportAborted):
            await sending.run(link.sender.finish)


async def test_different_plans_are_refused_by_the_reader():
    model, other = Model(), Model((100, 3000, 0, 64, 701))
    link = LoopbackLink()
    async with lanes(link) as (sending, receiving), anyio.create_task_group() as tg:
        tg.start_soon(_tolerate_peer_lost, model, link, sending)
        with pytest.raises(Validation, match="different plans"):
            await receiving.run(lambda: other.receive(link.receiver))


async def test_order_and_sizes_are_checked():
    model = Model()
    link = LoopbackLink()
    link.sender.close()
    async with lanes(link) as (sending, receiving):
        with pytest.raises(InvalidTransition, match="no open round"):
            await sending.run(link.sender.write, [])
        with pytest.raises(InvalidTransition):
            await sending.run(link.sender.finish)
        async with anyio.create_task_group() as tg:
            tg.start_soon(_receive_until_aborted, model, link.receiver, receiving)
            await sending.run(lambda: link.sender.open(model.plan, 1, round=1, stall=STALL))
            with pytest.raises(Validation, match="tensor 1 was written, tensor 0 is next"):
                await sending.run(link.sender.write, [(1, model.tensors[1])])
            with pytest.raises(Validation, match="planned were 100"):
                await sending.run(link.sender.write, [(0, model.tensors[1])])
            with pytest.raises(Validation, match="tensor 0 was not written"):
                await sending.run(link.sender.finish)
            await sending.run(link.sender.write, list(enumerate(model.tensors)))
            with pytest.raises(Validation, match="nothing is next"):
                await sending.run(link.sender.write, [(4, model.tensors[4])])
            await sending.run(link.sender.finish)


async def test_destination_of_another_size_is_named():
    model = Model()
    model.copies[0][1] = torch.zeros(5, dtype=torch.uint8)
    link = LoopbackLink()
    async with lanes(link) as made:
        sent, received = await run_round(model, link, made)
    assert isinstance(received, Validation)
    assert received.tensor == "tensor 1"
    assert isinstance(sent, PeerLost)


async def test_new_round_without_close_leaves_the_old_one():
    model = Model()
    link = LoopbackLink()
    async with lanes(link) as (sending, receiving):
        for number in (1, 2):
            async with anyio.create_task_group() as tg:
                tg.start_soon(sending.run, lambda n=number: model.send(link.sender, round=n))
                tg.start_soon(receiving.run, lambda n=number: model.receive(link.receiver, round=n))
            model.check()


@pytest.mark.parametrize("stall", [0, -1.0, float("inf"), float("nan"), True])
async def test_bad_stall(stall):
    model = Model()
    link = LoopbackLink()
    with pytest.raises(Validation, match="stall"):
        link.sender.open(model.plan, 1, round=1, stall=stall)
    with pytest.raises(Validation, match="stall"):
        model.receive(link.receiver, stall=stall)


async def test_bad_links():
    for kwargs in ({"readers": 0}, {"depth": 0}, {"script": {"receiver:1": []}}):
        with pytest.raises(Validation):
            LoopbackLink(**kwargs)
    with pytest.raises(Validation, match="2 readers on a link of 1"):
        LoopbackLink().sender.open(Model().plan, 2, round=1, stall=1.0)


# -- inline lanes


async def test_inline_lane_runs_in_place_in_order():
    factory: LaneFactory = InlineLane
    lane = factory("inline")
    order: list[object] = []

    async def one(name: str) -> None:
        order.append(await lane.run(str, name, abort=order.clear, grace=0.0))

    async with anyio.create_task_group() as tg:
        tg.start_soon(one, "a")
        await anyio.wait_all_tasks_blocked()
        tg.start_soon(one, "b")
    assert order == ["a", "b"]
    assert await lane.run(lambda: lane.busy)
    assert not lane.busy
    assert not lane.poisoned
    # the event loop is there: this is its thread
    assert await lane.run(anyio.lowlevel.current_token)
    assert lane.statistics().calls == 4
    assert "inline" in repr(lane)


async def test_inline_lane_errors():
    lane = InlineLane("inline")
    with pytest.raises(ZeroDivisionError):
        await lane.run(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await lane.run(next, iter(()))
    assert lane.statistics().failed == 2
    with anyio.CancelScope() as scope:
        scope.cancel()
        await lane.run(int)
    assert scope.cancelled_caught
    assert lane.statistics().calls == 2
    lane.close()
    lane.close()
    with pytest.raises(InvalidTransition, match="closed"):
        await lane.run(int)


async def test_progress_is_seen_from_elsewhere():
    model = Model()
    link = LoopbackLink(script={"receiver": [Fault.hang_until_aborted(2)]})
    async with lanes(link) as made:
        began = time.monotonic()
        async with anyio.create_task_group() as tg:
            tg.start_soon(_tolerate_peer_lost, model, link, made[0])
            tg.start_soon(_receive_until_aborted, model, link.receiver, made[1])
            with anyio.fail_after(10):
                while link.receiver.progress.nbytes < 1024:
                    await anyio.sleep(0.001)
            assert link.receiver.progress.at >= began
            tg.cancel_scope.cancel()
