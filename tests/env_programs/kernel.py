"""A notebook: a real kernel process, its cells, and an interrupt; prints each cell's outcome.

Arguments: the URL of a replica, and an empty folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

LEASE_S = 1.0

SET_UP = f"""
import asyncio, contextlib
import torch, models, aiosync
from paced import Hold, Paced
torch.set_num_threads(1)
source, stack = Paced(models.make("small", 7)), contextlib.AsyncExitStack()
sync = await stack.enter_async_context(
    aiosync.connect(
        source, workers=["URL"], packed_buffer_size_bytes=4096, lease_s={LEASE_S}
    )
)
print((await sync.send_weights(version=1)).outcome)
"""
AGAIN = "print((await sync.send_weights()).outcome, sync.version.order)"
IN_BACKGROUND = """
hold = source.before = Hold(3)
update = sync.begin_update()
while not hold.reached.is_set():
    await asyncio.sleep(0.01)
print("holding")
"""
RELEASED = """
hold.released.set()
print((await update).outcome)
"""
HELD = """
hold = source.before = Hold(3)
async def announce():
    while not hold.reached.is_set():
        await asyncio.sleep(0.01)
    print("holding", flush=True)
announcing = asyncio.ensure_future(announce())
await sync.send_weights()
"""
FREE = """
print(sync.state, sync.last_report.outcome)
hold.released.set()
source.before = lambda index: None
"""
CLOSE = """
await stack.aclose()
print(sync.state)
"""


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Notebook:
    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=30)

    def cell(self, name: str, code: str, *, interrupt_at: str | None = None) -> None:
        said: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["header"]["msg_type"] == "stream":
                said.append(content["text"])
                if interrupt_at is not None and interrupt_at in content["text"]:
                    self.manager.interrupt_kernel()
            elif message["header"]["msg_type"] == "error":
                said.append(f"{content['ename']}")

        self.client.execute_interactive(code, timeout=25, output_hook=hook)
        say(f"{name}:", *"".join(said).split())

    def close(self) -> None:
        self.client.stop_channels()


def main(url: str, folder: str) -> None:
    connection = str(Path(folder) / "kernel.json")
    manager = KernelManager(connection_file=connection, transport="ipc", ip=f"{folder}/channel")
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=argv, display_name="", language="python")
    manager.start_kernel()
    try:
        notebook = Notebook(manager)
        notebook.cell("set-up", SET_UP.replace("URL", url))
        time.sleep(1.6 * LEASE_S)  # nobody types: the lease of a round would be over
        notebook.cell("again", AGAIN)
        notebook.cell("background", IN_BACKGROUND)
        time.sleep(1.6 * LEASE_S)  # a kernel's loop runs meanwhile, and so does the round
        notebook.cell("released", RELEASED)
        notebook.cell("interrupted", HELD, interrupt_at="holding")
        notebook.cell("free", FREE)
        notebook.cell("after", AGAIN)
        notebook.cell("close", CLOSE)
        notebook.close()
    finally:
        manager.shutdown_kernel(now=False)


main(*sys.argv[1:])
