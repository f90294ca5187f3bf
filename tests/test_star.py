"""Agreement among ranks: real sockets, one thread a rank."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiosync.errors import PeerLost, PhaseTimeout, TransportAborted, Validation
from transports.star import Star
from transports.star_door import StarHub, join_star
from transports.waker import Waker


def soon(seconds=20.0):
    return time.monotonic() + seconds


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as executor:
        yield executor


def join(hub, pool, rank, size, seconds=20.0, waker=None):
    options = {"rank": rank, "size": size, "waker": waker or Waker(), "deadline": soon(seconds)}
    return pool.submit(join_star, hub.address, hub.token, **options)


def gather(hub, size, pool):
    joins = [join(hub, pool, rank, size) for rank in range(1, size)]
    first = hub.accept(size, waker=Waker(), deadline=soon())
    return [first, *(joined.result(20) for joined in joins)]


def stars(size, pool, host="127.0.0.1"):
    hub = StarHub(host)
    try:
        return gather(hub, size, pool)
    finally:
        hub.close()


def exchange(all_stars, pool, seconds=20.0, **payloads):
    calls = [
        pool.submit(star.exchange, payloads.get(f"r{star.rank}", b"x"), deadline=soon(seconds))
        for star in all_stars
    ]
    return [call.exception(30) or call.result() for call in calls]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_everybody_gets_what_everybody_gave(size, pool):
    ranks = [Star.alone()] if size == 1 else stars(size, pool)
    for turn in range(3):
        given = {f"r{r}": f"{turn}-{r}".encode() * (1 << 10 * turn) for r in range(size)}
        for got in exchange(ranks, pool, **given):
            assert got == [given[f"r{r}"] for r in range(size)]
    for star in ranks:
        star.close()


def test_ipv6(pool):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    ranks = stars(2, pool, host="::1")
    assert exchange(ranks, pool) == [[b"x", b"x"]] * 2
    for star in ranks:
        star.close()


def test_a_rank_that_leaves_is_named_to_all_who_stay(pool):
    ranks = stars(4, pool)
    ranks[2].close()
    for error in exchange([ranks[0], ranks[1], ranks[3]], pool):
        assert isinstance(error, PeerLost)
        assert error.rank == 2
    for star in ranks:
        star.close()


def test_a_rank_that_does_not_come_is_named_to_all_who_did(pool):
    ranks = stars(3, pool)
    first = pool.submit(ranks[0].exchange, b"", deadline=soon(0.3))
    other = pool.submit(ranks[1].exchange, b"", deadline=soon())
    for call in (first, other):
        error = call.exception(20)
        assert isinstance(error, PhaseTimeout)
        assert error.rank == 2
    for star in ranks:
        star.close()


def test_ranks_at_different_exchanges_find_out(pool):
    ranks = stars(2, pool)
    ranks[1]._seq += 1
    errors = exchange(ranks, pool, seconds=5.0)
    assert isinstance(errors[0], Validation)
    for star in ranks:
        star.close()


def test_abort_ends_a_blocked_exchange(pool):
    ranks = stars(2, pool)
    blocked = pool.submit(ranks[1].exchange, b"", deadline=soon())
    threading.Timer(0.1, ranks[1].abort).start()
    assert isinstance(blocked.exception(20), TransportAborted)
    for star in ranks:
        star.close()


def test_strangers_do_not_get_in_and_do_not_keep_others_out(pool):
    hub = StarHub("127.0.0.1")
    host, _, port = hub.address.rpartition("|")
    accepting = pool.submit(hub.accept, 2, waker=Waker(), deadline=soon())
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wrong = pool.submit(
            join_star, hub.address, "0" * 32, rank=1, size=2, waker=Waker(), deadline=soon()
        )
        assert isinstance(wrong.exception(20), PeerLost)
        right = join_star(hub.address, hub.token, rank=1, size=2, waker=Waker(), deadline=soon())
        first = accepting.result(20)
        hub.close()
        assert exchange([first, right], pool) == [[b"x", b"x"]] * 2
    for star in (first, right):
        star.close()


def test_nobody_comes_or_nobody_is_there():
    hub = StarHub("127.0.0.1")
    waker = Waker()
    with pytest.raises(PhaseTimeout, match="1, 2"):
        hub.accept(3, waker=waker, deadline=soon(0.2))
    hub.close()
    with pytest.raises(PeerLost):
        join_star(hub.address, hub.token, rank=1, size=2, waker=waker, deadline=soon())
    waker.close()


@pytest.mark.parametrize("before", [0, 1])
def test_a_rank_that_is_aborted_says_so_and_all_can_meet_again(before, pool):
    hub = StarHub("127.0.0.1")
    for epoch in (1, 2):
        ranks = gather(hub, 3, pool)
        assert [star.epoch for star in ranks] == [epoch] * 3
        assert exchange(ranks, pool) == [[b"x"] * 3] * 3
        ranks[1].abort()
        with pytest.raises(TransportAborted):
            ranks[1].exchange(b"", deadline=soon())
        for star in (ranks[0], ranks[2]):
            star._seq += before  # how far the others have come since
        for error in exchange([ranks[0], ranks[2]], pool):
            assert isinstance(error, PeerLost)
            assert error.rank == 1
            assert "was cancelled" in error.message
            # Whoever leaves the meeting of now does not come back to it.
            assert error.detail["alive"] == bool(before)
        for star in ranks:
            with pytest.raises((PeerLost, TransportAborted)):
                star.exchange(b"", deadline=soon())
            star.close()
    hub.close()


def test_a_rank_that_died_left_no_word(pool):
    ranks = stars(3, pool)
    ranks[2].close()
    for error in exchange(ranks[:2], pool):
        assert error.rank == 2
        assert not error.detail.get("alive")
    for star in ranks:
        star.close()


def test_a_rank_that_comes_again_takes_its_older_place(pool):
    hub = StarHub("127.0.0.1")
    waker = Waker()
    early = join(hub, pool, 1, 2, seconds=0.3, waker=waker)
    assert isinstance(early.exception(20), PhaseTimeout)
    late = join(hub, pool, 1, 2)
    first = hub.accept(2, waker=Waker(), deadline=soon())
    assert exchange([first, late.result(20)], pool) == [[b"x", b"x"]] * 2
    for star in (first, late.result()):
        star.close()
    hub.close()
    waker.close()


def test_those_who_came_learn_who_did_not(pool):
    hub = StarHub("127.0.0.1")
    came = join(hub, pool, 1, 3)
    waker = Waker()
    with pytest.raises(PhaseTimeout, match="rank 2 did not come"):
        hub.accept(3, waker=waker, deadline=soon(1.0))
    error = came.exception(20)
    assert isinstance(error, PhaseTimeout)
    assert error.rank == 2
    hub.close()
    waker.close()
