"""Programs of ``tests/env_programs``, each in an interpreter of its own that complains of much."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "env_programs"
# Development mode without what other packages are warned of: files, sockets and loops that are
# left open, and coroutines that nobody awaited. From a finaliser even an error only gets printed.
STRICT = ("-X", "dev", "-W", "ignore", "-W", "error::ResourceWarning", "-W", "always:coroutine")


def environment(**more: str) -> dict[str, str]:
    """That of a program which imports what this checkout and ``tests/support`` hold."""
    paths = [str(TESTS.parent), str(TESTS / "support")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


@asynccontextmanager
async def interpreter(
    *args: str, strict: bool = True, group: bool = False, **variables: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """``python ARGS`` with pipes, for the length of the block; killed if it is still there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(STRICT if strict else ()),
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**variables),
        start_new_session=group,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run(
    script: str, *args: str, seconds: float = 60.0, strict: bool = True
) -> tuple[list[str], str, int]:
    """Run a program to its end: the lines it printed, what was on stderr, its exit code."""
    async with interpreter(str(PROGRAMS / script), *args, strict=strict) as process:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    assert process.returncode is not None
    return out.decode().splitlines(), err.decode(), process.returncode
