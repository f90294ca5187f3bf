"""One rank's end of an NCCL group: every call polled to success, ended by an abort.

The communicator is non-blocking: a call returns at once, and until it has succeeded nothing is on
the stream, so no event may be recorded and no further call made. NCCL has no deadlines and does
not notice a peer that takes no part; `abort`, from any thread, is what ends a wait. It takes about
as long as a kernel needs to see it, so it belongs neither on an event loop nor on the lane whose
call it ends. After it the process can make a new group at once.
"""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import AiosyncError, InvalidTransition, Validation
from transports.cuda import borrow_queue, poll, return_queue
from transports.errors import PeerLost, PhaseTimeout, TransportAborted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.cuda import WorkQueue

_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t
_EAGER_LOOKS = 20
_NAP_S, _LONGEST_NAP_S = 0.00005, 0.0005
_CALL_S = 0.5  # an abort does not wait longer for a call that is under way
_ENDING_S = 5.0  # aborts of earlier groups, before a new one is made
_EXIT_S = 2.0

_ENDING: set[ending] = set()
"""What is being freed now; a new group waits for it."""


class ending(AbstractContextManager[None]):  # noqa: N801 - used like a function
    """Something that is being freed, from here to the end of the block."""

    def __init__(self) -> None:
        self.over = threading.Event()
        _ENDING.add(self)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        _ENDING.discard(self)


@final
class NcclGroup:
    """Made by each rank, then joined by all.

    Args:
        rank, size: 0 is the trainer.
        device: With its index.
        names: Of all ranks, for errors.
    """

    def __init__(
        self, rank: int, size: int, *, device: torch.device, names: Sequence[str] = ()
    ) -> None:
        if not 0 <= rank < size:
            raise Validation(f"rank {rank} of a group of {size}", rank=rank, phase="init")
        self.rank, self.size, self.device = rank, size, device
        self.names = tuple(names) or ("trainer", *(f"rank {n}" for n in range(1, size)))
        self._comm: Any = None
        self._calls = threading.Lock()  # of the communicator; held for moments only
        self._once = threading.Lock()
        self._is_aborted = False
        self._is_joined = False
        self._over = threading.Event()  # the abort is

    @property
    def alive(self) -> bool:
        """Whether the group can carry something, as far as this rank can tell."""
        return self._is_joined and not self._is_aborted

    def join(self, unique_id: bytes, *, timeout: float) -> None:
        """Meet the other ranks; blocking, on the thread that will make the calls.

        Raises:
            PhaseTimeout: Not all came within `timeout` seconds.
            PeerLost: NCCL gave up; with its reason.
            TransportAborted: `abort` was called.
        """
        deadline = time.monotonic() + timeout
        try:
            _await_endings(min(deadline, time.monotonic() + _ENDING_S))
            torch.cuda.set_device(self.device)
            nccl = bindings()
            self.check()
            with self._calls:
                self._comm = nccl.Communicator.init(
                    self.size,
                    self.rank,
                    nccl.UniqueId.from_bytes(unique_id),
                    nccl.NCCLConfig(blocking=False),
                )
            self._settle("join", deadline)
            self._warm_up(deadline)
            self._is_joined = True
        except BaseException as error:
            self.abort()
            if isinstance(error, AiosyncError):
                error.locate(phase="init")
            raise

    def _warm_up(self, deadline: float) -> None:
        """The all-reduce that vLLM's ranks make first; it is part of the protocol."""
        nccl = bindings()
        queue = borrow_queue(self.device)
        with queue.active():
            one = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._call("allreduce", one, one, nccl.SUM, stream=queue.handle)
        self._settle("warm up", deadline)
        poll(queue.record(), self.check, limit=max(0.001, deadline - time.monotonic()))
        return_queue(queue)

    def broadcast(self, data: torch.Tensor, queue: WorkQueue, *, timeout: float) -> None:
        """Queue a copy of rank 0's `data` (contiguous, on the device) into the others'.

        All ranks call it in the same order with the same sizes. The memory belongs to the group
        until a mark that `queue` records afterwards has been reached.

        Raises:
            PhaseTimeout: NCCL did not get it onto the stream in time.
            PeerLost: NCCL gave up.
            TransportAborted: `abort` was called.
        """
        if self._comm is None and not self._is_aborted:
            raise InvalidTransition("the group has not been joined")
        with queue.active():
            self._call("broadcast", data, data, 0, stream=queue.handle)
        self._settle("broadcast", time.monotonic() + timeout)

    def check(self) -> None:
        """Raise where the group was aborted or has failed; costs next to nothing."""
        if self._is_aborted:
            raise TransportAborted("the group was aborted")

    def look(self) -> None:
        """`check`, and ask NCCL for an error of its own."""
        self.check()
        code = self._code()
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise self._failure(code)

    def abort(self) -> None:
        """End the group: calls that wait raise; from any thread, blocks up to a second or so."""
        self._end(self._tell())

    def close(self, afterwards: Callable[[], None] = lambda: None) -> None:
        """Begin to `abort`, and call `afterwards` when that is over; returns at once.

        Calls that wait raise. From any thread, any number of times.
        """
        first = self._tell()

        def free() -> None:
            with over:
                self._end(first)
                afterwards()

        over = ending()  # here: who makes a new group right away waits for it
        threading.Thread(  # noqa: TID251 - a destructor that may wait, with nothing to report
            target=free, name="nccl-close", daemon=True
        ).start()

    def _tell(self) -> bool:
        with self._once:
            first, self._is_aborted = not self._is_aborted, True
        return first

    def _end(self, first: bool) -> None:
        if not first:
            self._over.wait(_ENDING_S)
            return
        with ending():
            held = self._calls.acquire(timeout=_CALL_S)
            try:
                comm, self._comm = self._comm, None
                if comm is not None:
                    comm.abort()
            finally:
                if held:
                    self._calls.release()
                self._over.set()

    def __repr__(self) -> str:
        state = "ended" if self._is_aborted else "joined" if self._is_joined else "apart"
        return f"<NcclGroup rank {self.rank} of {self.size} on {self.device}, {state}>"

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        with self._calls:
            self.check()
            try:
                getattr(self._comm, method)(*args, **options)
            except Exception as error:
                self.check()
                raise PeerLost(f"NCCL refused a {method}: {str(error)[:300]}") from error

    def _settle(self, what: str, deadline: float) -> None:
        """Poll until the last call has succeeded."""
        looks, nap = 0, _NAP_S
        while True:
            self.check()
            code = self._code()
            if code == _SUCCESS:
                return
            if code != _IN_PROGRESS:
                raise self._failure(code)
            if time.monotonic() >= deadline:
                others = ", ".join(n for r, n in enumerate(self.names) if r != self.rank)
                raise PhaseTimeout(f"could not {what} in time; waiting for {others}")
            looks += 1
            if looks > _EAGER_LOOKS:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP_S)

    def _code(self) -> int:
        with self._calls:
            return _SUCCESS if self._comm is None else int(self._comm.get_async_error())

    def _failure(self, code: int) -> Exception:
        self.check()
        return PeerLost(f"NCCL gave up: {bindings().get_error_string(code)} ({code})")


def bindings() -> Any:
    """NVIDIA's bindings.

    Raises:
        Validation: They are not installed, or find no NCCL.
    """
    try:
        import nccl.core as nccl  # an extra, and it loads CUDA libraries
    except (ImportError, RuntimeError) as error:
        raise Validation(
            f"the NCCL bindings cannot be imported: {str(error)[:200]}",
            phase="init",
            next_step='install "aiosync[nccl]" (nccl4py), or use backend "ipc" or "gloo"',
        ) from error
    return nccl


def new_unique_id() -> bytes:
    """A fresh id for one group; opens a socket that waits for its ranks."""
    return bytes(bindings().get_unique_id().as_bytes)


def _await_endings(deadline: float) -> None:
    """Let earlier groups of this process be gone first: NCCL takes some locks for both."""
    for one in list(_ENDING):
        one.over.wait(max(0.0, deadline - time.monotonic()))


@atexit.register
def _at_exit() -> None:
    # A thread inside NCCL while the driver is torn down may crash the process on its way out.
    _await_endings(time.monotonic() + _EXIT_S)
