"""One worker engine of this process, fed over a real data plane of any backend."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import torch

import aiosync
from aiosync.testing import DirectClient
from transports.loopback import LoopbackLink

ALL = ["loopback", "ipc", "gloo"]


class Plain:
    """A source without a base: a dict of tensors that a test may change between rounds."""

    def __init__(self, tensors):
        self.tensors = tensors

    @property
    def metadata(self):
        return [aiosync.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self):
        yield from self.tensors.items()


@asynccontextmanager
async def carried(source, model, backend="loopback", *, buffer=4096, device=None, **config):
    """A connected trainer engine and the worker engine that holds `model`."""
    size = "packed_buffer_size_bytes" if backend == "ipc" else "buffer_size_bytes"
    options = {"backend": backend, size: buffer}
    async with AsyncExitStack() as stack:
        if backend == "loopback":
            options["link"] = stack.enter_context(LoopbackLink())
        worker = aiosync.WeightTransferEngineFactory.create_engine(
            aiosync.WeightTransferConfig(backend, **config), None, device, model, name="w"
        )
        await stack.enter_async_context(worker)
        if isinstance(source, dict):
            source = Plain(source)
        connected = aiosync.connect(source, workers=[DirectClient(worker, name="w")], **options)
        yield await stack.enter_async_context(connected), worker


def like(tensors):
    """Tensors of the same kinds, filled with zeros."""
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def assert_same(sent, held):
    """Names, shapes, dtypes and bits are the same."""
    assert list(held) == list(sent)
    for name, tensor in sent.items():
        assert held[name].shape == tensor.shape, name
        assert held[name].dtype == tensor.dtype, name
        assert torch.equal(bits(held[name]), bits(tensor)), name
