"""What processes share: a forked child holds no connection open, and a signal is waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import aiosync
from aiosync.errors import PeerLost
from transports.forked import keep_from_children
from transports.links import Link
from transports.listener import Listener
from transports.star_door import StarHub, join_star
from transports.waker import Waker


def soon(seconds=20.0):
    return time.monotonic() + seconds


def target(descriptor):
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


@contextmanager
def child():
    """A fork of this process that does nothing, for the length of the block."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_peers_see_the_end_of_a_link_and_of_its_listener():
    waker = Waker()
    with ExitStack() as stack:
        listener = stack.enter_context(closing(Listener()))
        connect = partial(Link.connect, listener.address, waker=waker)
        near = stack.enter_context(closing(connect(deadline=soon())))
        far = stack.enter_context(closing(listener.accept(waker, deadline=soon())))
        with child():
            near.send(b"parent goes on", deadline=soon())
            assert far.recv(deadline=soon()) == (b"parent goes on", [])
            near.close()
            with pytest.raises(PeerLost):
                far.recv(deadline=soon())
            listener.close()
            with pytest.raises(PeerLost):
                connect(deadline=soon())
    waker.close()


def test_ranks_see_the_end_of_a_star():
    hub = StarHub("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        where = (hub.address, hub.token)
        join = pool.submit(join_star, *where, rank=1, size=2, waker=Waker(), deadline=soon())
        first = hub.accept(2, waker=Waker(), deadline=soon())
        second = join.result(10)
        hub.close()
        with child():
            answer = pool.submit(second.exchange, b"b", deadline=soon())
            assert first.exchange(b"a", deadline=soon()) == [b"a", b"b"]
            assert answer.result(10) == [b"a", b"b"]
            second.close()
            with pytest.raises(PeerLost):
                first.exchange(b"a", deadline=soon())
    first.close()


def test_numbers_stay_taken_and_closed_ones_are_left_alone():
    class Owner:
        def descriptors(self):
            return [readable, -1]

    readable, writable = os.pipe()
    owner = Owner()
    keep_from_children(owner)
    report, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(told, target(readable).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(report, 100) == os.devnull.encode()
    assert "pipe" in target(readable)
    for descriptor in (readable, writable, report, told):
        os.close(descriptor)


@pytest.mark.asyncio
async def test_a_server_that_ended_takes_no_connections_and_ends_those_it_had():
    config = aiosync.WeightTransferConfig("loopback")
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=torch.nn.Linear(2, 2))
    async with engine, AsyncExitStack() as stack:
        server = await stack.enter_async_context(aiosync.serve(engine, port=0))
        host, _, port = server.url.rpartition("/")[2].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"200" in await reader.readline()
        with child():
            await stack.aclose()
            async with asyncio.timeout(10):
                await reader.read()  # to its end
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host, int(port))
        writer.close()


@pytest.mark.asyncio
async def test_signals_are_waited_for_in_the_main_thread_only():
    config = aiosync.WeightTransferConfig("loopback")
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=torch.nn.Linear(2, 2))
    async with engine, aiosync.serve(engine) as server:
        waiting = asyncio.ensure_future(server.until_signal((signal.SIGUSR1,)))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert await waiting is signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        with pytest.raises(aiosync.WrongLoop):
            await asyncio.to_thread(lambda: asyncio.run(server.until_signal()))
