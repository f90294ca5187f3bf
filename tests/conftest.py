"""What every test is watched for: a blocked event loop, and things left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from blockbuster import BlockBuster
from fault_report import FaultReport

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("aiosync", "transports", "statemachines")
# A mutex that somebody holds for a few instructions is no blocking call; one held this long is.
# In parts, for a machine that stands still for a second uses up only one of them.
MUTEX_SECONDS, MUTEX_PARTS = 0.4, 20
# Helpers that live as long as the test process.
LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "zygote.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults", action="store_true", help="only the tests of known faults, and a line for each"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A job in the background of a shell ignores it, and so would every program that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.faults:
        config.pluginmanager.register(FaultReport())


def _package(name: str) -> ModuleType:
    """Stands for a package's folder, so that a broken import fails its own tests only."""
    module = ModuleType(name)
    module.__path__ = [str(ROOT / name) + os.sep]
    return module


def _lock_is_free_soon(lock, blocking=True, timeout=-1) -> bool:
    if not blocking or timeout == 0 or not lock.locked():
        return True
    for _ in range(MUTEX_PARTS):
        if lock.acquire(True, MUTEX_SECONDS / MUTEX_PARTS):
            lock.release()
            return True
    return False


def _make_detector() -> BlockBuster:
    detector = BlockBuster([_package(name) for name in PACKAGES])
    for name, function in detector.functions.items():
        # Lazy imports read files wherever they happen; they happen once.
        function.can_block_in("<frozen importlib._bootstrap>", {"_find_and_load"})
        # Binding a Unix socket looks at the path and removes a stale one.
        function.can_block_in("asyncio/unix_events.py", {"create_unix_server"})
        # The traceback of a failing test may read sources.
        function.can_block_in("linecache.py", {"updatecache", "checkcache"})
        if name.startswith("threading.Lock."):
            function.can_block_predicate = _lock_is_free_soon
    return detector


_DETECTOR = _make_detector()


@pytest.fixture(autouse=True)
def blocking_detector():
    """Blocking calls of our packages on a running asyncio loop raise `BlockingError`.

    Threads without a running loop, lanes among them, may block. A test that has to block the
    loop calls ``blocking_detector.deactivate()``.
    """
    _DETECTOR.activate()
    yield _DETECTOR
    _DETECTOR.deactivate()


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind():
    """Each test file ends without non-daemon threads and child processes that it started."""
    before = _leftovers()
    yield
    left = _settle(lambda: _leftovers() - before)
    assert not left, f"left behind by this file: {sorted(left)}"


@pytest.fixture
def free_shm():
    """Afterwards shared memory is as before: names in /dev/shm, and anonymous files held open."""
    before = _shared_memory()
    yield
    left = _settle(lambda: _shared_memory() - before)
    assert not left, f"shared memory left: {sorted(left)}"


def _settle(look, seconds: float = 5.0):
    """What `look` still sees once it has had time to become empty."""
    deadline = time.monotonic() + seconds
    while found := look():
        if time.monotonic() > deadline:
            return found
        gc.collect()
        time.sleep(0.02)
    return found


def _leftovers() -> set[str]:
    threads = {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    }
    return threads | _children()


def _children() -> set[str]:
    """All descendants, except the lasting ones that are our own children."""
    parents, commands = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[status.parent.name] = status.read_text().rpartition(")")[2].split()[1]
            commands[status.parent.name] = (status.parent / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
    found = set()
    ours = str(os.getpid())
    generation = {ours}
    while generation := {pid for pid in commands if parents[pid] in generation}:
        for pid in generation:
            command = commands[pid].replace(b"\0", b" ").decode(errors="replace").strip()
            lasting = any(name in command for name in LASTING_CHILDREN)
            if not (lasting and parents[pid] == ours):
                found.add(f"process {pid} ({command or 'not reaped'})")
    return found


def _shared_memory() -> set[str]:
    if sys.platform != "linux":
        return set()
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}  # noqa: PTH208
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        if target.startswith("/memfd:"):
            found.add(f"{target} (descriptor {link.name})")
    return found
