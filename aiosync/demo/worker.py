"""One inference worker of the demonstration, a process of its own.

``python -m aiosync.demo.worker`` serves on one Unix socket the weight routes, ``POST /generate``,
``POST /logits`` and ``GET /fingerprints``. It ends with its standard input, which the system
closes when the trainer is gone, whatever ended it; or on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, final

import msgspec
import torch
from aiohttp import web

from aiosync.config import WeightTransferConfig
from aiosync.demo import checkpoint
from aiosync.demo.messages import (
    Fingerprints,
    Generated,
    GenerateRequest,
    Logits,
    LogitsRequest,
)
from aiosync.demo.model import TinyConfig, TinyModel
from aiosync.errors import Paused
from aiosync.factory import WeightTransferEngineFactory
from aiosync.listeners import bind_unix
from aiosync.service import WeightUpdateService
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiosync.worker import WeightTransferEngine

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_SHUTDOWN_S = 1.0


def one_thread() -> None:
    """Have torch compute on one thread: equal sums need equal orders of addition."""
    torch.set_num_threads(1)


@final
class Inference:
    """Answers requests from the model; the weights never change under a running one."""

    def __init__(
        self, model: TinyModel, engine: WeightTransferEngine[Any, Any], lane: Lane
    ) -> None:
        self._model = model
        self._engine = engine
        self._lane = lane
        self.extra: dict[str, torch.Tensor] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/logits", self._logits),
            web.get("/fingerprints", self._fingerprints),
        ]

    async def _generate(self, http: web.Request) -> web.Response:
        request = await _read(http, GenerateRequest)
        (tokens, logprobs), version = await self._compute(self._sample, request)
        return _json(Generated(tokens=tokens, logprobs=logprobs, version=version))

    async def _logits(self, http: web.Request) -> web.Response:
        request = await _read(http, LogitsRequest)
        bits, version = await self._compute(self._forward, request)
        return _json(Logits(bits=bits, version=version))

    async def _fingerprints(self, http: web.Request) -> web.Response:
        del http
        sha256, version = await self._compute(checkpoint.fingerprints, self.extra)
        return _json(Fingerprints(sha256=sha256, version=version))

    async def _compute(self, fn: Callable[[*Ts], T], *args: *Ts) -> tuple[T, int | str | None]:
        """The result, and the version of the weights that it is of."""
        try:
            async with self._engine.generation.request() as request:
                version = request.version
                result = await self._lane.run(fn, *args)
        except Paused as error:  # held by somebody, or the weights must not serve
            raise web.HTTPServiceUnavailable(text=error.message) from error
        except (ValueError, IndexError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return result, None if version is None else version.label

    def _sample(self, request: GenerateRequest) -> tuple[list[list[int]], list[list[float]]]:
        tokens, logprobs = self._model.generate(
            torch.tensor(request.prompts),
            request.new_tokens,
            temperature=request.temperature,
            generator=torch.Generator().manual_seed(request.seed),
        )
        return tokens.tolist(), logprobs.tolist()

    def _forward(self, request: LogitsRequest) -> list[int]:
        return logit_bits(self._model, torch.tensor(request.tokens))


@torch.no_grad()
def logit_bits(model: TinyModel, tokens: torch.Tensor) -> list[int]:
    """The bit patterns of the logits, one after the other: equal lists are equal bits."""
    bits: list[int] = model(tokens).contiguous().view(torch.int32).flatten().tolist()
    return bits


async def _read(http: web.Request, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(await http.read(), type=type_)
    except msgspec.MsgspecError as error:
        raise web.HTTPBadRequest(text=str(error)) from error


def _json(reply: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


async def work(options: argparse.Namespace) -> None:
    """Serve until standard input ends or a signal comes."""
    stop = _stop_signals()
    async with Lane("demo-inference", setup=one_thread) as lane:
        model, extra = await lane.run(_load, options)
        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(options.backend),
            None,
            torch.device("cpu"),
            {**dict(model.named_parameters()), **extra} if extra else model,
            name=options.name,
        )
        inference = Inference(model, engine, lane)
        inference.extra = extra
        async with engine, _serving(engine, inference, options.socket):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await _until_orphaned(stop)


def _load(options: argparse.Namespace) -> tuple[TinyModel, dict[str, torch.Tensor]]:
    model = TinyModel(TinyConfig(**msgspec.json.decode(options.policy)))
    return model, {} if options.model is None else checkpoint.blank(options.model)


@asynccontextmanager
async def _serving(
    engine: WeightTransferEngine[Any, Any], inference: Inference, path: str
) -> AsyncIterator[None]:
    service = WeightUpdateService(engine)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([*service.routes(), *inference.routes()])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, bind_unix(path)).start()
        yield
    finally:
        service.close()
        await runner.cleanup()
        _tidy_up(Path(path))


def _tidy_up(socket_path: Path) -> None:
    # A trainer that was killed cannot remove its folder: the last worker does.
    with suppress(OSError):
        socket_path.unlink()
        socket_path.parent.rmdir()


def _stop_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _until_orphaned(stop: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    ends = [asyncio.ensure_future(reader.read()), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    transport.close()


def main() -> None:
    """Run the worker of this process."""
    parser = argparse.ArgumentParser(prog="aiosync.demo.worker", description=__doc__)
    parser.add_argument("--socket", required=True, help="path of the Unix socket")
    parser.add_argument("--name", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--policy", required=True, help="the model's configuration as JSON")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint to receive")
    one_thread()
    asyncio.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
