"""The thread's half of a lane. Theory of operation: `transports.lane`."""

from __future__ import annotations

import logging
import os
import queue
import threading
import traceback
from typing import TYPE_CHECKING, Any, final

import anyio
import anyio.lowlevel

from statemachines.errors import InvalidTransition
from transports.errors import LanePoisoned

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_QUEUED, _RUNNING, _DONE, _WITHDRAWN, _REFUSED = "queued", "running", "done", "withdrawn", "refused"


@final
class LaneCall:
    """One `run`; every field but `done` and `token` is guarded by the worker's lock."""

    __slots__ = (
        "abort", "abort_done", "args", "discard", "done", "error", "fn", "gone", "phase",
        "received", "token", "value",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        abort: Callable[[], object] | None,
        discard: Callable[[Any], object] | None,
    ) -> None:
        self.fn: Callable[..., Any] | None = fn
        self.args = args
        self.abort = abort
        self.discard = discard
        self.done = anyio.Event()
        self.abort_done: anyio.Event | None = None  # there once `abort` was called
        self.token = anyio.lowlevel.current_token()
        self.phase = _QUEUED
        self.value: Any = None
        self.error: BaseException | None = None
        self.gone = False  # the caller has left
        self.received = False  # the caller has the outcome

    def settle(self, phase: str) -> None:
        self.phase = phase
        self.fn, self.args, self.abort = None, (), None  # the caller's tensors must not live on


@final
class LaneWorker:
    """What the thread holds of a lane."""

    def __init__(self, name: str, setup: Callable[[], object] | None) -> None:
        self.name = name
        self.poisoned = False
        self.closed = False
        self.running = False
        self.pid = 0  # of the process that started the thread
        self.calls = self.failed = self.aborts = self.discarded = self.waiting = 0
        # Re-entrant, because a garbage collection under the lock may run Lane.__del__.
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[LaneCall | None] = queue.SimpleQueue()
        self._has_thread = False
        self._setup = setup
        self._is_set_up = False

    # -- from the loop's thread

    def submit(self, call: LaneCall) -> None:
        if self.pid and self.pid != os.getpid():
            # Before the lock: the fork may have copied it while it was held.
            raise LanePoisoned(
                f"lane {self.name!r} was started in process {self.pid}; a fork has no threads",
                next_step="Make the lane in the process that uses it.",
            )
        with self._lock:
            if self.poisoned:
                raise self._poison_error()
            if self.closed:
                detail = {"state": "closed", "allowed": []}
                raise InvalidTransition(f"lane {self.name!r} is closed", detail=detail)
            self._ensure_thread()
            self.waiting += 1
            self._jobs.put(call)

    def abort(self, call: LaneCall) -> bool:
        """Start the abort of a running call, once; False if there is nothing to wait for."""
        with self._lock:
            if call.phase != _RUNNING:
                return False
            if call.abort_done is None:
                call.abort_done = anyio.Event()
                self.aborts += 1
                if call.abort is None:
                    call.abort_done.set()
                else:
                    _start_abort(self.name, call, call.abort, call.abort_done)
            return True

    def leave(self, call: LaneCall) -> None:
        """The caller will not take the outcome; does nothing if it has. Idempotent."""
        with self._lock:
            if call.received or call.gone:
                return
            call.gone = True
            if call.phase == _QUEUED:
                self.waiting -= 1
                call.settle(_WITHDRAWN)
            elif call.phase == _RUNNING:
                self.abort(call)  # a caller whose coroutine was closed has not
                self._poison()
            elif call.phase == _DONE:
                self._ensure_thread()
                self._jobs.put(call)
                self._wake_if_over()

    def receive(self, call: LaneCall) -> Any:
        with self._lock:
            if call.phase == _REFUSED:
                raise self._poison_error()
            call.received = True
        value, error = call.value, call.error
        call.value = call.error = None
        try:
            if error is None:
                return value
            if isinstance(error, (StopIteration, anyio.get_cancelled_exc_class())):
                message = f"the call on lane {self.name!r} raised {error!r}"
                raise RuntimeError(message) from error  # noqa: TRY004 - not an argument's type
            raise error
        finally:
            del value, error  # the traceback of the error holds this frame

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._wake_if_over()

    # -- under the lock

    def _ensure_thread(self) -> None:
        if not self._has_thread:
            self._is_set_up = False
            threading.Thread(  # noqa: TID251 - this is the lane's thread
                target=self._main, name=self.name, daemon=True
            ).start()
            self._has_thread = True
            self.pid = os.getpid()

    def _wake_if_over(self) -> None:
        if self.closed or self.poisoned:
            self._jobs.put(None)

    def _poison(self) -> None:
        self.poisoned = True
        late: list[LaneCall] = []
        while not self._jobs.empty():
            call = self._jobs.get_nowait()
            if call is None or call.phase == _WITHDRAWN:
                continue
            if call.phase == _QUEUED:
                self._refuse(call)
            else:
                late.append(call)
        for call in late:  # values to discard, should the thread ever come back
            self._jobs.put(call)
        self._wake_if_over()

    def _refuse(self, call: LaneCall) -> None:
        self.waiting -= 1
        call.settle(_REFUSED)
        _post(call, call.done)

    def _poison_error(self) -> LanePoisoned:
        return LanePoisoned(
            f"lane {self.name!r}: an earlier call never came back",
            next_step="Make a new lane; restart the process if the call holds a device.",
        )

    # -- on the lane's thread

    def _main(self) -> None:
        while True:
            call = self._jobs.get()
            if call is not None:
                self._serve(call)
                del call  # an idle thread keeps nothing of the last call alive
                continue
            with self._lock:
                if self._jobs.empty():
                    self._has_thread = False
                    return

    def _serve(self, call: LaneCall) -> None:
        with self._lock:
            if call.phase == _QUEUED:
                self.waiting -= 1
                self.calls += 1
                call.phase = _RUNNING
                self.running = True
        if call.phase == _RUNNING:
            self._execute(call)
        elif call.phase == _DONE:
            self._discard(call)

    def _execute(self, call: LaneCall) -> None:
        try:
            if not self._is_set_up and self._setup is not None:
                self._setup()
            self._is_set_up = True
            call.value = call.fn(*call.args)  # type: ignore[misc]  # set while it is running
        except BaseException as exc:  # noqa: BLE001 - raised by the caller, whatever it is
            call.error = exc
            _let_go(exc)
        with self._lock:
            self.running = False
            self.failed += call.error is not None
            call.settle(_DONE)
            is_orphan = call.gone or not _post(call, call.done)
        if is_orphan:
            self._discard(call)

    def _discard(self, call: LaneCall) -> None:
        if call.error is not None:
            logger.debug("lane %s: dropped %r of a cancelled call", self.name, call.error)
        else:
            self.discarded += 1
            try:
                if call.discard is not None:
                    call.discard(call.value)
            except BaseException:  # nobody is left to raise it to
                logger.debug("lane %s: discard raised", self.name, exc_info=True)
        call.value = call.error = None


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of an error's traceback.

    Errors are kept (as a round's outcome, by whoever logs them), and often by a cycle; sockets,
    threads and tensors of the call must not live as long.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _post(call: LaneCall, event: anyio.Event) -> bool:
    """Set an event in the call's loop without waiting for it; False if the loop is finished."""
    # Both are public interfaces of their loops; the backend-neutral way waits (see the theory).
    native: Any = call.token.native_token
    schedule = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
    try:
        schedule(event.set)
    except RuntimeError:  # "Event loop is closed"; trio.RunFinishedError is one, too
        return False
    return True


def _start_abort(name: str, call: LaneCall, abort: Callable[[], object], done: anyio.Event) -> None:
    def body() -> None:
        try:
            abort()
        except BaseException:  # the cancelled call reports its own outcome
            logger.debug("lane %s: abort raised", name, exc_info=True)
        _post(call, done)

    try:
        threading.Thread(  # noqa: TID251 - an abort may block for ever (see the theory)
            target=body, name=f"{name}-abort", daemon=True
        ).start()
    except RuntimeError:  # no more threads, or the interpreter is going down
        logger.debug("lane %s: no thread for the abort", name, exc_info=True)
        done.set()
