"""Several API processes at one address: noticed at start, and by the round that meets both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import models
import pytest
from aiohttp import web
from by_hand import ByHand, tensors

import aiosync
from aiosync.api_processes import Claims
from aiosync.testing import DirectClient

linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
CHILD = """
import asyncio, socket, sys
from aiosync.api_processes import Claims

with socket.socket(fileno=int(sys.argv[1])) as sock:
    claims = Claims()
    asyncio.run(claims.hold())
    print("holds", flush=True)
    sys.stdin.read()
"""


def bound(port=0):
    """A socket that others may share the address of."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


@contextmanager
def another_process(sock):
    """Another API process, which has claimed `sock`; ours is closed by then."""
    command = [sys.executable, "-c", CHILD, str(sock.fileno())]
    with subprocess.Popen(
        command, pass_fds=[sock.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        sock.close()
        try:
            assert child.stdout.readline() == b"holds\n"
            yield child
        finally:
            child.kill()


@pytest.fixture
def shared(blocking_detector):
    """An address that another process serves, too: its port, and that process."""
    with bound() as keeper, another_process(bound(keeper.getsockname()[1])) as child:
        port = keeper.getsockname()[1]
        keeper.close()
        yield port, child


def make_service():
    engine = ByHand(aiosync.WeightTransferConfig("by_hand"), None, "cpu", tensors(), name="replica")
    return engine, aiosync.WeightUpdateService(engine)


@linux
@pytest.mark.asyncio
async def test_a_shared_port_is_refused_at_start(shared):
    port, child = shared
    engine, service = make_service()
    async with engine:
        with bound(port):
            with pytest.raises(aiosync.Refused) as caught:
                async with service.hosted():
                    pass
            text = str(caught.value)
            assert f"process {child.pid} serves 127.0.0.1:{port}" in text
            assert f"process {os.getpid()}" in text
            assert "--workers 1" in text
            child.kill()
            child.wait()
            async with service.hosted():
                pass


@linux
@pytest.mark.asyncio
async def test_a_host_that_listens_after_its_start_refuses_requests(shared):
    port, child = shared
    engine, service = make_service()
    app = web.Application()
    service.set_up(app)
    runner = web.AppRunner(app)
    async with engine, aiohttp.ClientSession() as session:
        await runner.setup()
        try:
            # The other one holds its socket and does not listen: all connections come here.
            await web.TCPSite(runner, "127.0.0.1", port, reuse_port=True).start()
            base = f"http://127.0.0.1:{port}"
            async with session.get(f"{base}/health") as answer:
                assert answer.status == 200
            for _ in range(2):
                async with session.get(f"{base}/ready") as answer:
                    assert answer.status == 409
                    error = (await answer.json())["error"]
                    assert f"process {child.pid} serves 127.0.0.1:{port}" in error["message"]
            init = {"json": {"init_info": {}}}
            async with session.post(f"{base}/init_weight_transfer_engine", **init) as answer:
                assert answer.status == 409
            assert engine.state == "idle"
            child.kill()
            child.wait()
            async with session.post(f"{base}/init_weight_transfer_engine", **init) as answer:
                assert answer.status == 200
        finally:
            await runner.cleanup()


@linux
def test_looking_often_does_not_fill_the_others_queue(shared):
    port, child = shared
    claims = Claims()
    with bound(port):
        for _ in range(200):  # more than a listening socket queues
            with pytest.raises(aiosync.Refused, match=f"process {child.pid}"):
                claims._claim_all()
    claims.release()


@linux
@pytest.mark.asyncio
async def test_addresses_that_nobody_else_can_have_are_not_in_the_way(blocking_detector):
    with socket.socket() as mine, bound() as own:
        mine.bind(("127.0.0.1", 0))
        first, second = Claims(), Claims()
        await first.hold()
        await second.hold()  # the same process
        first.release()
        await second.check()
        with another_process(bound()):
            await second.check(again=True)
        assert len(second.descriptors()) >= 3  # two by number, one by address as well
        second.release()
        assert second.descriptors() == []
        assert own.fileno() >= 0


# -- a round that meets both -----------------------------------------------------------------------


class Dealt:
    """A client whose calls are dealt out between two processes."""

    name = "w"

    def __init__(self, *workers):
        self.clients = [DirectClient(worker, name="w") for worker in workers]
        self.elsewhere = ()

    def __getattr__(self, method):
        return getattr(self.clients[method in self.elsewhere], method)


@asynccontextmanager
async def dealt():
    config = aiosync.WeightTransferConfig("ipc")
    create = aiosync.WeightTransferEngineFactory.create_engine
    one, two = (
        create(config, None, "cpu", models.make("small", seed), name="w") for seed in (2, 3)
    )
    source = models.make("small", 1)
    client = Dealt(one, two)
    async with one, two, aiosync.connect(source, workers=[client], backend="ipc") as sync:
        await sync.send_weights(version=1)
        yield sync, client, one, two


@pytest.mark.parametrize(
    "method", ["start_weight_update", "update_weights", "prepare_weight_update"]
)
@pytest.mark.asyncio
async def test_a_call_that_reaches_another_process_names_both(method):
    async with dealt() as (sync, client, one, two):
        client.elsewhere = {method}
        with pytest.raises(aiosync.AiosyncError) as caught:
            await sync.send_weights(version=2)
        assert one.incarnation in str(caught.value)
        assert two.incarnation in str(caught.value)
        assert two.version is None
        assert one.version.label == 1
        client.elsewhere = ()
        await sync.send_weights(version=3)
        assert one.version.label == 3


@pytest.mark.asyncio
async def test_answers_of_two_processes_in_turn_are_refused():
    async with dealt() as (sync, client, one, two):
        client.elsewhere = {"capabilities", "weight_update_status"}  # those that everybody answers
        link = sync.links[0]
        await link.probe()
        client.elsewhere = ()
        with pytest.raises(aiosync.Refused) as caught:
            await sync.send_weights(version=2)
        both = [one.incarnation, two.incarnation]
        assert caught.value.detail["incarnations"] == both
        assert all(each in str(caught.value) for each in both)
        assert one.version.label == 1
        await sync.send_weights(version=3)  # one process answers again
        assert one.version.label == 3


@pytest.mark.asyncio
async def test_a_finish_that_was_answered_in_turn_is_not_called_failed():
    async with dealt() as (sync, client, _one, two):
        link = sync.links[0]

        async def meet(method):
            if method == "finish_weight_update":
                link.note(two.peer_state())  # as a heartbeat would

        client.clients[0]._before = meet
        with pytest.raises(aiosync.Refused):
            await sync.send_weights(version=2)
        assert sync.last_report.members[0].outcome in ("unknown", "committed")


@linux
@pytest.mark.asyncio
async def test_claims_are_no_more_than_there_are_listeners():
    claims = Claims()
    await claims.check()
    before = len(claims.descriptors())
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)):
            await claims.check(again=True)
            assert len(claims.descriptors()) <= before + 1
    await claims.check(again=True)
    assert len(claims.descriptors()) <= before
    claims.release()
