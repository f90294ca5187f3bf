"""A `transports.groups.CollectiveGroup` over gloo.

gloo connects every pair of ranks by TCP and waits for them in native code. Each group gets a
listener of its own (a gloo device), and the ranks tell each other its port, so a group's
connections can be told from all other sockets of the process; duplicates of them are kept. Shutting
those down is the abort: gloo has none that wakes a waiting rank. Looking at them tells, while a
collective waits, whether a peer is gone, also one that this rank exchanges nothing with now.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from torch.distributed import (  # type: ignore[attr-defined] # torch lists no names
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
)

from statemachines.errors import AiosyncError, InvalidTransition
from transports.addresses import numeric
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.open_sockets import SETUP, connected, hung_up, listening, shut
from transports.vital_signs import VitalSigns

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    import torch

    from transports.open_sockets import Address
    from transports.rendezvous import Meeting

_UNKNOWN = -1
_SLICE = 0.1  # seconds between two looks at the peers' connections
_SLACK = 0.1
_TRAINER_FIRST, _LOOK_AGAIN = 0.5, 0.01
_LATER = 1.0  # gloo's own limit of an operation comes after ours
# All ranks are there when gloo connects them. It tries five times, with this limit each.
_CONNECT_SECONDS = (0.5, 5.0)
_ATTEMPTS = 5
_CLOSING: weakref.WeakSet[Any] = weakref.WeakSet()  # threads
_EXIT_SECONDS = 1.0


@final
class GlooGroup:
    """One rank's end of a gloo group; see `transports.groups.CollectiveGroup`.

    Args:
        meeting: This rank's; the group owns it from here on.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self.names: Sequence[str] = meeting.names
        self._meeting = meeting
        self._options: Any = None  # with a device, that is a listener and a thread, in `join`
        self._group: Any = None  # a ProcessGroupGloo; torch's stubs know none of its methods
        self._ports: set[int] = set()
        self._listeners: dict[Address, int] = {}  # of the other ranks
        self._sockets: dict[socket.socket, int] = {}  # to their ranks, _UNKNOWN at first
        self._lock = threading.Lock()
        self._aborted = False
        self._ended = False
        self._closed = False
        self._swept = False
        self._signs = VitalSigns(meeting)

    @property
    def alive(self) -> bool:
        """Whether the group can still carry something, as far as this rank can tell."""
        return self._group is not None and not self._ended and not self.lost()

    def join(self, *, timeout: float) -> None:
        """See `transports.groups.CollectiveGroup.join`."""
        deadline = time.monotonic() + timeout
        meeting = self._meeting
        try:
            meeting.connect(deadline=deadline)
            what = f"join the group of {', '.join(self.names)}"
            # A little longer than each wait within, which names who is missing.
            with meeting.limited(what, deadline=deadline + _SLACK, interrupt=self._shut):
                meeting.claim()
                self._options = self._listen(deadline)
                here = json.dumps([meeting.local, *sorted(self._ports)]).encode()
                meeting.announce("here", here)
                for rank, told in enumerate(meeting.gather("here", deadline=deadline)):
                    if rank != self.rank:
                        host, *ports = json.loads(told)
                        self._listeners.update({(host, port): rank for port in ports})
                self._keep(self._connect())
                out = [numeric(s.getsockname())[1] for s, r in self._sockets.items() if r >= 0]
                meeting.announce("joined", json.dumps(out).encode())
                self._name_sockets(meeting.gather("joined", deadline=deadline))
                meeting.settle()
        except BaseException as error:
            self.abort()
            if isinstance(error, AiosyncError):
                error.locate(phase="init")
            raise
        finally:
            self._options = None  # the group has it; after a failure nobody needs its listener

    def broadcast(self, data: torch.Tensor, *, timeout: float) -> Any:
        """See `transports.groups.CollectiveGroup.broadcast`."""
        self._watch()  # an operation on a connection that is down may stay until gloo's own limit
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout + _LATER)
        group = self._group
        if group is None:
            raise InvalidTransition("the group has not been joined")
        return group.broadcast([data], options)

    def wait(self, pending: Any, *, timeout: float) -> None:
        """See `transports.groups.CollectiveGroup.wait`."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                pending.wait(timedelta(seconds=max(0.001, min(_SLICE, left))))
                return
            except RuntimeError as error:
                # The end of a slice raises, too, and it may have ended meanwhile, well or badly.
                if not _is_slice_end(error):
                    raise self._failure(error) from error
            if pending.is_completed():
                continue
            self._check()
            if self.lost():
                raise self._failure(None)
            if left <= 0:
                raise self._stalled(timeout)
            self._signs.give_or_look()

    def announce(self, stage: str, value: bytes, *, last: bool = False) -> None:
        """See `transports.groups.CollectiveGroup.announce`."""
        self._check()
        self._meeting.announce(stage, value)
        self._signs.give(rests=last)

    def gather(self, stage: str, *, ranks: Sequence[int], timeout: float) -> list[bytes]:
        """See `transports.groups.CollectiveGroup.gather`; one rank of the group asks for a stage.

        The stage's keys are gone afterwards; with the first stage, which asks for all the others,
        those of the set-up as well.
        """
        deadline = time.monotonic() + timeout
        try:
            found = self._meeting.gather(
                stage, deadline=deadline, ranks=ranks, is_broken=self._looks_broken
            )
            if self._swept:
                self._meeting.forget(stage, ranks)
            else:  # all of them are past the set-up; what they said since is not to be lost
                self._meeting.sweep("here", "joined", "gloo", stage)
                self._swept = True
        except BaseException as error:
            if isinstance(error, PeerLost) and not self._aborted:
                raise self._failure(None) from error
            silent = self._silent_of(error, stage, ranks, timeout)
            self._end()
            if silent:
                raise self._meeting.absent(stage, silent) from error
            raise
        return found

    def lost(self) -> list[int]:
        """Ranks whose connection to this one is down; empty as well before `join`."""
        with self._lock:
            return sorted({self._sockets[sock] for sock in hung_up(self._sockets)})

    def abort(self) -> None:
        """See `transports.groups.CollectiveGroup.abort`."""
        self._aborted = True
        self._end()

    def close(self) -> None:
        """See `transports.groups.CollectiveGroup.close`."""
        self._aborted = True
        with self._lock:
            if self._closed:
                return
            self._closed = True

        def free() -> None:
            self._end()
            with self._lock:
                sockets, self._sockets = list(self._sockets), {}
            self._group = None  # joins gloo's threads
            for sock in sockets:
                sock.close()
            self._meeting.close()

        thread = threading.Thread(  # noqa: TID251 - a destructor that may wait; nothing to report
            target=free, name="gloo-close", daemon=True
        )
        _CLOSING.add(thread)
        thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._ended else "apart"
        if state == "apart" and self._group is not None:
            state = "joined"
        return f"<GlooGroup rank {self.rank} of {self.size}, {state}>"

    def _listen(self, deadline: float) -> Any:
        """Options with a device of this group's own; notes the port it listens on."""
        if not SETUP.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PhaseTimeout("another set-up of this process is stuck", phase="init")
        try:
            before = listening()
            device = ProcessGroupGloo.create_device(hostname=self._meeting.local, lazy_init=False)
            opened = listening() - before
        finally:
            SETUP.release()
        self._ports = {port for _, (host, port) in opened if host == self._meeting.local}
        # torch's own name for it, unknown to its stubs
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
        options._devices = [device]  # noqa: SLF001
        least, most = _CONNECT_SECONDS
        limit = max(least, min(most, (deadline - time.monotonic()) / _ATTEMPTS))
        options._timeout = timedelta(seconds=limit)  # noqa: SLF001
        return options

    def _connect(self) -> Any:
        store = PrefixStore(f"{self._meeting.prefix}/gloo", self._meeting.store)
        try:
            return ProcessGroupGloo(store, self.rank, self.size, self._options)
        except RuntimeError as error:
            if "timeout" not in str(error).lower() or self._aborted:
                raise
            # A rank that told its address to the others has left a key of gloo's own.
            names, facts = self._about(
                [rank for rank in range(self.size) if not store.check([f"0/{rank}"])]
            )
            raise PhaseTimeout(
                f"{names} came, but did not connect in time", phase="init", **facts
            ) from error
        finally:
            del store  # a traceback may keep this frame, and it a connection

    def _keep(self, group: Any) -> None:
        with self._lock:
            if self._closed:  # while the last connection came up: nobody would let go of it
                raise TransportAborted("the group was closed")
            self._group = group
            for sock in self._find():
                self._sockets[sock] = self._listeners.get(numeric(sock.getpeername()), _UNKNOWN)
        if self._ended:  # aborted while the last connection came up
            self._shut()

    def _find(self) -> list[socket.socket]:
        def belongs(local: Address, remote: Address) -> bool:
            return local[1] in self._ports or remote in self._listeners

        return list(connected(belongs).values())

    def _name_sockets(self, told: Sequence[bytes]) -> None:
        """Ranks of the connections that the others opened: they said from which ports."""
        rank_of = {port: rank for rank, ports in enumerate(told) for port in json.loads(ports)}
        with self._lock:
            for sock, rank in self._sockets.items():
                if rank == _UNKNOWN:
                    port = numeric(sock.getpeername())[1]
                    self._sockets[sock] = rank_of.get(port, _UNKNOWN)

    def _watch(self) -> None:
        self._check()
        if self.lost():
            raise self._failure(None)

    def _check(self) -> None:
        if self._aborted:
            raise TransportAborted("the group was aborted")
        if self._ended:
            raise PeerLost("the group has ended")

    def _failure(self, error: RuntimeError | None) -> Exception:
        """What is to be raised; the group ends here."""
        lost = self.lost()
        if self.rank and 0 not in lost:
            # The trainer is to see who left first; it ends the group for all.
            deadline = time.monotonic() + _TRAINER_FIRST
            while not self._aborted and 0 not in self.lost() and time.monotonic() < deadline:
                time.sleep(_LOOK_AGAIN)
        if self._aborted:
            return TransportAborted("the group was aborted")
        self._end()
        reason = "" if error is None or lost else f": {str(error)[:200]}"
        names, facts = self._about([rank for rank in lost if rank != _UNKNOWN])
        return PeerLost(f"{names} left the group{reason}", **facts)

    def _stalled(self, seconds: float) -> PhaseTimeout:
        """Names those who give no sign; the group ends."""
        names, facts = self._about([0] if self.rank else self._signs.silent(seconds))
        self._end()
        return PhaseTimeout(f"no byte moved for {seconds:g} s; waiting for {names}", **facts)

    def _looks_broken(self) -> bool:
        self._signs.look_now_and_then()
        return bool(self.lost())

    def _silent_of(
        self, error: BaseException, stage: str, ranks: Sequence[int], seconds: float
    ) -> list[int]:
        """Of those that `error` waited for, who gives no sign: they hold up the others."""
        if not isinstance(error, PhaseTimeout) or self.rank or self._aborted:
            return []
        try:
            missing = [rank for rank in ranks if self._meeting.peek(stage, rank) is None]
        except RuntimeError:
            return []  # the store is gone
        return [rank for rank in self._signs.silent(seconds) if rank in missing]

    def _about(self, ranks: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """Names for an error's text, and its fields: they name the first of several."""
        if not ranks:
            return "a rank of the group", {}
        names = [self.names[rank] for rank in ranks]
        facts = {"replica": names[0], "rank": ranks[0], "detail": {"replicas": names}}
        return ", ".join(names), facts

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._meeting.abort()
            self._shut()

    def _shut(self) -> None:
        with self._lock:
            if self._group is not None:
                shut(self._sockets)
                return
            found = self._find() if self._ports else []
        shut(found)  # of a set-up that is still under way
        for sock in found:
            sock.close()


@atexit.register
def _let_them_close() -> None:
    """A thread inside gloo's destructor when the interpreter goes would abort the process."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_CLOSING):
        thread.join(max(0.0, deadline - time.monotonic()))


def _is_slice_end(error: RuntimeError) -> bool:
    return str(error).startswith("Operation timed out!")
