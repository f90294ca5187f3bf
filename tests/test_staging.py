"""The memory that ranks share: mapped by all before it is written, written while nobody reads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from transports.errors import OutOfSharedMemory, PeerLost, TransportAborted
from transports.listener import new_address
from transports.planning import ALIGNED, plan_chunks
from transports.segments import Segment
from transports.staging import FollowReceiver, LeadReceiver, StagingMemory
from transports.stream import Progress, StreamSummary

SIZES = (256, 512)
NBYTES = sum(SIZES)
PLAN = plan_chunks(SIZES, [1, 1], limit=1024, rule=ALIGNED)
STALL = 20.0
pytestmark = pytest.mark.usefixtures("free_shm")


class Bytes:
    """A receiver whose bytes are there: every tensor is filled with `value`."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.value = 0
        self.error: Exception | None = None
        self.began = threading.Event()
        self.going = threading.Event()
        self.going.set()
        self.aborted = False

    def receive(self, plan, destination, landed, *, round, stall):
        self.began.set()
        self.going.wait(STALL)
        if self.aborted:
            raise TransportAborted("told to stop")
        if self.error is not None:
            raise self.error
        for index in range(len(plan.sizes)):
            destination(index).fill_(self.value)
        landed([*range(len(plan.sizes))])
        return StreamSummary(nbytes=sum(plan.sizes), chunks=len(plan.chunks), digest="d")

    def abort(self) -> None:
        self.aborted = True
        self.going.set()

    def close(self) -> None:
        self.aborted = False


class Ranks:
    """Some ranks in threads of this process."""

    def __init__(self, size: int) -> None:
        self.bytes = Bytes()
        self.memories = [StagingMemory() for _ in range(size)]
        self.pool = ThreadPoolExecutor(8)
        self.number = 0
        self.receivers: list = []
        self.form(size)

    def form(self, size: int) -> None:
        for receiver in self.receivers:
            receiver.release()
        where = {"address": new_address(), "token": "secret"}
        followers = [FollowReceiver(rank, **where) for rank in range(1, size)]
        self.receivers = [LeadReceiver(self.bytes, others=size - 1, **where), *followers]

    def close(self) -> None:
        """What a lane's caller does once call and abort have returned."""
        for receiver in self.receivers:
            receiver.close()

    def begin(self, *, layout=lambda rank: "same", only=None, nbytes=NBYTES):
        """Each rank's part of one round; a list of futures of its bytes and its summary."""
        self.number += 1
        options = {"round": self.number, "stall": STALL}

        def part(rank, receiver):
            try:
                memory = receiver.map(self.memories[rank], nbytes, layout=layout(rank), **options)
                views = [memory[:256], memory[256:NBYTES]]
                summary = receiver.receive(PLAN, views.__getitem__, lambda _: None, **options)
                return memory, summary
            finally:
                receiver.close()

        return [
            self.pool.submit(part, rank, receiver)
            for rank, receiver in enumerate(self.receivers)
            if only is None or rank in only
        ]

    def round(self, value: int, **options) -> list[torch.Tensor]:
        self.bytes.value = value
        found = [future.result(STALL) for future in self.begin(**options)]
        assert {summary.digest for _, summary in found} == {"d"}
        memories = [memory for memory, _ in found]
        assert all(memory[:NBYTES].eq(value).all() for memory in memories)
        return memories

    @property
    def keys(self) -> set[str | None]:
        return {m.segment and m.segment.key for m in self.memories[: len(self.receivers)]}


@contextmanager
def ranks(size: int):
    them = Ranks(size)
    try:
        yield them
    finally:
        for receiver in them.receivers:
            receiver.release()
        for memory in them.memories:
            memory.release()
        them.pool.shutdown()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_read_what_one_received(size):
    with ranks(size) as them:
        them.round(1)
        before = them.keys
        assert len(before) == 1
        for value in (2, 3):
            them.round(value)
        assert them.keys == before  # kept: nobody makes pages anew


def test_what_a_rank_writes_nobody_else_sees():
    with ranks(3) as them:
        memories = them.round(5)
        memories[1].fill_(77)
        assert memories[2][:NBYTES].eq(5).all()
        own = them.memories[0].private()
        own.fill_(78)
        assert memories[0][:NBYTES].eq(5).all()


@pytest.mark.parametrize("how", ["replaced", "let go", "left"])
def test_memory_that_somebody_may_read_is_not_written(how):
    with ranks(3) as them:
        old = them.round(1)
        key = them.keys
        if how == "replaced":  # the process before may be stopped in the middle of its copy
            them.memories[2] = StagingMemory()
        elif how == "let go":  # a loader may have kept tensors
            them.memories[2].release()
        else:
            them.form(2)
        them.round(2)
        assert len(them.keys) == 1
        assert them.keys != key
        assert all(memory[:NBYTES].eq(1).all() for memory in old)


def test_another_layout_gets_memory_of_its_own():
    with ranks(2) as them:
        them.round(1)
        them.round(2, nbytes=4 * NBYTES, layout=lambda _: "larger")
        assert {memory.segment.nbytes for memory in them.memories} == {4 * NBYTES}


def test_no_byte_comes_before_every_rank_has_mapped_it():
    with ranks(3) as them:
        first = them.begin(only=[0, 1])
        assert not them.bytes.began.wait(0.3)
        them.number -= 1
        last = them.begin(only=[2])
        for future in [*first, *last]:
            future.result(STALL)


def test_ranks_that_were_told_of_other_tensors_do_not_meet():
    with ranks(2) as them:
        one, two = them.begin(layout=lambda rank: f"of rank {rank}")
        with pytest.raises(ValueError, match=r"told of other tensors: of rank 1, not of rank 0"):
            two.result(STALL)
        them.receivers[0].abort()
        with pytest.raises(TransportAborted):
            one.result(STALL)
        them.close()
        them.round(3)


def test_the_lead_failing_ends_the_round_of_all():
    with ranks(3) as them:
        them.bytes.error = OSError("the wire is cut")
        one, *others = them.begin()
        with pytest.raises(OSError, match="cut"):
            one.result(STALL)
        for other in others:
            with pytest.raises(PeerLost, match=r"rank 0.*gave up: OSError: the wire is cut") as e:
                other.result(STALL)
            assert e.value.rank == 0
        them.bytes.error = None
        them.round(4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_aborted_while_bytes_arrive(rank):
    with ranks(2) as them:
        them.bytes.going.clear()
        parts = them.begin()
        assert them.bytes.began.wait(STALL)
        them.receivers[rank].abort()
        them.bytes.going.set()
        with pytest.raises(TransportAborted):
            parts[rank].result(STALL)
        with pytest.raises(PeerLost) as caught:
            parts[1 - rank].result(STALL)
        assert caught.value.rank == rank
        them.close()
        them.round(5)


def test_closing_a_lead_that_waits_for_the_others_is_not_the_next_rounds_business():
    with ranks(2) as them:
        lead, follower = them.receivers
        options = {"round": 1, "stall": STALL}
        maps = [
            them.pool.submit(receiver.map, memory, NBYTES, layout="same", **options)
            for receiver, memory in zip(them.receivers, them.memories, strict=True)
        ]
        memory, _ = [future.result(STALL) for future in maps]
        views = [memory[:256], memory[256:NBYTES]]
        landed = threading.Event()
        waiting = them.pool.submit(
            lead.receive, PLAN, views.__getitem__, lambda _: landed.set(), **options
        )
        assert landed.wait(STALL)
        while waiting.running() and lead._readers is not None and not lead._readers._done:
            time.sleep(0.01)
        lead.close()  # from this thread, as when the lane was given up
        with pytest.raises(TransportAborted):
            waiting.result(STALL)
        follower.close()
        assert not them.bytes.aborted
        them.number = 1
        them.round(6)


def test_a_rank_that_never_comes_is_named():
    with ranks(3) as them:
        lead, follower = them.receivers[:2]
        options = {"layout": "same", "round": 1}
        there = partial(follower.map, them.memories[1], NBYTES, stall=STALL, **options)
        came = them.pool.submit(there)
        while follower._link is None:
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match="1 of 2 readers connected") as caught:
            lead.map(them.memories[0], NBYTES, stall=2.5, **options)
        assert (caught.value.replica, caught.value.rank) == ("rank 2", 2)
        with pytest.raises(PeerLost):
            came.result(STALL)


def test_no_room_is_said_to_all_and_costs_the_round_only(monkeypatch):
    with ranks(2) as them:
        them.round(1)
        with monkeypatch.context() as patch:
            patch.setattr("transports.segments.available_memory", lambda: 100)
            one, two = them.begin(nbytes=8 * NBYTES)
            with pytest.raises(OutOfSharedMemory, match=f"{8 * NBYTES} bytes"):
                one.result(STALL)
            with pytest.raises(PeerLost, match="OutOfSharedMemory"):
                two.result(STALL)
        them.round(2)


def test_a_stranger_without_the_token_is_refused():
    with ranks(2) as them:
        address = them.receivers[1]._address
        stranger = FollowReceiver(1, address=address, token="guess")
        memory = StagingMemory()
        options = {"layout": "same", "round": 1, "stall": STALL}
        trying = them.pool.submit(stranger.map, memory, NBYTES, **options)
        parts = them.begin(only=[0])
        with pytest.raises(ValueError, match="wrong token"):
            trying.result(STALL)
        them.number -= 1
        for part in [*parts, *them.begin(only=[1])]:
            part.result(STALL)
        stranger.release()


def test_a_private_view_follows_what_it_did_not_write():
    segment = Segment.create(8192)
    own = segment.private()
    segment.tensor.fill_(1)
    assert own.eq(1).all()
    own[:4096].fill_(2)
    segment.tensor.fill_(3)
    assert segment.tensor.eq(3).all()
    assert own[:4096].eq(2).all()
    assert own[4096:].eq(3).all()
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        segment.private()
