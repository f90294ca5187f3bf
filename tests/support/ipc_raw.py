"""vLLM's side of its CUDA-IPC backend, written from its specification: no import of this project.

    python tests/support/ipc_raw.py DEVICE

serves the routes, loads pickled handles as vLLM does, and says what arrived at ``/prints``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pickle
import sys
from typing import Any

import torch
from aiohttp import web
from torch.multiprocessing.reductions import rebuild_cuda_tensor

DEVICE = int(sys.argv[1])
GPU = str(torch.cuda.get_device_properties(DEVICE).uuid)


SAID = {
    "init_weight_transfer_engine": "Weight transfer initialized",
    "start_weight_update": "Weight update started",
    "update_weights": "Weights updated",
    "finish_weight_update": "Weight update finished",
    "shutdown_weight_transfer_engine": "Weight transfer shut down",
}


class Worker:
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.packed: bool | None = None
        self.calls: list[str] = []
        self.biggest = 0
        self._map: tuple[Any, torch.Tensor] | None = None
        self._kept: list[torch.Tensor] = []

    def init(self, info: dict[str, Any]) -> None:
        assert set(info) == {"packed"}, info
        self.packed = info["packed"]

    def update(self, info: dict[str, Any]) -> None:
        names, dtypes, shapes = info["names"], info["dtype_names"], info["shapes"]
        assert "ipc_handles" not in info
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"], validate=True))
        self.calls.append(f"update {len(names)}")
        if not self.packed:
            assert set(info) == {"names", "dtype_names", "shapes", "ipc_handles_pickled"}
            assert len(handles) == len(names)
            for name, handle in zip(names, handles, strict=True):
                tensor = self.rebuilt(handle)
                self._kept.append(tensor)
                self.weights[name] = tensor.clone()
            return
        sizes = info["tensor_sizes"]
        key = handles[GPU]
        if self._map is None or self._map[0] != key:
            self._map = (key, self.rebuilt(handles))
        buffer = self._map[1]
        self.biggest = max(self.biggest, sum(sizes))
        pieces = buffer[: sum(sizes)].split(sizes)
        for name, dtype, shape, piece in zip(names, dtypes, shapes, pieces, strict=True):
            self.weights[name] = piece.view(getattr(torch, dtype)).view(shape).clone()

    def rebuilt(self, handle: dict[str, Any]) -> torch.Tensor:
        args = list(handle[GPU])
        assert len(args) == 15
        args[6] = DEVICE
        return rebuild_cuda_tensor(*args)

    def finish(self, body: dict[str, Any]) -> None:
        self.calls.append(f"finish {body.get('weight_version')}")
        self._map, self._kept = None, []

    def prints(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(
                bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist())
            ).hexdigest()
            for name, tensor in self.weights.items()
        }


async def serve() -> None:
    worker = Worker()

    def route(name: str, act: Any) -> web.RouteDef:
        async def handle(request: web.Request) -> web.Response:
            text = await request.text()
            body = {} if not text else await request.json()
            try:
                await asyncio.to_thread(act, body)
                torch.cuda.synchronize(DEVICE)
            except Exception as error:
                message = f"Call to collective_rpc method failed: {error!r}"
                return web.json_response({"error": {"message": message, "code": 500}}, status=500)
            return web.json_response({"message": SAID[name]})

        return web.post(f"/{name}", handle)

    async def prints(_: web.Request) -> web.Response:
        facts = {"prints": worker.prints(), "calls": worker.calls, "biggest": worker.biggest}
        return web.json_response(facts)

    app = web.Application(client_max_size=1 << 28)
    app.add_routes(
        [
            route("init_weight_transfer_engine", lambda body: worker.init(body["init_info"])),
            route("start_weight_update", lambda body: None),
            route("update_weights", lambda body: worker.update(body["update_info"])),
            route("finish_weight_update", worker.finish),
            route("shutdown_weight_transfer_engine", lambda body: None),
            web.get("/prints", prints),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


asyncio.run(serve())
