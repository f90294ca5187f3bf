"""A receiver for relay sinks that lives on the event loop, as a queue to another process would."""

from __future__ import annotations

import asyncio

import anyio.lowlevel
import torch


class Elsewhere:
    """An async receiver, as a queue to another process would be."""

    def __init__(self):
        self.shown, self.staged, self.log, self.version = {}, {}, [], None
        self.hold: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.reached = asyncio.Event()

    async def _meet(self, what):
        self.log.append(what)
        await anyio.lowlevel.checkpoint()
        if what in self.hold:
            self.reached.set()
            await self.hold[what].wait()
        if what in self.errors:
            raise self.errors.pop(what)

    async def begin(self, metadata, aliases):
        self.staged = {}
        await self._meet("begin")

    async def put(self, name, tensor):
        await self._meet("put")
        self.staged[name] = tensor

    async def commit(self, version):
        await self._meet("commit")
        self.shown, self.version = self.staged, version

    async def abort(self):
        await self._meet("abort")
        self.staged = {}


def holds(receiver, model):
    names = {name for name, _ in model.named_parameters()}
    return set(receiver.shown) == names and all(
        torch.equal(receiver.shown[name], p) for name, p in model.named_parameters()
    )
