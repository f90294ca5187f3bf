"""How a subclass's methods become steps of the life cycle.

The base wraps each override of a step at class creation. Called from outside, the wrapper runs
the base's life cycle around it (gates, flips, deadline, failure); called from inside another step
(``super().start_weight_update()``) it is the bare method. An ``async def`` override runs on the
loop, a plain ``def`` on the engine's lane, so it may block.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from aiosync.foreign import stoppable
from aiosync.lane_calls import enter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from aiosync.engines.streamed import StreamedTrainerEngine
    from aiosync.foreign import LeftBehind
    from aiosync.lane_calls import LaneCalls
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.worker import WeightTransferEngine
    from transports.lane import LaneLike

    # Type arguments do not vary: a subclass with infos of its own is none of these.
    Unsubclassed: TypeAlias = (
        TrainerWeightTransferEngine | StreamedTrainerEngine[Any] | WeightTransferEngine
    )

P = ParamSpec("P")
E = TypeVar("E")
F = TypeVar("F", bound="Callable[..., Any]")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_INSIDE: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "aiosync_inside_step", default=frozenset()
)
_AT_ONCE: set[Callable[..., Any]] = set()
_INSTANT: set[Callable[..., Any]] = set()


class Step(Protocol[P, R_co]):
    """The type of a step: whole for callers, open for overrides.

    Whoever holds an engine of unknown or built-in class calls the wrapped step, with all its
    parameters. A subclass may write the bare one with fewer parameters, blocking or not. Type
    checkers hold an override against what access through the subclass gives; that is why it gives
    a union there, of which the override has to match one part.
    """

    @overload
    def __get__(
        self, instance: Unsubclassed, owner: type | None = None, /
    ) -> Callable[P, R_co]: ...
    @overload
    def __get__(
        self, instance: object, owner: type | None = None, /
    ) -> Callable[P, R_co] | Callable[..., Any]: ...


class ClassStep(Protocol[P]):
    """The type of ``trainer_init``: makes an engine of the class it is called on."""

    @overload
    def __get__(
        self, instance: StreamedTrainerEngine[Any] | None, owner: type[E], /
    ) -> Callable[P, Coroutine[Any, Any, E]]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[..., Any]: ...


def step(method: Callable[Concatenate[Any, P], R]) -> Step[P, R]:
    """Declare a step that subclasses override as `Step` says; at run time it is the method."""
    return method


def class_step(method: Callable[Concatenate[Any, P], Any]) -> ClassStep[P]:
    """A classmethod that subclasses override as `ClassStep` says."""
    return cast("ClassStep[P]", classmethod(method))


def at_once(method: F) -> F:
    """Of a step of ours: once it is cancelled it ends by itself, so it needs no task of its own."""
    _AT_ONCE.add(method)  # no attribute of it: a decorator would hand that on
    return method


def instant(method: F) -> F:
    """Of a step of ours that is `at_once`: it awaits nothing."""
    _INSTANT.add(method)
    return at_once(method)


def is_instant(bare: Callable[..., Any]) -> bool:
    return _plain(bare) in _INSTANT


def wrap_steps(cls: type, cycles: Mapping[str, str]) -> None:
    """Wrap the steps that `cls` itself defines.

    Args:
        cycles: Maps a step to the method of the engine's ``cycle`` that runs around it.
    """
    for step, cycle in cycles.items():
        bare = cls.__dict__.get(step)
        if bare is None or getattr(bare, "__isabstractmethod__", False):
            continue
        setattr(cls, step, _wrapper(bare, cycle))


def is_inside(owner: object) -> bool:
    """Whether the caller runs in a step of `owner`."""
    return id(owner) in _INSIDE.get()


def _wrapper(bare: Callable[..., Any], cycle: str) -> Callable[..., Any]:
    @functools.wraps(bare)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_inside(self):
            return bare(self, *args, **kwargs)
        return getattr(self.cycle, cycle)(functools.partial(bare, self), *args, **kwargs)

    step.is_override = True  # type: ignore[attr-defined]
    return step


async def call_step(
    owner: object,
    bare: Callable[..., Any],
    *args: Any,
    lane: Callable[[], LaneLike],
    abort: Callable[[], None] | None = None,
    grace: float,
    calls: LaneCalls | None = None,
    left: LeftBehind | None = None,
) -> Any:
    """Run the bare method of a step: on the loop if it is async, else on the lane.

    Args:
        owner: The engine; nested steps of the same engine run bare.
        lane: Made only when a blocking method needs it.
        abort: Unblocks the method, from another thread.
        grace: Seconds that an aborted method gets before its lane is given up.
        calls: How a method on the lane uses an async client.
        left: Told of an async method that did not end when it was cancelled.
    """
    token = _INSIDE.set(_INSIDE.get() | {id(owner)})
    try:
        if _plain(bare) in _AT_ONCE:
            return await bare(*args)
        what = f"{_name_of(bare)} of {type(owner).__name__}"
        stopping = functools.partial(stoppable, grace=grace, what=what, left=left)
        if _is_async(bare):
            return await stopping(functools.partial(bare, *args))
        # The lane has its own context; the copy carries the mark of the running step over.
        context = contextvars.copy_context()
        if calls is not None:
            enter(context, calls)
        result = await lane().run(context.run, bare, *args, abort=abort, grace=grace)
        return await stopping(lambda: result) if inspect.isawaitable(result) else result
    finally:
        _INSIDE.reset(token)


def call_instant(owner: object, bare: Callable[..., Any]) -> None:
    """`call_step` of an instant one, without a task."""
    token = _INSIDE.set(_INSIDE.get() | {id(owner)})
    try:
        drive(bare(), f"{_name_of(bare)} of {type(owner).__name__}")
    finally:
        _INSIDE.reset(token)


def drive(coroutine: Coroutine[Any, Any, None], what: str) -> None:
    """Run what waits for nothing, here and now.

    Raises:
        RuntimeError: It does wait; it has been closed.
    """
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError(f"{what} awaits something")


def _is_async(method: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(_plain(method)))


def _name_of(method: Callable[..., Any]) -> str:
    return getattr(_plain(method), "__name__", "a step")


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(method, functools.partial):
        method = method.func
    return method


def bare_of(cls: type, step: str) -> Callable[..., Any]:
    """The bare method of a step, without the life cycle."""
    bare: Callable[..., Any] = inspect.unwrap(getattr(cls, step))
    return bare
