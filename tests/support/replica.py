"""One inference replica as a process: weight routes, /fingerprint, /crash; prints its URL."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from typing import Any

import models
import torch
from aiohttp import web

import aiosync


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sink", default="staged")
    parser.add_argument("--staging", default="private")
    parser.add_argument("--verify", default="digest")
    parser.add_argument("--backend", default="ipc")
    parser.add_argument("--lease", type=float)
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--token")
    parser.add_argument("--path")
    parser.add_argument("--name", default="replica")
    parser.add_argument("--marker")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--uncollected", help="no garbage collection, so that cycles stay")
    parser.add_argument("--draft", type=int, help="seed of a draft model")
    options = parser.parse_args()
    if options.uncollected:
        gc.disable()
    torch.set_num_threads(1)
    model = models.make(options.kind, options.seed, options.device)
    config = aiosync.WeightTransferConfig(
        options.backend,
        sink=options.sink,
        verify=options.verify,
        lease_s=options.lease,
        marker=options.marker,
        staging=options.staging,
    )
    engine = aiosync.WeightTransferEngineFactory.create_engine(
        config, None, torch.device(options.device), model, name=options.name
    )

    draft = None if options.draft is None else models.make("small", options.draft)
    if draft is not None:
        engine.set_draft_model(draft)
    ids: list[str] = []
    engine.on_transition(
        lambda t: (
            ids.append(engine.generation.weights.weights_id) if t.trigger == "complete" else None
        )
    )

    async def fingerprint(_: web.Request) -> web.Response:
        async with engine.generation.swap():  # alone, and also while the weights may not serve
            prints = await asyncio.to_thread(models.fingerprint, model)  # may wait for a GPU
        version = engine.version.label if engine.version else None
        facts: dict[str, Any] = {"prints": prints, "version": version}
        facts |= {"state": engine.state.value, "weights": engine.weights.value}
        facts["ids"] = ids
        facts["versions"] = {name: v.label for name, v in engine.target_versions.items()}
        facts["draft"] = None if draft is None else models.fingerprint(draft)
        if not options.uncollected:
            gc.collect()  # what only a cycle keeps is no leak
        facts["tasks"] = len(asyncio.all_tasks())
        return web.json_response(facts)

    app = web.Application()
    app.add_routes([web.get("/fingerprint", fingerprint)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    extra = site._server.sockets[0].getsockname()[1]
    where: dict[str, Any] = {"path": options.path}
    if options.tcp:
        where = {"host": "127.0.0.1", "port": 0}
    async with engine, aiosync.serve(engine, token=options.token, **where) as server:
        ready = {"url": server.url, "extra": f"http://127.0.0.1:{extra}"}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        # The test's end of the pipe closes when the test process dies, whatever kills it.
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()
    await runner.cleanup()


asyncio.run(main())
