"""Documentation that runs: every Python block of README.md and docs/ is executed.

The blocks of one file share a namespace and run in order, in one fresh process. They may use
``await`` at the top level. A block inside an HTML comment runs too: set-up that a reader need not
see. A block marked ``python notest`` is skipped, and needs a comment right above it that says why:
``<!-- notest: needs two GPUs -->``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from statemachines import ENGINE, mermaid, table_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNER = Path(__file__).with_name("doc_runner.py")
CONSOLE = ("console", "bash", "sh", "shell")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
REASON = re.compile(r"<!-- *notest: *\w.*-->")


class Block(NamedTuple):
    info: str
    line: int  # of the block's first line of content, counted from 1
    text: str
    above: str  # the last line before the fence that is not empty


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        ValueError: The last block is not closed.
    """
    found: list[Block] = []
    opened: tuple[str, int, str, str] | None = None
    body: list[str] = []
    above = ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is not None:
            if fence and not fence["info"].strip():
                info, first, indent, before = opened
                dedented = "\n".join(item.removeprefix(indent) for item in body)
                found.append(Block(info, first, dedented + "\n", before))
                opened, body, above = None, [], line
            else:
                body.append(line)
        elif fence:
            opened = (fence["info"].strip(), number + 1, fence["indent"], above)
        elif line.strip():
            above = line
    if opened is not None:
        raise ValueError(f"the block at line {opened[1]} is not closed")
    return found


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text("utf-8")) if block.info == "python"]


def run(parts: list[Block], page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # Empty lines keep each block's line numbers, so that a traceback points into the page.
    arguments = []
    for index, block in enumerate(parts):
        source = folder / f"block{index}.py"
        source.write_text("\n" * (block.line - 1) + block.text, "utf-8")
        arguments.append(str(source))
    (folder / "work").mkdir()
    return subprocess.run(
        [sys.executable, str(RUNNER), str(page), *arguments],
        cwd=folder / "work",
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.fixture(params=PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def page(request) -> Path:
    return request.param


def test_python_blocks_run(page, tmp_path):
    parts = runnable(page)
    if not parts:
        pytest.skip("no Python blocks")
    done = run(parts, page, tmp_path)
    assert done.returncode == 0, f"{page.name}:\n{done.stdout}\n{done.stderr}"


def test_blocks_are_labelled_and_skipped_ones_have_a_reason(page):
    for block in blocks(page.read_text("utf-8")):
        where = f"{page.name}:{block.line}"
        assert block.info, f"{where}: name the block's language (text, if it has none)"
        words = block.info.split()
        if words[0] in ("python", "py", "python3"):
            assert block.info in ("python", "python notest"), f"{where}: ```{block.info}"
        if words[1:] == ["notest"]:
            assert REASON.search(block.above), f"{where}: say why in a <!-- notest: --> above"


def test_make_targets_of_console_blocks_exist(page):
    targets = set(
        re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    assert "test" in targets
    for block in blocks(page.read_text("utf-8")):
        if block.info.split()[:1] and block.info.split()[0] in CONSOLE:
            for call in re.findall(r"(?:^|\$ |&& )make\b([^#\n&|;]*)", block.text, re.MULTILINE):
                named = {
                    word for word in re.sub(r"\"[^\"]*\"", "", call).split() if "=" not in word
                }
                assert named <= targets, f"{page.name}:{block.line}: make has no {named - targets}"


def test_blocks_are_found_with_their_lines_and_reasons():
    text = (
        "# Title\n\n```python\nx = 1\n```\n\n<!-- notest: needs a GPU -->\n\n```python notest\n"
        "y = 2\n```\n<!-- set-up\n```python\nz = 3\n```\n-->\n1. item\n\n   ```text\n   a\n   ```\n"
    )
    found = blocks(text)
    assert [block.info for block in found] == ["python", "python notest", "python", "text"]
    assert [block.line for block in found] == [4, 10, 14, 20]
    assert REASON.search(found[1].above)
    assert found[3].text == "a\n"
    with pytest.raises(ValueError, match="line 2 is not closed"):
        blocks("```python\nx = 1\n")


def test_blocks_share_names_may_await_and_fail_loudly(tmp_path):
    page = tmp_path / "page.md"
    good = [
        Block("python", 3, "import asyncio\nfrom dataclasses import dataclass\nn = 1\n", ""),
        Block("python", 9, "await asyncio.sleep(0)\nassert n == 1\n", ""),
        Block("python", 12, "async def main(): return n\nassert asyncio.run(main()) == 1\n", ""),
    ]
    for name, parts in {
        "good": good,
        "bad": [*good, Block("python", 20, "assert n == 2\n", "")],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        done = run(parts, page, folder)
        assert (done.returncode == 0) == (name == "good"), done.stderr
    assert "page.md" in done.stderr
    assert "line 20" in done.stderr
    assert "assert n == 2" in done.stderr


def test_the_life_cycle_in_the_readme_is_the_table_the_code_runs():
    text = (ROOT / "README.md").read_text("utf-8")
    shown = text.split("<!-- life cycle: begin -->")[1].split("<!-- life cycle: end -->")[0]
    assert table_markdown(ENGINE) in shown
    assert mermaid(ENGINE) in shown
