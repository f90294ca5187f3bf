"""The demonstration, set up and taken down: workers, engine, view."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

import aiosync
from aiosync.demo import checkpoint
from aiosync.demo.learner import Learner
from aiosync.demo.replicas import Launch, replicas
from aiosync.demo.training import Training
from aiosync.demo.worker import one_thread
from aiosync.errors import AiosyncError
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import torch

    from aiosync.demo.outcome import Options, Outcome
    from aiosync.demo.replicas import Replica
    from aiosync.demo.view import View


async def run(options: Options, view: View, folder: Path) -> Outcome:
    """The whole demonstration; however it ends, the workers are gone afterwards.

    Args:
        folder: Private folder for the workers' sockets.

    Raises:
        DemoFailed: A worker could not be started, or went away.
        AiosyncError: A sync failed.
        ValueError: The checkpoint cannot be used.
    """
    # "auto" means shared memory on one host; the workers have to be told which one it is.
    backend = "ipc" if options.backend == "auto" else options.backend
    hub = aiosync.TransitionHub()
    async with AsyncExitStack() as stack:
        lane = await stack.enter_async_context(Lane("demo-learner", setup=one_thread))
        await stack.enter_async_context(view.running())
        stack.callback(hub.on_transition(view.trainer))
        view.note("loading")
        learner, extra = await lane.run(_load, options)
        view.note(f"starting {options.workers} inference process(es)")
        launch = Launch(
            folder=folder,
            backend=backend,
            policy=lambda seed: _policy(learner, seed),
            seed=options.seed,
            model=options.model,
        )
        fleet = await stack.enter_async_context(replicas(options.workers, launch))
        await stack.enter_async_context(_watching(fleet, view))
        engine = await stack.enter_async_context(
            aiosync.connect(
                _source(learner, extra),
                workers=[replica.url for replica in fleet],
                backend=backend,
                hub=hub,
            )
        )
        training = Training(options, view, engine=engine, fleet=fleet, lane=lane, learner=learner)
        return await training.run(extra, backend)


def _load(options: Options) -> tuple[Learner, dict[str, torch.Tensor]]:
    extra = {} if options.model is None else checkpoint.load(options.model)
    return Learner(seed=options.seed), extra


def _policy(learner: Learner, seed: int) -> str:
    return msgspec.json.encode(dataclasses.asdict(learner.config.model(seed))).decode()


def _source(learner: Learner, extra: dict[str, torch.Tensor]) -> Any:
    if not extra:
        return learner.model
    return checkpoint.TensorSource({**dict(learner.model.named_parameters()), **extra})


@asynccontextmanager
async def _watching(fleet: Sequence[Replica], view: View) -> AsyncIterator[None]:
    """Show the workers' own transitions for the length of the block."""

    async def watch(replica: Replica) -> None:
        client = aiosync.HTTPVLLMWeightSyncClient(replica.url)
        try:
            async with aclosing(client.events(since=0)) as events:
                async for event in events:
                    view.worker(replica.name, event)
        except AiosyncError:
            return  # it is gone: its next answer, which does not come, says so

    tasks = [asyncio.create_task(watch(replica)) for replica in fleet]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
