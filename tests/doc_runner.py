"""Runs a page's code blocks in one namespace: ``doc_runner.py PAGE BLOCK_FILE...``."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType


def compile_block(path: Path, label: str) -> CodeType:
    text = path.read_text("utf-8")
    # Tracebacks and `inspect.getsource` find the block under the page's name.
    linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)
    return compile(text, label, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def main(page: str, *paths: str) -> None:
    # Dataclasses and structs look their annotations up in the module of that name.
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [page]
    with asyncio.Runner() as runner:
        for index, path in enumerate(paths):
            code = compile_block(Path(path), f"{page}[{index}]")
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(_evaluate(code, module.__dict__))
            else:
                exec(code, module.__dict__)


async def _evaluate(code: CodeType, names: dict[str, object]) -> None:
    await eval(code, names)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()  # reads `linecache`, which the interpreter's own report does not
        sys.exit(1)
