"""Entry point of the command ``aiosync``."""

from __future__ import annotations

import importlib
import signal
import sys

import aiosync

_NEEDED = ("click", "rich", "safetensors")
_USAGE = 2
_INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process; ends it with its exit code."""
    # A script's background job starts with SIGINT ignored; what it started would then stay.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if not _is_complete():
            sys.stderr.write("The command line needs more packages: pip install 'aiosync[cli]'\n")
            sys.exit(_USAGE)
        _run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _is_complete() -> bool:
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise  # a dependency that is there, and broken
        return False
    return True


def _run() -> None:
    import click

    from aiosync.demo.command import demo

    group = click.Group("aiosync", commands=[demo], help="Awaitable weight sync.")
    click.version_option(aiosync.__version__, prog_name="aiosync")(group)
    group.main(prog_name="aiosync")
