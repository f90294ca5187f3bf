"""The doorbell: frames, descriptors, deadlines, peers that die."""

from __future__ import annotations

import array
import gc
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from statemachines.errors import Validation
from transports import links
from transports import waker as waiting
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.links import FRAME_LIMIT, Link, native_address
from transports.listener import Listener
from transports.waker import Waker, wait_ready

PROGRAM = Path(__file__).parent / "shm_programs" / "link_peer.py"


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def fd_count() -> int:
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def waker():
    waker = Waker()
    yield waker
    waker.close()


@pytest.fixture
def listener():
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def pair(waker, listener):
    """Both ends in one process; the far one has a waker of its own."""
    far_waker = Waker()
    near = Link.connect(listener.address, waker=waker, deadline=soon(), peer="far")
    far = listener.accept(far_waker, deadline=soon())
    yield near, far
    near.close()
    far.close()
    far_waker.close()


def raw_connection(listener: Listener) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(native_address(listener.address))
    return sock


def test_frames_arrive_whole_and_in_order(pair):
    near, far = pair
    payloads = [b"", b"a", bytes(range(256)) * 300, b"z" * FRAME_LIMIT]

    def receive(got):
        got.extend(far.recv(deadline=soon())[0] for _ in payloads)

    got: list[bytes] = []
    thread = threading.Thread(target=receive, args=(got,))
    thread.start()
    for payload in payloads:
        near.send(payload, deadline=soon())
    thread.join(10)
    assert got == payloads


def test_descriptors_travel_with_their_frame(pair):
    near, far = pair
    read_end, write_end = os.pipe()
    near.send(b"plain", deadline=soon())
    near.send(b"rights", [write_end, read_end], deadline=soon())
    near.send(b"after", deadline=soon())
    assert far.recv(deadline=soon(), max_fds=4) == (b"plain", [])
    payload, fds = far.recv(deadline=soon(), max_fds=4)
    assert payload == b"rights"
    os.write(fds[0], b"through")
    assert os.read(read_end, 16) == b"through"
    assert not any(os.get_inheritable(fd) for fd in fds)
    assert far.recv(deadline=soon(), max_fds=4) == (b"after", [])
    for fd in (read_end, write_end, *fds):
        os.close(fd)


@pytest.mark.parametrize("allowed", [0, 1])
def test_unexpected_descriptors_are_refused_and_closed(pair, allowed):
    near, far = pair
    read_end, write_end = os.pipe()
    before = fd_count()
    near.send(b"three", [read_end, write_end, read_end], deadline=soon())
    with pytest.raises(Validation, match="descriptors"):
        far.recv(deadline=soon(), max_fds=allowed)
    assert fd_count() == before
    os.close(read_end)
    os.close(write_end)


def test_descriptors_of_a_frame_that_never_ends_are_closed(listener, waker):
    read_end, write_end = os.pipe()
    before = fd_count()
    with raw_connection(listener) as sock:
        link = listener.accept(waker, deadline=soon())
        rights = array.array("i", [read_end, write_end])
        sock.sendmsg(
            [struct.pack("!I", 100) + b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )
        assert link.recv_nowait(max_fds=8) is None
        sock.close()
        with pytest.raises(PeerLost):
            link.recv(deadline=soon(), max_fds=8)
        link.close()
    assert fd_count() == before
    os.close(read_end)
    os.close(write_end)


def test_a_frame_in_single_bytes_still_arrives(listener, waker):
    with raw_connection(listener) as sock:
        link = listener.accept(waker, deadline=soon())
        frame = struct.pack("!I", 5) + b"hello"
        for at in range(len(frame) - 1):
            sock.send(frame[at : at + 1])
            assert link.recv_nowait() is None
        sock.send(frame[-1:])
        assert link.recv(deadline=soon()) == (b"hello", [])
        link.close()


@pytest.mark.fault("A-INPUT-2")
def test_a_hostile_length_is_refused_without_allocating(listener, waker):
    with raw_connection(listener) as sock:
        link = listener.accept(waker, deadline=soon())
        sock.send(struct.pack("!I", 0xFFFFFFFF))
        with pytest.raises(Validation, match="4294967295"):
            link.recv(deadline=soon())
        link.close()


def test_too_long_a_frame_or_too_many_descriptors_are_not_sent(pair):
    near, _ = pair
    with pytest.raises(Validation, match="limit"):
        near.post(b"x" * (FRAME_LIMIT + 1))
    with pytest.raises(Validation, match="descriptors"):
        near.post(b"x", [0] * 65)


def test_silence_ends_at_the_deadline(pair):
    near, _ = pair
    begun = time.monotonic()
    with pytest.raises(PhaseTimeout) as caught:
        near.recv(deadline=begun + 0.05)
    assert caught.value.replica == "far"
    assert time.monotonic() - begun < 5


def test_a_peer_that_does_not_read_stops_send_at_the_deadline_but_never_post(pair):
    near, far = pair
    for _ in range(8):
        near.post(b"x" * FRAME_LIMIT)
    assert near.unsent
    with pytest.raises(PhaseTimeout):
        near.flush(deadline=time.monotonic() + 0.05)
    received = 0
    while received < 8:  # waiting for input flushes output, so both sides may post and wait
        wait_ready([near], near._waker, deadline=time.monotonic() + 0.01)
        while far.recv_nowait() is not None:
            received += 1
    assert not near.unsent


@pytest.mark.parametrize("how", ["close", "shutdown"])
def test_a_closed_peer_is_lost_for_reading_and_writing(pair, how):
    near, far = pair
    far.send(b"last words", deadline=soon())
    getattr(far, how)()
    assert near.recv(deadline=soon()) == (b"last words", [])
    with pytest.raises(PeerLost) as caught:
        near.recv(deadline=soon())
    assert caught.value.replica == "far"
    with pytest.raises(PeerLost):
        near.send(b"x", deadline=soon())


def test_nobody_listens():
    waker = Waker()
    with pytest.raises(PeerLost, match="cannot connect"):
        Link.connect("@aiosync-nobody", waker=waker, deadline=soon())
    waker.close()


def test_a_full_queue_is_waited_for_until_the_deadline(waker):
    listener = Listener()
    listener._sock.listen(0)
    first = raw_connection(listener)
    with pytest.raises(PhaseTimeout, match="takes no connections"):
        Link.connect(listener.address, waker=waker, deadline=time.monotonic() + 0.05)
    first.close()
    listener.close()


@pytest.mark.parametrize("blocked_in", ["recv", "flush", "accept", "wait_ready"])
def test_wake_ends_every_wait(pair, listener, waker, blocked_in):
    near, _ = pair
    if blocked_in == "flush":
        for _ in range(4):
            near.post(b"x" * FRAME_LIMIT)
    waits = {
        "recv": lambda: near.recv(deadline=soon(30)),
        "flush": lambda: near.flush(deadline=soon(30)),
        "accept": lambda: listener.accept(waker, deadline=soon(30)),
        "wait_ready": lambda: wait_ready([near], waker, deadline=soon(30), listener=listener),
    }
    entered = threading.Event()

    def wake():
        entered.wait(5)
        waker.wake()

    thread = threading.Thread(target=wake)
    thread.start()
    entered.set()
    begun = time.monotonic()
    with pytest.raises(TransportAborted):
        waits[blocked_in]()
    assert time.monotonic() - begun < 5
    thread.join()
    with pytest.raises(TransportAborted):  # until it is reset
        waits[blocked_in]()
    waker.reset()
    assert wait_ready([], waker, deadline=time.monotonic() + 0.01) == ([], False)


def test_a_shutdown_by_our_own_abort_reads_as_aborted(pair, waker):
    near, _ = pair
    waker.wake()
    near.shutdown()
    with pytest.raises(TransportAborted):
        near.post(b"x")


def test_without_eventfd_a_pipe_serves(monkeypatch):
    monkeypatch.delattr(os, "eventfd")
    waker = Waker()
    for _ in range(3):
        waker.wake()
    with pytest.raises(TransportAborted):
        wait_ready([], waker, deadline=soon(30))
    waker.reset()
    assert wait_ready([], waker, deadline=time.monotonic() + 0.01) == ([], False)
    waker.close()
    waker.close()
    waker.wake()  # late, from a thread that does not know yet


def test_the_peer_is_who_the_kernel_says(pair):
    near, far = pair
    assert near.pid == far.pid == os.getpid()
    assert near.uid == os.geteuid()


def test_another_users_process_is_refused(listener, waker, monkeypatch):
    before = fd_count()
    with raw_connection(listener):
        monkeypatch.setattr(links.os, "geteuid", lambda: 54321)
        with pytest.raises(Validation, match="54321"):
            listener.accept_nowait(waker)
    assert fd_count() == before


def test_filesystem_socket_elsewhere(monkeypatch, waker):
    real = os.uname()
    monkeypatch.setattr("transports.listener.os.uname", lambda: type(real)(("Darwin", *real[1:])))
    listener = Listener()
    path = Path(listener.address)
    assert path.is_socket()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    link = Link.connect(listener.address, waker=waker, deadline=soon())
    listener.accept(waker, deadline=soon()).close()
    link.close()
    listener.close()
    assert not path.parent.exists()


def test_abstract_sockets_leave_no_file(listener):
    assert listener.address.startswith("@aiosync-")
    assert len(listener.address) == len("@aiosync-") + 32


@pytest.mark.slow
@pytest.mark.parametrize("forked_child", [False, True])
def test_a_killed_peer_is_noticed_even_when_its_child_keeps_the_socket(
    listener, waker, forked_child
):
    command = [sys.executable, str(PROGRAM), listener.address, "fork" if forked_child else "plain"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        link = listener.accept(waker, deadline=soon(20))
        assert link.pid == peer.pid
        assert link.recv(deadline=soon(20)) == (b"here", [])
        child = int(peer.stdout.readline())
        peer.kill()
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            link.recv(deadline=soon(10))
        assert time.monotonic() - begun < 5
        link.close()
        if child:
            os.kill(child, signal.SIGKILL)


def test_every_object_says_what_it_is(pair, listener, waker):
    near, _ = pair
    assert "far" in repr(near)
    assert "open" in repr(near)
    near.close()
    assert "closed" in repr(near)
    assert listener.address in repr(listener)
    waker.wake()
    assert "woken" in repr(waker)


def test_a_wait_that_was_short_makes_the_next_one_look_first(pair, monkeypatch):
    near, far = pair
    monkeypatch.setattr(waiting, "_SOON_S", math.inf)
    monkeypatch.setattr(waiting, "_LOOK_S", 5.0)
    slept = []
    ask = waiting.milliseconds_until
    monkeypatch.setattr(waiting, "milliseconds_until", lambda t: (slept.append(t), ask(t))[1])

    def answered_meanwhile():
        sender = threading.Timer(0.02, far.send, [b"news"], {"deadline": soon()})
        sender.start()
        assert near.recv(deadline=soon())[0] == b"news"
        sender.join()
        return len(slept)

    assert answered_meanwhile() == 1
    assert answered_meanwhile() == 1  # found while it looked


def test_a_wait_that_looked_in_vain_sleeps_the_next_time(waker, pair, monkeypatch):
    near, _ = pair
    looked = []
    monkeypatch.setattr(waiting, "_let_others_run", lambda: looked.append(None))
    waker._looks = True
    with pytest.raises(PhaseTimeout):
        near.recv(deadline=soon(0.01))
    assert looked
    assert not waker._looks
    looked.clear()
    with pytest.raises(PhaseTimeout):
        near.recv(deadline=soon(0.01))
    assert not looked
