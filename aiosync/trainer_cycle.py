"""The life cycle around trainer engines that write their own `trainer_init` or `send_weights`.

Such an engine drives `self.client` by itself; the proxy (`aiosync.proxy`) fires the flips that
belong to the calls, and the cycle here makes sure that no exit leaves the engine in between.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, final

from aiosync.admission import NEXT
from aiosync.budget import Budget
from aiosync.defaults import DEFAULTS
from aiosync.errors import InvalidTransition
from aiosync.overrides import call_step
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.trainer import TrainerWeightTransferEngine


@final
class TrainerCycle:
    """What `aiosync.overrides` runs around an overridden `send_weights`."""

    def __init__(self, engine: TrainerWeightTransferEngine[Any]) -> None:
        self.engine = engine

    async def send(
        self, bare: Callable[..., Any], *args: Any, version: Any = NEXT, **options: Any
    ) -> Any:
        """Run the bare method; whatever it leaves half done fails the engine."""
        engine = self.engine
        engine.admission.check()
        this = engine.admission.take(version, Budget(), rollback=False)
        if "version" in inspect.signature(bare).parameters:
            options["version"] = version
        try:
            await engine.ensure_initialized(this)
            method = functools.partial(bare, *args, **options)
            grace = DEFAULTS.cleanup_s / 2
            result = await call_step(engine, method, lane=lambda: engine.source_lane, grace=grace)
            self._check_finished()
        except BaseException as error:
            if engine.state in BUSY:
                engine.machine.fire(
                    Trigger.FAIL, round=this.number, error=error, weights=Weights.UNKNOWN
                )
            raise
        else:
            return result
        finally:
            this.released.set()
            this.over.set()
            engine.admission.free()

    def _check_finished(self) -> None:
        if self.engine.state in BUSY:
            raise InvalidTransition(
                "send_weights returned without finish_weight_update", phase="finish"
            )


def watched_init(method: Any) -> Any:
    """A `trainer_init` written by a user, returning an engine whose state says so."""
    bare = method.__func__ if isinstance(method, classmethod) else method
    known = inspect.signature(bare).parameters

    @functools.wraps(bare)
    async def trainer_init(
        cls: type, init_info: Any, *, client: Any, source: Any = None, **options: Any
    ) -> Any:
        options = {name: value for name, value in options.items() if name in known}
        result = bare(cls, init_info, client=client, source=source, **options)
        engine = await result if inspect.isawaitable(result) else result
        if getattr(engine, "state", None) is State.IDLE:
            engine.machine.fire(Trigger.INITIALIZE)
        return engine

    return classmethod(trainer_init)  # type: ignore[arg-type] # functools.wraps hides the type
