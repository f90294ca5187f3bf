"""Where ranks meet: addresses, the store, who did not come."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from limits import SLACK

from statemachines.errors import Validation
from transports.addresses import advertised, bare_host
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.rendezvous import Meeting, StoreHost


@contextmanager
def hosted(address="127.0.0.1", port=0):
    host = StoreHost(address, port)
    try:
        yield host
    finally:
        host.close()


@contextmanager
def met(host, *, size=1, rank=0, prefix="test", address=None, names=()):
    meeting = Meeting(address or host.host, host.port, prefix, rank=rank, size=size, names=names)
    try:
        meeting.connect(deadline=time.monotonic() + 10)
        yield meeting
    finally:
        meeting.close()


def soon(seconds=10.0):
    return time.monotonic() + seconds


@pytest.mark.fault("A-RDZV-1")
@pytest.mark.parametrize(
    ("given", "bare"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        (" localhost ", "localhost"),
        ("fe80::1%lo", "fe80::1%lo"),
    ],
)
def test_hosts_lose_their_brackets(given, bare):
    assert bare_host(given) == bare


@pytest.mark.fault("A-RDZV-6")
@pytest.mark.parametrize("given", ["0.0.0.0", "::", "[::]", "", "http://127.0.0.1", "1.2.3.4:5", 7])
def test_what_nobody_can_connect_to_is_refused(given):
    with pytest.raises(Validation, match=r"host|wildcard|address"):
        bare_host(given)


@pytest.mark.fault("A-RDZV-6")
def test_the_advertised_address_is_on_the_way_to_the_workers():
    assert advertised(["127.0.0.1", "localhost"]) in ("127.0.0.1", "::1")
    assert advertised(["::1"]) == "::1"
    far = advertised([None, "127.0.0.1"])
    assert far not in ("0.0.0.0", "::", "")
    with hosted(far):  # it is an address of this host
        pass
    with pytest.raises(Validation, match=r"no-such-host\.invalid"):
        advertised(["no-such-host.invalid"])


@pytest.mark.fault("A-RDZV-1")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_all_forms_of_an_address_work_on_both_sides(address):
    with hosted(address) as host:
        assert not host.host.startswith("[")
        with met(host, address=address) as meeting:
            meeting.announce("here", b"\x00\xff")
            assert meeting.gather("here", deadline=soon()) == [b"\x00\xff"]


@pytest.mark.fault("A-RDZV-2")
def test_a_taken_port_is_refused_by_name_at_once():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Validation, match=f"port {port} on 127.0.0.1 is taken"):
            StoreHost("127.0.0.1", port)
    with hosted("127.0.0.1", port) as host:
        assert host.port == port
        with pytest.raises(Validation, match="taken"):
            StoreHost("127.0.0.1", port)
    with hosted("127.0.0.1", port):
        pass


def test_a_foreign_address_and_bad_ports_are_refused():
    with pytest.raises(Validation, match="not an address of this host"):
        StoreHost("203.0.113.7")
    for port in (-1, 1 << 16, True, "80"):
        with pytest.raises(Validation, match="master_port"):
            StoreHost("127.0.0.1", port)


def test_nobody_listens_names_address_and_port():
    with hosted() as host:
        port = host.port
    meeting = Meeting("127.0.0.1", port, "test", rank=0, size=1)
    began = time.monotonic()
    with closing(meeting), pytest.raises(PeerLost, match=rf"127\.0\.0\.1 port {port}"):
        meeting.connect(deadline=soon(20))
    assert time.monotonic() - began < 10


def test_a_store_that_is_closed_on_the_way_to_it_is_not_waited_for(monkeypatch):
    host = StoreHost("127.0.0.1")
    meeting = Meeting(host.host, host.port, host.new_prefix(), rank=0, size=1)
    reach = meeting._reach

    def reached_in_vain(deadline):
        way = reach(deadline)
        host.close()
        return way

    monkeypatch.setattr(meeting, "_reach", reached_in_vain)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"nobody listens|cannot connect"):
        meeting.connect(deadline=soon(30))
    assert time.monotonic() - began < 15
    meeting.close()


def test_a_limit_that_comes_late_leaves_the_last_word_to_who_knows_more():
    """As after a second in which the whole machine stood still: both timers are overdue."""
    late = time.monotonic() - 5
    with hosted() as host, met(host, size=2, names=("one", "two")) as meeting:
        with pytest.raises(PhaseTimeout, match=r"still waiting for one.*two") as caught:
            with meeting.limited("join", deadline=late):
                time.sleep(0.05)
                meeting.gather("here", deadline=late)
        assert caught.value.replica == "one"
        with pytest.raises(PhaseTimeout, match="could not join in time"):
            with meeting.limited("join", deadline=late):
                meeting.gather("here", deadline=soon())


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's resolver settings")
def test_a_name_server_that_does_not_answer_delays_little():
    # torch asks it what the store's address is called. In a process of its own: torch learns.
    script = Path(__file__).parent / "support" / "mute_name_server.py"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    took, questions, unchanged = done.stdout.split()
    assert float(took) < 8  # the C library itself waits for five seconds, twice
    assert int(questions) <= 1
    assert unchanged == "True"


@pytest.mark.fault("A-RDZV-1")
def test_an_unknown_host_is_named():
    meeting = Meeting("no-such-host.invalid", 1, "test", rank=0, size=1)
    with closing(meeting), pytest.raises(Validation, match=r"no-such-host\.invalid"):
        meeting.connect(deadline=soon())


@pytest.mark.fault("A-HANG-7")
def test_a_server_that_never_answers_costs_no_more_than_the_deadline():
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        meeting = Meeting("127.0.0.1", mute.getsockname()[1], "test", rank=0, size=1)
        began = time.monotonic()
        with closing(meeting), pytest.raises(PhaseTimeout):
            meeting.connect(deadline=soon(1))
        assert time.monotonic() - began < 1 + SLACK


@pytest.mark.fault("A-CANCEL-4")
def test_abort_wakes_a_connect_that_gets_no_answer():
    with closing(socket.create_server(("127.0.0.1", 0))) as mute, ThreadPoolExecutor() as threads:
        meeting = Meeting("127.0.0.1", mute.getsockname()[1], "test", rank=0, size=1)
        waiting = threads.submit(meeting.connect, deadline=soon(30))
        mute.settimeout(10)
        trial, torchs_own = mute.accept()[0], mute.accept()[0]
        with trial, torchs_own:
            meeting.abort()
            with pytest.raises(TransportAborted):
                waiting.result(10)
        meeting.close()


@pytest.mark.fault("A-HANG-7")
def test_gather_waits_and_names_who_did_not_come():
    names = ["trainer", "one", "two", "three"]
    with hosted() as host, met(host, size=4, names=names) as mine:
        mine.announce("here", b"0")
        with met(host, size=4, rank=2, names=names) as other:
            other.announce("here", b"2")
            assert mine.gather("here", ranks=[0, 2], deadline=soon()) == [b"0", b"2"]
            with pytest.raises(PhaseTimeout, match=r"one \(rank 1\), three \(rank 3\)") as caught:
                mine.gather("here", deadline=soon(0.2))
            assert (caught.value.replica, caught.value.rank) == ("one", 1)
            assert caught.value.detail["replicas"] == ["one", "three"]
            with pytest.raises(PhaseTimeout) as caught:
                mine.gather("here", ranks=[0, 2, 3], deadline=soon(0.2))
            assert (caught.value.replica, caught.value.rank) == ("three", 3)


def test_abort_and_a_closed_store_wake_a_gather():
    with hosted() as host, ThreadPoolExecutor() as threads:
        for end, error in ((Meeting.abort, TransportAborted), (None, PeerLost)):
            with met(host, size=2) as mine:
                asked = threading.Event()

                def is_broken(asked=asked):
                    asked.set()
                    return False

                waiting = threads.submit(
                    mine.gather, "here", ranks=[1], deadline=soon(30), is_broken=is_broken
                )
                assert asked.wait(10)
                if end is None:
                    host.close()
                else:
                    end(mine)
                with pytest.raises(error):
                    waiting.result(5)


def test_a_broken_group_ends_a_gather_unless_all_was_said():
    with hosted() as host, met(host, size=2) as mine, met(host, size=2, rank=1) as other:
        other.announce("last words", b"x")
        assert mine.gather("last words", ranks=[1], deadline=soon(), is_broken=lambda: True)
        with pytest.raises(PeerLost):
            mine.gather("never said", ranks=[1], deadline=soon(30), is_broken=lambda: True)


@pytest.mark.fault("A-RDZV-7")
def test_each_meeting_has_its_own_keys_and_the_store_does_not_grow():
    with hosted() as host, ThreadPoolExecutor() as threads:
        prefixes = set()
        for number in range(5):
            prefix = host.new_prefix()
            prefixes.add(prefix)
            with met(host, size=2, prefix=prefix) as mine:
                mine.announce("here", b"%d" % number)
                waiting = threads.submit(mine.gather, "here", deadline=soon())
                # The other one is late, and what it said in the last round does not count.
                assert not waiting.done()
                with met(host, size=2, rank=1, prefix=prefix) as other:
                    other.announce("here", b"late %d" % number)
                    assert waiting.result(10) == [b"%d" % number, b"late %d" % number]
                mine.sweep("here")
            assert host.num_keys() == 0
        assert len(prefixes) == 5


def test_opening_and_closing_leaves_no_descriptor():
    def cycle():
        with hosted() as host, met(host) as meeting:
            meeting.announce("here", b"")
            meeting.gather("here", deadline=soon())
            meeting.settle()

    cycle()
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(20):
        cycle()
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before
