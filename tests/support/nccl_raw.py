"""Peers of vLLM's NCCL wire with raw NCCL calls, written from its description; no aiosync here.

    nccl_raw.py worker                      an HTTP server with vLLM's routes; prints its URL
    nccl_raw.py trainer URL store|id packed|unpacked    drives a server once; prints "done"

What travels is `nccl_wire`'s model, in the order that keeps every tensor aligned.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import hashlib
import json
import pickle
import socket
import sys
import threading
import types
import urllib.request
from datetime import timedelta
from typing import Any

import nccl.core as nccl
import nccl_wire
import torch

TENSORS = sorted(
    (t for t in nccl_wire.DENSE if t[1] in nccl_wire.NCCL_TYPE),
    key=lambda t: -nccl_wire.ITEMSIZE[t[1]],
)
LIMIT = 600
KEY = "broadcast_from/0/0"


def declare_struct() -> Any:
    name = "vllm.distributed.device_communicators.pynccl_wrapper"

    class ncclUniqueId(ctypes.Structure):  # noqa: N801
        _fields_ = [("internal", ctypes.c_byte * 128)]

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = name, "ncclUniqueId"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        sys.modules[part] = types.ModuleType(part)
    sys.modules[name].ncclUniqueId = ncclUniqueId
    return ncclUniqueId


def communicator(raw: bytes, rank: int, size: int) -> Any:
    torch.cuda.set_device(0)
    comm = nccl.Communicator.init(size, rank, nccl.UniqueId.from_bytes(raw))
    one = torch.zeros(1, dtype=torch.float32, device="cuda")
    comm.allreduce(one, one, nccl.SUM, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.current_stream().synchronize()
    return comm


def broadcast(comm: Any, data: torch.Tensor) -> None:
    stream = torch.cuda.current_stream()
    comm.broadcast(data, data, 0, stream=stream.cuda_stream)
    stream.synchronize()


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


class Worker:
    """vLLM's worker: strict bodies, views into chunks, cached metadata."""

    def __init__(self) -> None:
        self.comm: Any = None
        self.known: tuple[list, list, list] | None = None
        self.got: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    def init(self, info: dict[str, Any]) -> None:
        size, rank = info["world_size"], info["rank_offset"]
        known = {"master_address", "master_port", "nccl_unique_id_b64", "rank_offset"}
        known |= {"world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}
        assert set(info) <= known, info
        if "nccl_unique_id_b64" in info:
            raw = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        else:
            declare_struct()
            where = (info["master_address"], info["master_port"], size)
            store = torch.distributed.TCPStore(*where, is_master=False, use_libuv=False)
            raw = bytes(pickle.loads(store.get(KEY)))
        self.packed = info.get("packed", False)
        self.limit = info.get("packed_buffer_size_bytes", 1 << 30)
        self.comm = communicator(raw, rank, size)
        self.known = None

    def update(self, info: dict[str, Any]) -> None:
        assert set(info) <= {"names", "dtype_names", "shapes"}, info
        lists = info["names"], info["dtype_names"], info["shapes"]
        if lists[0]:
            self.known = lists
        assert self.known is not None
        metas = list(zip(*self.known, strict=True))
        if not self.packed:
            for name, dtype, shape in metas:
                tensor = torch.empty(shape, dtype=dtype_of(dtype), device="cuda")
                broadcast(self.comm, tensor)
                self.got[name] = tensor
            return
        chunk: list[tuple] = []
        running = 0
        for meta in metas:
            chunk.append(meta)
            running += nccl_wire.nbytes(meta[1], meta[2])
            if running > self.limit:
                self.receive(chunk, running)
                chunk, running = [], 0
        if chunk:
            self.receive(chunk, running)

    def receive(self, chunk: list[tuple], nbytes: int) -> None:
        data = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        broadcast(self.comm, data)
        sizes = [nccl_wire.nbytes(dtype, shape) for _, dtype, shape in chunk]
        for (name, dtype, shape), piece in zip(chunk, data.split(sizes), strict=True):
            self.got[name] = piece.view(dtype_of(dtype)).view(shape)

    def prints(self) -> dict[str, str]:
        found = {}
        for name, tensor in self.got.items():
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
            found[name] = hashlib.sha256(raw).hexdigest()
        return found


async def serve() -> None:
    from aiohttp import web

    worker = Worker()

    def route(name: str, what: Any) -> Any:
        async def handle(request: web.Request) -> web.Response:
            body = json.loads(await request.read() or b"{}")
            worker.calls.append(name)
            try:
                await asyncio.to_thread(what, body)
            except Exception as error:
                return web.json_response({"error": {"message": repr(error)}}, status=500)
            return web.json_response({"message": "ok"})

        return web.post(f"/{name}", handle)

    async def prints(_: web.Request) -> web.Response:
        return web.json_response({"prints": worker.prints(), "calls": worker.calls})

    async def world_size(_: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    app = web.Application()
    app.add_routes(
        [
            route("init_weight_transfer_engine", lambda body: worker.init(body["init_info"])),
            route("start_weight_update", lambda body: None),
            route("update_weights", lambda body: worker.update(body["update_info"])),
            route("finish_weight_update", lambda body: None),
            web.get("/get_world_size", world_size),
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


def post(url: str, route: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{url}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def train(url: str, way: str, form: str) -> None:
    """vLLM's trainer: init beside the rendezvous, update beside the broadcasts, finish."""
    torch.cuda.set_device(0)
    packed = form == "packed"
    info: dict[str, Any] = {"rank_offset": 1, "world_size": 2, "packed": packed}
    info |= {"packed_buffer_size_bytes": LIMIT, "packed_num_buffers": 2}
    raw = bytes(nccl.get_unique_id().as_bytes)
    listener = None
    if way == "id":
        info["nccl_unique_id_b64"] = base64.b64encode(raw).decode()
    else:
        listener = socket.socket(socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        info |= {"master_address": "127.0.0.1", "master_port": listener.getsockname()[1]}
    body = {"init_info": info}
    calling = threading.Thread(target=post, args=(url, "init_weight_transfer_engine", body))
    calling.start()
    store = None
    if listener is not None:
        struct = declare_struct()
        store = torch.distributed.TCPStore(
            "127.0.0.1",
            info["master_port"],
            2,
            is_master=True,
            timeout=timedelta(seconds=30),
            use_libuv=False,
            master_listen_fd=listener.detach(),
        )
        store.set(KEY, pickle.dumps(struct.from_buffer_copy(raw)))
    comm = communicator(raw, 0, 2)
    calling.join()
    update = {
        "names": [n for n, _, _ in TENSORS],
        "dtype_names": [d for _, d, _ in TENSORS],
        "shapes": [list(s) for _, _, s in TENSORS],
    }
    for lists in (update, {"names": [], "dtype_names": [], "shapes": []}):
        post(url, "start_weight_update", {})
        body = {"update_info": lists}
        calling = threading.Thread(target=post, args=(url, "update_weights", body))
        calling.start()
        for kind, _, data in nccl_wire.broadcasts(TENSORS, packed, LIMIT):
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
            names = [n for n, k in nccl_wire.NCCL_TYPE.items() if k == kind]
            broadcast(comm, tensor.view(dtype_of(names[0])))
        calling.join()
        post(url, "finish_weight_update", {})
    print("done", flush=True)
    del store
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        asyncio.run(serve())
    else:
        train(*sys.argv[2:])
