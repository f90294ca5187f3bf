"""A stock vLLM's CUDA-IPC routes over pretended GPUs: handles name memory of a process.

`fake_handle` makes them, `FakeVllm` reads them out of the process, each worker those of its GPU. As
vLLM does, it takes packed buffers at once and other tensors when the update is finished.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

SAID = {
    "init_weight_transfer_engine": "Weight transfer initialized",
    "start_weight_update": "Weight update started",
    "update_weights": "Weights updated",
    "finish_weight_update": "Weight update finished",
    "shutdown_weight_transfer_engine": "Weight transfer shut down",
}


def fake_handle(gpu: str, tensor: torch.Tensor) -> dict[str, Any]:
    """A tuple of vLLM's form; the handle is the process and the address of the storage."""
    storage = tensor.untyped_storage()
    where = f"{os.getpid()} {storage.data_ptr()}".encode()
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
    about = (torch.storage.TypedStorage, tensor.dtype, 7)
    return {
        gpu: (torch.Tensor, *layout, *about, where, storage.nbytes(), 0, False, b"c", 3, b"e", True)
    }


def read_handle(args: tuple[Any, ...]) -> torch.Tensor:
    """A copy of what the handle names now."""
    assert len(args) == 15
    _, size, stride, offset, _, dtype, _, where, nbytes, start, *_ = args
    assert start == 0
    pid, address = (int(part) for part in where.decode().split())
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        data = bytearray(memory.read(nbytes)) or bytearray(8)
    flat = torch.frombuffer(data, dtype=torch.uint8)[: len(data) // 8 * 8].view(dtype)
    return flat.as_strided(size, stride, offset).clone()


class FakeVllm:
    """What the workers hold and heard.

    Attributes:
        before: Awaited before each update is loaded, with its number.
        at_finish: Called before what was updated is finished.
    """

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self.gpus = gpus
        self.url = ""
        self.weights: dict[str, dict[str, torch.Tensor]] = {gpu: {} for gpu in gpus}
        self.pids: dict[str, set[int]] = {gpu: set() for gpu in gpus}
        self.calls: list[str] = []
        self.packed: bool | None = None
        self.before: Any = None
        self.at_finish: Any = lambda: None
        self._waiting: list[tuple[str, str, tuple[Any, ...]]] = []

    def prints(self, gpu: str) -> dict[str, str]:
        return {
            name: hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
            for name, t in self.weights[gpu].items()
        }

    def init(self, info: dict[str, Any]) -> None:
        assert set(info) == {"packed"}, info
        self.packed = info["packed"]

    async def update(self, info: dict[str, Any]) -> None:
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"], validate=True))
        if self.before is not None:
            await self.before(len([call for call in self.calls if call == "update"]))
        self.calls.append("update")
        for gpu in self.gpus:
            if self.packed:
                self._take_buffer(gpu, info, handles)
                continue
            for name, each in zip(info["names"], handles, strict=True):
                if gpu not in each:
                    raise ValueError(f"IPC handle not found for GPU UUID {gpu}")
                self._note(gpu, each[gpu])
                self._waiting.append((gpu, name, each[gpu]))

    def _take_buffer(self, gpu: str, info: dict[str, Any], handles: dict[str, Any]) -> None:
        if gpu not in handles:
            raise ValueError(f"IPC handle not found for GPU UUID {gpu}")
        self._note(gpu, handles[gpu])
        sizes = info["tensor_sizes"]
        pieces = read_handle(handles[gpu])[: sum(sizes)].split(sizes)
        named = zip(info["names"], info["dtype_names"], info["shapes"], pieces, strict=True)
        for name, dtype, shape, piece in named:
            self.weights[gpu][name] = piece.clone().view(getattr(torch, dtype)).view(shape)

    def _note(self, gpu: str, args: tuple[Any, ...]) -> None:
        self.pids[gpu].add(int(args[7].decode().split()[0]))

    def finish(self, body: dict[str, Any]) -> None:
        self.at_finish()
        for gpu, name, args in self._waiting:
            self.weights[gpu][name] = read_handle(args)
        self._waiting = []
        self.calls.append(f"finish {body.get('weight_version')}")


@asynccontextmanager
async def fake_vllm(*gpus: str) -> AsyncIterator[FakeVllm]:
    """The routes, for the length of the block."""
    vllm = FakeVllm(gpus)

    def route(name: str, act: Any) -> web.RouteDef:
        async def handle(request: web.Request) -> web.Response:
            text = await request.text()
            body = await request.json() if text else {}
            try:
                done = act(body)
                if asyncio.iscoroutine(done):
                    await done
            except Exception as error:
                message = f"Call to collective_rpc method failed: {error!r}"
                return web.json_response({"error": {"message": message, "code": 500}}, status=500)
            return web.json_response({"message": SAID[name]})

        return web.post(f"/{name}", handle)

    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            route("init_weight_transfer_engine", lambda body: vllm.init(body["init_info"])),
            route("start_weight_update", lambda body: vllm.calls.append("start")),
            route("update_weights", lambda body: vllm.update(body["update_info"])),
            route("finish_weight_update", vllm.finish),
            route("shutdown_weight_transfer_engine", lambda body: None),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    vllm.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        yield vllm
    finally:
        await runner.cleanup()
