"""A gateway's record that outlives its process."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import warnings
from contextlib import AsyncExitStack, asynccontextmanager

import by_hand
import msgspec
import pytest
from processes import program, replica

import aiosync
from aiosync import FleetClient, FleetGateway, GatewayClient, Member, RoundRecord
from aiosync.record_file import RecordFile
from aiosync.testing import DirectClient

pytestmark = pytest.mark.asyncio


def record(number: int, state: str = "committed") -> RoundRecord:
    return RoundRecord(id=f"id{number}", seq=number, state=state, owner="trainer")


@asynccontextmanager
async def opened(path):
    file = RecordFile(path)
    records = await file.open()
    try:
        yield file, records
    finally:
        await file.aclose()


# --- the file ---


async def test_the_last_line_of_an_offer_counts_and_a_torn_one_is_cut_off(tmp_path):
    path = tmp_path / "rounds"
    async with opened(path) as (file, records):
        assert records == []
        await file.write(record(1, "offered"))
        await file.write(record(2, "offered"))
        await file.write(record(1, "accepted"))
        file.note(record(1))  # on its way when the file is closed
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as torn:
        torn.write(b'{"id": "id3", "st')
    async with opened(path) as (file, records):
        assert [(each.id, each.state) for each in records] == [
            ("id1", "committed"),
            ("id2", "offered"),
        ]
        await file.write(record(3))
    async with opened(path) as (_, records):
        assert [each.seq for each in records] == [1, 2, 3]


async def test_what_is_no_record_is_refused_by_line(tmp_path):
    path = tmp_path / "rounds"
    path.write_bytes(msgspec.json.encode(record(1)) + b"\nnonsense\n")
    before = path.read_bytes()
    with pytest.raises(aiosync.Validation, match="rounds, line 2: "):
        await RecordFile(path).open()
    assert path.read_bytes() == before
    with pytest.raises(aiosync.Validation, match="its folder does not exist"):
        await RecordFile(tmp_path / "nowhere" / "rounds").open()
    with pytest.raises(aiosync.Validation, match="record must be the path"):
        RecordFile(7)


async def test_one_gateway_at_a_time_has_the_file(tmp_path):
    path = tmp_path / "rounds"
    async with opened(path):
        with pytest.raises(aiosync.Busy, match="another gateway writes it"):
            await RecordFile(path).open()
    async with opened(path):
        pass


async def test_it_does_not_grow_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("aiosync.record_file.KEPT", 4)
    monkeypatch.setattr("aiosync.record_file._GROWN", 16)
    path = tmp_path / "rounds"
    async with opened(path) as (file, _):
        for number in range(100):
            await file.write(record(number))
            assert path.read_bytes().count(b"\n") <= 16
    async with opened(path) as (_, records):
        assert [each.seq for each in records] == [96, 97, 98, 99]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rounds"]


async def test_a_full_disk_is_told_and_the_next_write_mends_the_file(tmp_path, monkeypatch):
    path = tmp_path / "rounds"
    async with opened(path) as (file, _):
        await file.write(record(1))
        before = path.read_bytes()
        with monkeypatch.context() as patch:

            def full(_descriptor):
                raise OSError(errno.ENOSPC, "no space left on device")

            patch.setattr("aiosync.record_file.os.fsync", full)
            with pytest.raises(aiosync.AiosyncError, match=r"cannot be written: .*no space left"):
                await file.write(record(2))
            assert path.read_bytes() == before
        await file.write(record(3))
    lines = path.read_bytes().splitlines()
    assert [msgspec.json.decode(line)["id"] for line in lines] == ["id1", "id2", "id3"]


# --- the gateway ---


@asynccontextmanager
async def gateway_over(engines, path):
    fleet = FleetClient([Member(f"m{n}", DirectClient(each)) for n, each in enumerate(engines)])
    async with FleetGateway(fleet, heartbeat_s=0.1, misses=50, record=path) as gateway:
        yield gateway


@asynccontextmanager
async def two_engines():
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(by_hand.by_hand()) for _ in range(2)]


async def begun(gateway, number, order):
    this = by_hand.header(gateway.group, number, order)
    start = asyncio.ensure_future(gateway.start_weight_update(header=this))
    offers = gateway.offers()
    offer = await anext(offers)
    await offers.aclose()
    return this, start, offer


async def whole(gateway, number, order):
    this, start, offer = await begun(gateway, number, order)
    await offer.accept()
    await start
    await gateway.update_weights({"value": float(order)}, header=this)
    await gateway.finish_weight_update(str(order), header=this)


async def test_a_restarted_gateway_says_what_became_of_every_round(tmp_path):
    path, crashed = tmp_path / "rounds", tmp_path / "crashed"
    async with two_engines() as engines:
        async with gateway_over(engines, path) as gateway:
            await by_hand.owned(gateway.group)
            await whole(gateway, 1, 1)
            _, start, offer = await begun(gateway, 2, 2)
            await offer.decline("not now")
            with pytest.raises(aiosync.Refused):
                await start
            this, start, offer = await begun(gateway, 3, 3)
            await offer.accept()
            await start
            shutil.copy(path, crashed)  # as it is on the disk right now
            await gateway.abort_weight_update("enough", header=this)
        async with gateway_over(engines, crashed) as gateway:
            found = gateway.rounds()
            assert [each.state for each in found] == ["committed", "declined", "failed"]
            assert [m.outcome for m in found[0].members] == ["committed"] * 2
            assert (found[1].reason, found[2].members[0].name) == ("not now", "m0")
            assert found[2].reason == "the gateway ended during the round"
            with pytest.raises(aiosync.Refused, match="declined already"):
                await gateway.desk.accept(found[1].id)
            await by_hand.owned(gateway.group)
            await whole(gateway, 1, 4)
            assert [each.seq for each in gateway.rounds()] == [1, 2, 3, 4]


@pytest.mark.parametrize("holds", [(3, 3), (3, 1), (4, 4), (1, 1)])
async def test_a_round_in_flight_is_unknown_until_the_members_are_asked(tmp_path, holds):
    path = tmp_path / "rounds"
    in_flight = RoundRecord(id="x", seq=1, state="accepted", version=by_hand.version(3))
    path.write_bytes(msgspec.json.encode(in_flight) + b"\n")
    async with two_engines() as engines:
        for engine, order in zip(engines, holds, strict=True):
            engine.version = by_hand.version(order)
        this = aiosync.RoundHeader(owner="somebody", round=1, version=by_hand.version(9))
        await engines[0].init_transfer_engine({"address": "x"}, header=this)
        this = by_hand.header(engines[0], 1, 9)
        await engines[0].start_weight_update(header=this)
        async with gateway_over(engines, path) as gateway:
            (found,) = gateway.rounds()  # a member is still in a round: it cannot say yet
            assert (found.state, found.members) == ("unknown", [])
            await engines[0].abort_weight_update("dead", header=this)
            async with asyncio.timeout(20):
                while gateway.rounds()[0].ended_at is None and holds != (4, 4):
                    await asyncio.sleep(0.02)
                while holds == (4, 4) and "newer" not in gateway.rounds()[0].reason:
                    await asyncio.sleep(0.02)
            (found,) = gateway.rounds()
        expected = {(3, 3): "committed", (1, 1): "failed"}.get(holds, "unknown")
        assert found.state == expected
        if holds == (3, 1):
            assert found.reason == "the gateway ended between two commits: not on m1"
            assert [m.outcome for m in found.members] == ["committed", "failed"]
        async with gateway_over(engines, path) as gateway:
            assert gateway.rounds() == [found]


async def test_an_offer_that_nobody_had_decided_about_was_withdrawn(tmp_path):
    path = tmp_path / "rounds"
    path.write_bytes(msgspec.json.encode(record(1, "offered")) + b"\n")
    async with two_engines() as engines, gateway_over(engines, path) as gateway:
        (found,) = gateway.rounds()
        assert (found.state, found.seconds_left) == ("withdrawn", 0.0)
        assert gateway.desk.waiting() is None


async def test_nobody_acts_on_a_decision_that_is_not_on_record(tmp_path, monkeypatch):
    async with two_engines() as engines, gateway_over(engines, tmp_path / "rounds") as gateway:
        await by_hand.owned(gateway.group)
        _, start, offer = await begun(gateway, 1, 1)
        with monkeypatch.context() as patch:

            def broken(*_):
                raise OSError(errno.EIO, "the disk is broken")

            patch.setattr("aiosync.record_file.os.pwrite", broken)
            with pytest.raises(aiosync.AiosyncError, match="the disk is broken"):
                await offer.accept()
            assert gateway.rounds()[0].state == "offered"
            assert not start.done()
        await offer.accept()
        await start


async def test_the_decision_is_on_the_disk_when_accept_returns(tmp_path, monkeypatch):
    path = tmp_path / "rounds"
    synced = []
    fsync = os.fsync

    def watched(descriptor):
        fsync(descriptor)
        synced.append(path.read_bytes())

    async with two_engines() as engines, gateway_over(engines, path) as gateway:
        await by_hand.owned(gateway.group)
        _, start, offer = await begun(gateway, 1, 1)
        monkeypatch.setattr("aiosync.record_file.os.fsync", watched)
        await offer.accept()
        assert b'"state":"accepted"' in synced[-1]
        await start


@pytest.mark.slow
async def test_a_gateway_killed_between_two_commits_is_followed_by_one_that_knows(tmp_path):
    path = tmp_path / "rounds"
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(replica(name=f"m{n}", seed=n, lease=1))
            for n in range(2)
        ]
        urls = [each.url for each in found]
        async with program("half_committed.py", f"gateway={path}", *urls) as dying:
            await dying.wait(40)
        fleet = FleetClient([Member(f"m{n}", url) for n, url in enumerate(urls)])
        async with FleetGateway(fleet, record=path) as gateway, aiosync.serve(gateway) as server:
            client = GatewayClient(server.url)
            async with asyncio.timeout(30):
                while (last := (await client.rounds())[-1]).ended_at is None:
                    assert last.state == "unknown"
                    await asyncio.sleep(0.1)
            states = [each.state for each in await client.rounds()]
        assert states == ["committed", "unknown"]
        assert last.reason == "the gateway ended between two commits: not on m1"
        assert [(m.name, m.outcome) for m in last.members] == [
            ("m0", "committed"),
            ("m1", "failed"),
        ]


async def test_a_forked_child_does_not_keep_the_file(tmp_path, blocking_detector):
    blocking_detector.deactivate()
    path, (reading, writing), (begun, begins) = tmp_path / "rounds", os.pipe(), os.pipe()
    async with opened(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads, and a fork
            child = os.fork()
        if child == 0:
            try:
                os.close(writing)
                os.write(begins, b"!")  # what it lets go of is let go of before `fork` returns
                os.read(reading, 1)
            finally:
                os._exit(0)
        os.close(begins)
        await asyncio.to_thread(os.read, begun, 1)
    try:
        async with opened(path):
            pass
    finally:
        for end in (writing, reading, begun):
            os.close(end)
        await asyncio.to_thread(os.waitpid, child, 0)
