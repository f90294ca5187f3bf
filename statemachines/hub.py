"""Who is told: hooks inside the flip, bounded streams beside it, replay for latecomers."""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import msgspec

from statemachines.errors import Validation
from statemachines.events import callable_name, describe_error
from statemachines.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from statemachines.events import Transition
    from statemachines.subscription import Source

Hook: TypeAlias = "Callable[[Transition], object]"

_LOG = logging.getLogger(__name__)
_SLOW = 0.005


class HookStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a hook did wrong; seconds are the slowest call over the limit."""

    errors: int = 0
    slow: int = 0
    slowest_seconds: float = 0.0
    last_error: str | None = None


class HubStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the hub was made; `hooks` names those that raised or were slow."""

    published: int
    dropped: int
    hook_errors: int
    slow_hooks: int
    subscribers: int
    hooks: dict[str, HookStatistics]


@dataclass(eq=False, slots=True)
class _Registration:
    hook: Hook
    only: Source | None
    removed: bool = False


@final
class TransitionHub:
    """Tells hooks and subscriptions about transitions; several machines may share one.

    Publishing is synchronous and belongs to the thread of the loop that the machines run on;
    it never waits for a subscriber. Hooks run inside the flip, in the order they were added:
    they must not block, and what they raise is caught and counted.

    Args:
        history: How many transitions are kept for `subscribe(since=...)`, over all machines.
        clock: Times the hooks; seconds.
    """

    __slots__ = (
        "_clock",
        "_closed",
        "_dropped",
        "_history",
        "_hooks",
        "_published",
        "_subscriptions",
        "_troubles",
    )

    def __init__(
        self, *, history: int = 256, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._history: deque[Transition] = deque(maxlen=_whole("history", history, least=0))
        self._clock = clock
        self._hooks: list[_Registration] = []
        # Weak, so that a loop left by `break` costs nothing afterwards.
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._troubles: dict[str, HookStatistics] = {}
        self._published = 0
        self._dropped = 0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<TransitionHub {state} published={self._published}>"

    def on_transition(self, hook: Hook, *, only: Source | None = None) -> Callable[[], None]:
        """Call `hook` inside every flip; returns what removes it again.

        Args:
            hook: Must not block, and cannot fire the machine it is told about.
            only: (engine, role) of the one machine to be told about.

        Raises:
            Validation: `hook` is not callable, or it is a coroutine function.
        """
        if not _is_plain(hook):
            raise Validation(
                f"a hook must be a plain function, not {hook!r}",
                next_step="Read a subscription in a task of your own if you need to wait.",
            )
        registration = _Registration(hook, only)
        self._hooks.append(registration)

        def remove() -> None:
            registration.removed = True
            if registration in self._hooks:
                self._hooks.remove(registration)

        return remove

    def subscribe(
        self, *, size: int = 256, since: int | None = None, only: Source | None = None
    ) -> Subscription:
        """A stream of the transitions from now on; needs no running loop.

        Args:
            size: How many may wait before the oldest is dropped.
            since: First replay what the history still has with a `seq` above this one. Each
                machine counts by itself, so on a shared hub combine it with `only`.
            only: (engine, role) of the one machine to follow; the stream ends with it.

        Raises:
            Validation: `size` is not a whole number above 0, or `since` not a whole number.
        """
        subscription = Subscription(self, _whole("size", size, least=1), only)
        if since is not None:
            _whole("since", since, least=None)
            for transition in self._history:
                if transition.seq > since and _concerns(only, transition):
                    self._dropped += subscription.deliver(transition)
        if self._closed:
            subscription.end()
        else:
            self._subscriptions.add(subscription)
        return subscription

    def publish(self, transition: Transition) -> None:
        """Log it, hand it to the subscriptions, then call the hooks. Ignored once closed."""
        _LOG.info(
            "%s (%s) #%d %s: %s -> %s%s",
            transition.engine,
            transition.role,
            transition.seq,
            transition.trigger,
            transition.source,
            transition.dest,
            f" [{transition.error}]" if transition.error else "",
        )
        if self._closed:
            return
        self._published += 1
        self._history.append(transition)
        # First, so that a hook cannot delay them, nor an interrupted hook keep it from them.
        for subscription in tuple(self._subscriptions):
            if _concerns(subscription.only, transition):
                self._dropped += subscription.deliver(transition)
        for registration in tuple(self._hooks):
            if not registration.removed and _concerns(registration.only, transition):
                self._call(registration.hook, transition)

    def forget(self, subscription: Subscription) -> None:
        """Deliver nothing more to `subscription`."""
        self._subscriptions.discard(subscription)

    def end(self, engine: str, role: str) -> None:
        """End the subscriptions that follow this machine alone: it has closed."""
        for subscription in tuple(self._subscriptions):
            if subscription.only == (engine, role):
                self.forget(subscription)
                subscription.end()

    def close(self) -> None:
        """End every subscription after the items it has left, and drop the hooks. Idempotent."""
        self._closed = True
        self._hooks.clear()
        for subscription in tuple(self._subscriptions):
            self.forget(subscription)
            subscription.end()

    def statistics(self) -> HubStatistics:
        """Counts since the hub was made."""
        return HubStatistics(
            published=self._published,
            dropped=self._dropped,
            hook_errors=sum(trouble.errors for trouble in self._troubles.values()),
            slow_hooks=sum(trouble.slow for trouble in self._troubles.values()),
            subscribers=len(self._subscriptions),
            hooks=dict(self._troubles),
        )

    def _call(self, hook: Hook, transition: Transition) -> None:
        error: BaseException | None = None
        started = self._clock()
        try:
            # A lambda can still hand back a coroutine, which nobody would ever await.
            answer = hook(transition)
            if inspect.iscoroutine(answer):
                answer.close()
                raise TypeError("the hook returned a coroutine")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # noqa: BLE001 - the flip has happened: it cannot be undone
            # The cancellation of a future that the hook looked at, too: nobody cancelled the flip.
            error = raised
        seconds = self._clock() - started
        if error is not None or seconds > _SLOW:
            self._blame(callable_name(hook), error, seconds)

    def _blame(self, name: str, error: BaseException | None, seconds: float) -> None:
        before = self._troubles.get(name, HookStatistics())
        slow = seconds > _SLOW
        self._troubles[name] = HookStatistics(
            errors=before.errors + (error is not None),
            slow=before.slow + slow,
            slowest_seconds=max(before.slowest_seconds, seconds if slow else 0.0),
            last_error=before.last_error if error is None else describe_error(error),
        )
        _LOG.debug("hook %s took %.6f s", name, seconds, exc_info=error)


def _concerns(only: Source | None, transition: Transition) -> bool:
    return only is None or only == (transition.engine, transition.role)


def _is_plain(hook: object) -> bool:
    return callable(hook) and not any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (hook, hook.__call__)
    )


def _whole(name: str, value: Any, *, least: int | None) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise Validation(f"{name} must be a whole number{bound}, not {value!r}")
    return int(value)
