"""The calls of vLLM's first weight transfer API, on top of this one.

Deprecated from the start: they exist so that code of that age keeps running. New code holds an
engine (`aiosync.connect`) and a `WeightSource`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aiosync import passes
from aiosync.concurrency import run_to_end
from aiosync.defaults import DEFAULTS
from aiosync.front_door import connect
from aiosync.iterator_source import IteratorSource
from aiosync.metadata import ParamMeta
from aiosync.sources import WeightSource
from statemachines.errors import Validation
from statemachines.tables import State

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable, Iterator

    import torch

    from aiosync.messages import RoundHeader
    from aiosync.passes import Pair
    from aiosync.report import Report
    from aiosync.worker import WeightTransferEngine

__all__ = ["receive_weights", "trainer_send_weights"]

_LISTS = ("names", "dtype_names", "shapes")
_SENDING = ("version", "timeout", "budget", "rollback")


async def trainer_send_weights(
    iterator: Iterable[Pair] | AsyncIterable[Pair], trainer_args: Any
) -> Report:
    """Send what `iterator` yields to the workers, in one round of its own.

    Deprecated: each call connects anew. Use `aiosync.connect` and keep the engine.

    Without the three lists in `trainer_args` the iterator is walked to its end before anything is
    sent, so all its tensors are alive at once.

    Args:
        iterator: Of ``(name, tensor)``, such as ``model.named_parameters()``. Closed in any case.
        trainer_args: A mapping, or an object with attributes. ``workers`` (or ``url``), ``backend``
            and the rest go to `aiosync.connect`; ``version``, ``timeout``, ``budget`` and
            ``rollback`` to `send_weights`; ``names``, ``dtype_names`` and ``shapes`` say what
            the iterator yields; ``post_iter_func`` makes the tensor to send out of each pair.
            None counts as not given.

    Raises:
        Validation: No worker was given, or something in `trainer_args` is unknown.
        AiosyncError: What `connect` and `send_weights` raise.
    """
    try:
        options = _options(trainer_args)
        post = options.pop("post_iter_func", None)
        lists = [options.pop(name, None) for name in _LISTS]
        sending = {name: options.pop(name) for name in _SENDING if name in options}
        workers = options.pop("workers", None) or options.pop("url", None)
        if not workers:
            raise Validation("trainer_args: say where the workers are (workers= or url=)")
        if lists.count(None) not in (0, len(lists)):
            raise Validation(f"trainer_args: {', '.join(_LISTS)} come together")
        source = await _source_of(_each(iterator, post), lists)
        async with connect(source, workers=workers, **options) as engine:
            return await engine.send_weights(**sending)
    finally:
        await _close(iterator)


async def receive_weights(
    update_info: Any,
    load_weights: Callable[[Iterator[Pair]], object],
    *,
    engine: WeightTransferEngine[Any, Any],
    header: RoundHeader | None = None,
) -> None:
    """Take one update into `load_weights`, called with an iterator of ``(name, tensor)``.

    Deprecated: give the engine a model that has ``load_weights``.

    From the first call on the engine loads into what was handed in last, not into its own model.
    If no round is open, this call is the whole round, and the tensors have been loaded when it
    returns; else they are loaded when the open round is finished (at the latest).

    Args:
        update_info: The payload, a dict or the engine's update info.
        load_weights: Must take all the tensors; runs on the engine's lane.
        engine: The worker engine, initialised.
        header: What came with the call, if anything.

    Raises:
        AiosyncError: What the engine's calls raise.
    """
    if not isinstance(engine.model, _Loader):
        engine.set_weight_update_target(_Loader(), engine.model_config)
    engine.model.hand_over = load_weights
    if engine.state is State.UPDATING:
        await engine.update_weights(update_info, header=header)
        return
    step: Any = engine  # the wrapped steps take a header
    await step.start_weight_update(header=header)
    try:
        await engine.update_weights(update_info, header=header)
        await step.finish_weight_update(header=header)
    except BaseException as error:
        reason = type(error).__name__
        await run_to_end(
            lambda: engine.abort_weight_update(reason, header=header), seconds=DEFAULTS.cleanup_s
        )
        raise


class _Loader:
    """A model that is nothing but the loader handed in last."""

    hand_over: Callable[[Iterator[Pair]], object]

    def load_weights(self, pairs: Iterator[Pair]) -> object:
        return self.hand_over(pairs)


class _Gathered(WeightSource):
    """Announces what an iterator has yielded to its end."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = pairs

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        # Here, because this runs on the source's lane.
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._kept]

    @cached_property
    def _kept(self) -> list[Pair]:
        return list(self._pairs)

    def iter_full(self) -> Iterator[Pair]:
        yield from self._kept


async def _source_of(pairs: Any, lists: list[Any]) -> WeightSource:
    if lists[0] is not None:
        source = IteratorSource(*lists)
        source.set(pairs)
        return source
    return _Gathered([pair async for pair in pairs] if hasattr(pairs, "__aiter__") else pairs)


def _options(trainer_args: Any) -> dict[str, Any]:
    given = trainer_args
    if dataclasses.is_dataclass(given):
        given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    elif not isinstance(given, Mapping):
        given = vars(given)
    return {name: value for name, value in given.items() if value is not None}


def _each(pairs: Any, post: Callable[[Pair], torch.Tensor] | None) -> Any:
    if post is None:
        return pairs
    if not hasattr(pairs, "__aiter__"):
        return ((pair[0], post(pair)) for pair in pairs)
    return ((pair[0], post(pair)) async for pair in pairs)


async def _close(iterator: Any) -> None:
    """A no-op unless the round ended before it came to the iterator."""
    with contextlib.suppress(ValueError):  # it is running on a lane that has been given up
        passes.close(iterator)
    await passes.aclose(iterator)
