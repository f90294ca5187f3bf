"""gloo groups between real processes, and the two halves of a stream over one."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from processes import program

from statemachines.errors import InvalidTransition, Validation
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout, TransportAborted
from transports.gloo_group import GlooGroup
from transports.gloo_stream import GlooReceiver, GlooSender
from transports.planning import ALIGNED, plan_chunks
from transports.rendezvous import Meeting, StoreHost
from transports.sections import sections_of

SIZES = pytest.mark.parametrize("size", [2, 4])


async def play(scene, size, arg=""):
    """The scene's lines, by what they are about, and the exit code of each rank."""
    said = {}
    async with program("gloo_ranks.py", scene, str(size), str(arg)) as process:
        async with asyncio.timeout(50):
            while line := await process.stdout.readline():
                facts = json.loads(line)
                if "statuses" in facts:
                    return said, facts["statuses"]
                said.setdefault(facts["what"], {})[facts["rank"]] = facts
    raise AssertionError(f"the ranks ended early: {said}")


def all_met_again(said, count):
    assert {rank: facts["result"] for rank, facts in said["again"].items()} == dict.fromkeys(
        range(count), 9
    )


@pytest.mark.asyncio
@SIZES
async def test_bytes_of_rank_0_reach_all_in_each_of_two_groups(size):
    said, statuses = await play("exchange", size)
    assert [said["one"][rank]["result"] for rank in range(size)] == [[7, 8]] * size
    assert [said["two"][rank]["result"] for rank in range(size)] == [5] * size
    assert statuses == [0] * size


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "who"), [(2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
async def test_abort_wakes_every_rank_and_kills_none(size, who):
    said, statuses = await play("abort", size, who)
    errors = {rank: facts["error"] for rank, facts in said["held"].items()}
    assert errors.pop(who) == "TransportAborted"
    assert errors == dict.fromkeys(set(range(size)) - {who}, "PeerLost")
    all_met_again(said, size)
    assert statuses == [0] * size


@pytest.mark.asyncio
@SIZES
async def test_a_killed_rank_is_noticed_by_all_others(size):
    said, statuses = await play("killed", size)
    assert {facts["error"] for facts in said["lost"].values()} == {"PeerLost"}
    assert len(said["lost"]) == size - 1
    assert any(f"name-{size - 1}" in facts["text"] for facts in said["lost"].values())
    if size > 2:
        all_met_again(said, size - 1)
    assert statuses == [0] * (size - 1) + [-9]


def test_of_several_lost_or_silent_ranks_the_first_is_named_and_all_are_listed(monkeypatch):
    names = ("trainer", "one", "two", "three")
    where = ("127.0.0.1", 1, "p")
    for gone in ([1, 3], [2], [-1, 1, 2], [-1], []):
        group = GlooGroup(Meeting(*where, rank=0, size=4, names=names))
        known = [rank for rank in gone if rank >= 0]
        monkeypatch.setattr(group, "lost", lambda gone=gone: gone)
        monkeypatch.setattr(group._signs, "silent", lambda _, known=known: known)
        for error in (group._failure(None), group._stalled(1.5)):
            assert error.rank == (known[0] if known else None)
            assert error.replica == (names[known[0]] if known else None)
            listed = [names[rank] for rank in known]
            assert error.detail.get("replicas", []) == listed
            assert (", ".join(listed) or "a rank of the group") in error.message
        group.close()


@pytest.mark.parametrize(
    ("silent", "blamed"), [([3], [3]), ([2, 3], [3]), ([], [1, 3]), ([3, 1], [3, 1])]
)
def test_who_is_held_up_by_a_silent_rank_is_not_blamed_for_what_it_did_not_say(
    monkeypatch, silent, blamed
):
    names = ("trainer", "one", "two", "three")
    meeting = Meeting("127.0.0.1", 1, "p", rank=0, size=4, names=names)
    group = GlooGroup(meeting)

    def gather(stage, **_):
        raise meeting.absent(stage, [1, 3])

    monkeypatch.setattr(meeting, "gather", gather)
    monkeypatch.setattr(meeting, "peek", lambda _, rank: b"" if rank == 2 else None)
    monkeypatch.setattr(group._signs, "silent", lambda _: silent)
    with pytest.raises(PhaseTimeout) as caught:
        group.gather("done", ranks=[1, 2, 3], timeout=1.0)
    assert caught.value.detail["replicas"] == [names[rank] for rank in blamed]
    assert caught.value.rank == blamed[0]
    group.close()


@pytest.mark.asyncio
@SIZES
async def test_a_stopped_rank_costs_the_timeout_and_can_come_back(size):
    said, statuses = await play("stopped", size)
    kinds = {facts["error"] for facts in said["stuck"].values()}
    assert "PhaseTimeout" in kinds
    assert kinds <= {"PhaseTimeout", "PeerLost"}
    all_met_again(said, size)
    assert statuses == [0] * size


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [4])
async def test_a_rank_that_leaves_between_two_broadcasts(size):
    said, statuses = await play("left", size)
    assert {facts["error"] for facts in said["lost"].values()} == {"PeerLost"}
    all_met_again(said, size)
    assert statuses == [0] * size


@pytest.mark.fault("A-HANG-7")
@pytest.mark.asyncio
@SIZES
async def test_a_rank_that_never_comes_is_named(size):
    said, statuses = await play("absent", size)
    for facts in said["join"].values():
        assert (facts["error"], facts["names"]) == ("PhaseTimeout", f"name-{size - 1}")
    all_met_again(said, size - 1)
    assert statuses == [0] * size


@pytest.mark.fault("A-CANCEL-4")
@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3])
async def test_a_join_can_be_aborted(size):
    said, statuses = await play("join_aborted", size)
    assert {facts["error"] for facts in said["join"].values()} == {"TransportAborted"}
    assert len(said["join"]) == size - 1
    all_met_again(said, size - 1)
    assert statuses == [0] * size


@pytest.mark.fault("A-HANG-7")
@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3])
async def test_a_rank_stopped_in_the_middle_of_the_join_can_come_back(size):
    said, statuses = await play("stopped_in_join", size)
    for rank in range(size - 1):
        facts = said["join"][rank]
        assert facts["error"] in ("PhaseTimeout", "PeerLost")
        assert facts["took"] < 4
    # One that stopped later, when gloo was connecting to it, cannot be told from its peers.
    assert said["join"][0]["names"] in (None, f"name-{size - 1}")
    all_met_again(said, size)
    assert statuses == [0] * size


# -- the stream ------------------------------------------------------------------------------------

SIZES_OF = [100, 0, 3 << 20, 7, 1 << 20, 5000, 0, 64, (1 << 20) - 2]


def planned(sizes=SIZES_OF, limit=1 << 21):
    return plan_chunks(sizes, [1] * len(sizes), limit=limit, rule=ALIGNED)


@contextmanager
def halves(digest="xxh3_64", readers=1, receiver_digest=None):
    """A sender and its receivers over joined groups, and threads to run them on."""
    host = StoreHost()
    prefix, size = host.new_prefix(), readers + 1
    groups = [
        GlooGroup(Meeting(host.host, host.port, prefix, rank=rank, size=size))
        for rank in range(size)
    ]
    with ThreadPoolExecutor(2 * size) as threads:
        try:
            list(threads.map(lambda group: group.join(timeout=20), groups))
            sender = GlooSender(groups[0], digest=digest)
            kind = receiver_digest or digest
            yield sender, [GlooReceiver(group, digest=kind) for group in groups[1:]], threads
        finally:
            for group in groups:
                group.close()
            host.close()


def random_tensors(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]


def send(sender, plan, tensors, readers=1, round=1, stall=10.0, batch=2):
    sender.open(plan, readers, round=round, stall=stall)
    pairs = list(enumerate(tensors))
    for start in range(0, len(pairs), batch):
        sender.write(pairs[start : start + batch])
    return sender.finish()


def receive(receiver, plan, into, order, round=1, stall=10.0):
    return receiver.receive(plan, lambda index: into[index], order.extend, round=round, stall=stall)


@pytest.mark.parametrize("limit", [64, 4096, 1 << 20, 1 << 21, 64 << 20])
def test_sections_cover_every_byte_once_and_no_part_exceeds_the_limit(limit):
    sizes = SIZES_OF if limit > 64 else [100, 0, 640, 7, 64, 63]
    plan = planned(sizes, limit)
    covered = [0] * len(sizes)
    at = 0
    for section in sections_of(plan):
        assert section.first == at
        at = section.end
        assert section.packed_nbytes <= limit
        ends = 0
        for part in section.packed:
            assert part.start >= ends
            assert part.start % 64 == 0
            ends = part.start + part.nbytes
        assert ends <= section.packed_nbytes
        for part in (*section.direct, *section.packed):
            assert part.nbytes <= limit
            assert section.first <= part.tensor < section.end
            assert part in section.packed or part.start == covered[part.tensor]
            covered[part.tensor] += part.nbytes
    assert at == len(sizes)
    assert covered == list(sizes)


@pytest.mark.parametrize("digest", ["xxh3_64", "wsum64", None])
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("limit", [4096, 1 << 21, 64 << 20])
def test_stream_round_trip(digest, readers, limit):
    sizes = SIZES_OF if limit > 4096 else [100, 0, 30_000, 7, 4096, 5000, 0, 64]
    plan = planned(sizes, limit)
    with halves(digest, readers) as (sender, receivers, threads):
        for round in (1, 2, 3):
            tensors = random_tensors(sizes, round)
            into = [[torch.zeros_like(t) for t in tensors] for _ in receivers]
            orders = [[] for _ in receivers]
            waiting = [
                threads.submit(receive, receiver, plan, mine, order, round)
                for receiver, mine, order in zip(receivers, into, orders, strict=True)
            ]
            sent = send(sender, plan, tensors, readers, round)
            for future, mine, order in zip(waiting, into, orders, strict=True):
                assert future.result(10) == sent
                assert all(map(torch.equal, mine, tensors))
                assert order == list(range(len(sizes)))
            assert (sent.digest is None) == (digest is None)
            assert sent.nbytes == sum(sizes)
        assert sender.progress.nbytes == 3 * sum(sizes)
        assert all(receiver.progress.nbytes == 3 * sum(sizes) for receiver in receivers)


def test_the_digest_is_of_the_tensors_and_not_of_what_lies_between_them():
    sizes = [100, 7, 5000]
    plan, tensors, digests = planned(sizes), random_tensors(sizes), set()
    for rubbish in (0x55, 0xAA):
        with halves() as (sender, (receiver,), threads):
            into = [torch.zeros_like(tensor) for tensor in tensors]
            waiting = threads.submit(receive, receiver, plan, into, [])
            sender.open(plan, 1, round=1, stall=10)
            for buffer in sender._plan_frames._buffers:
                buffer.fill_(rubbish)
            sender.write(list(enumerate(tensors)))
            digests.add(sender.finish().digest)
            waiting.result(10)
            assert all(map(torch.equal, into, tensors))
    assert len(digests) == 1


class Tampering:
    """A group that spoils what the `at`th broadcast brought."""

    def __init__(self, group, at):
        self._group, self._at, self._data = group, at, []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def broadcast(self, data, *, timeout):
        self._data.append(data)
        return self._group.broadcast(data, timeout=timeout), len(self._data) - 1

    def wait(self, pending, *, timeout):
        self._group.wait(pending[0], timeout=timeout)
        if pending[1] == self._at:
            self._data[self._at][0] ^= 1


@pytest.mark.fault("A-SILENT-1")
@pytest.mark.parametrize(("at", "tensor"), [(0, "tensor 2"), (2, "tensor 0")])
@pytest.mark.parametrize("digest", ["xxh3_64", "wsum64"])
def test_a_changed_byte_is_found_and_named_before_it_lands(digest, at, tensor):
    sizes = [100, 50, 3 << 20]
    plan = planned(sizes, 4 << 20)
    with halves(digest) as (sender, (receiver,), threads):
        receiver._group = Tampering(receiver._group, {0: 0, 2: 1}[at])
        order = []
        into = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
        waiting = threads.submit(receive, receiver, plan, into, order)
        with pytest.raises(PeerLost) as caught:
            send(sender, plan, random_tensors(sizes))
        assert caught.value.replica == "rank 1"
        with pytest.raises(DigestMismatch) as caught:
            waiting.result(10)
        assert caught.value.tensor == tensor
        assert order == []


@pytest.mark.fault("A-LAYOUT-10")
def test_no_byte_moves_before_both_sides_agree():
    plan, other = planned(), planned([*SIZES_OF, 1])
    with halves() as (sender, (receiver,), threads):
        into = [torch.zeros(n, dtype=torch.uint8) for n in (*SIZES_OF, 1)]
        waiting = threads.submit(receive, receiver, other, into, [])
        with pytest.raises(Validation, match="rank 1 expects another"):
            send(sender, plan, random_tensors(SIZES_OF))
        sender.close()
        with pytest.raises(PeerLost):
            waiting.result(10)
        assert not any(bool(t.any()) for t in into)


def test_a_reader_that_does_not_come_is_named():
    with halves() as (sender, _, _), pytest.raises(PhaseTimeout) as caught:
        send(sender, planned(), random_tensors(SIZES_OF), stall=1.0)
    assert (caught.value.replica, caught.value.phase) == ("rank 1", "open")


def test_a_sender_that_falls_silent_costs_the_stall():
    plan = planned()
    with halves() as (sender, (receiver,), threads):
        into = [torch.zeros(n, dtype=torch.uint8) for n in SIZES_OF]
        waiting = threads.submit(receive, receiver, plan, into, [], 1, 1.0)
        sender.open(plan, 1, round=1, stall=10)
        with pytest.raises(PhaseTimeout, match="rank 0"):
            waiting.result(10)
        with pytest.raises(PeerLost):
            sender.write([(0, random_tensors(SIZES_OF)[0]), (1, torch.empty(0)), *[]])
            sender.write([(2, random_tensors(SIZES_OF)[2])])


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_abort_ends_both_halves(side):
    plan = planned()
    with halves() as (sender, (receiver,), threads):
        into = [torch.zeros(n, dtype=torch.uint8) for n in SIZES_OF]
        waiting = threads.submit(receive, receiver, plan, into, [])
        sender.open(plan, 1, round=1, stall=10)
        (sender if side == "sender" else receiver).abort()
        with pytest.raises(TransportAborted if side == "receiver" else PeerLost):
            waiting.result(10)
        with pytest.raises(TransportAborted if side == "sender" else PeerLost):
            sender.write(list(enumerate(random_tensors(SIZES_OF))))


def test_leaving_a_round_early_ends_it_for_the_other_side():
    plan = planned()
    with halves() as (sender, (receiver,), threads):
        into = [torch.zeros(n, dtype=torch.uint8) for n in SIZES_OF]
        waiting = threads.submit(receive, receiver, plan, into, [])
        sender.open(plan, 1, round=1, stall=10)
        sender.close()
        with pytest.raises(PeerLost):
            waiting.result(10)


def test_wrong_order_and_wrong_sizes_are_refused():
    plan = planned()
    with halves() as (sender, (receiver,), threads):
        with pytest.raises(Validation, match="2 readers in a group of 2"):
            sender.open(plan, 2, round=1, stall=1)
        with pytest.raises(InvalidTransition):
            sender.write([])
        with pytest.raises(Validation, match="stall"):
            sender.open(plan, 1, round=1, stall=float("inf"))
        into = [torch.zeros(n, dtype=torch.uint8) for n in SIZES_OF]
        waiting = threads.submit(receive, receiver, plan, into, [])
        sender.open(plan, 1, round=1, stall=10)
        tensors = random_tensors(SIZES_OF)
        with pytest.raises(Validation, match="tensor 1 was written, tensor 0 is next"):
            sender.write([(1, tensors[1])])
        with pytest.raises(Validation, match="tensor 0 has 7 bytes, planned were 100"):
            sender.write([(0, tensors[3])])
        sender.write([(0, tensors[0])])
        with pytest.raises(Validation, match="tensor 1 was not written"):
            sender.finish()
        sender.close()
        with pytest.raises(PeerLost):
            waiting.result(10)
