"""A gateway's record of rounds as a file: lines of JSON, the last one of an offer counts.

A decision is on the disk before anybody acts on it; how a round ended follows as soon as it can.
What a crash leaves of the last line is cut off. The file is written anew, with the records that
are kept, once it has grown to several times their number. All of it happens on a lane: a disk may
take its time.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import anyio
import msgspec

from aiosync.concurrency import Supervisor
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, Busy, PhaseTimeout, Validation
from aiosync.offers import KEPT, RoundRecord
from transports.forked import keep_from_children
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

_GROWN: Final = 4 * KEPT  # lines; three an offer are usual


@final
class RecordFile:
    """One gateway's file; open it before anything else, under the loop that uses it.

    Args:
        path: Of the file, on a local disk; its folder must exist. One gateway at a time has it.
    """

    def __init__(self, path: str | Path) -> None:
        given: Any = path
        if not isinstance(given, str | Path) or not str(given):
            raise Validation(f"record must be the path of a file, not {path!r}")
        self.path = Path(given)
        self._lane: Lane | None = None
        self._pump = Supervisor()
        self._file = -1
        self._size = 0
        self._lines = 0
        self._last: dict[str, bytes] = {}
        self._pending: list[tuple[str, bytes]] = []
        self._noted = self._written = self._failed = 0
        self._error: OSError | None = None
        self._work = self._news = anyio.Event()
        self._closing = False
        keep_from_children(self)  # whose copy would keep the next gateway out

    def descriptors(self) -> list[int]:
        """See `transports.forked.Owner`."""
        return [self._file]

    async def open(self) -> list[RoundRecord]:
        """The records of the gateway that had the file before, oldest first.

        Raises:
            Validation: There is no such folder, or a line is no record; says which.
            Busy: Another gateway has the file.
        """
        self._lane = Lane(f"record of {self.path.name}")
        try:
            records = await self._lane.run(self._open)
        except BaseException:
            self._lane.close()
            raise
        self._closing = False
        self._work = self._news = anyio.Event()
        self._pump.start(self._run(), name="gateway-record")
        return records

    def note(self, record: RoundRecord) -> None:
        """Have the record as it is now written soon."""
        line = msgspec.json.encode(record)
        self._pending.append((record.id, line))
        self._noted += 1
        self._work.set()

    async def write(self, record: RoundRecord) -> None:
        """As `note`; returns when it is on the disk.

        Raises:
            AiosyncError: It cannot be written.
            PhaseTimeout: The disk takes too long.
        """
        self.note(record)
        number = self._noted
        with anyio.move_on_after(DEFAULTS.probe_s):
            while self._written < number:
                if self._failed >= number or self._closing:
                    why = self._error or "it is being closed"
                    raise AiosyncError(f"the record {self.path} cannot be written: {why}")
                await self._news.wait()
            return
        text = f"the record {self.path} was not written within {DEFAULTS.probe_s:g} s"
        raise PhaseTimeout(text, phase="decide")

    async def aclose(self) -> None:
        """Write what is left, if that goes quickly, and let go of the file. Idempotent."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        self._closing = True
        self._work.set()
        with anyio.move_on_after(DEFAULTS.cleanup_s, shield=True):  # bounded
            while self._pending and self._error is None:
                await self._news.wait()
            await lane.run(self._close)
        await self._pump.aclose(seconds=DEFAULTS.cleanup_s)
        lane.close()

    async def _run(self) -> None:
        lane = self._lane
        assert lane is not None  # `open` made it
        while True:
            while not self._pending:
                self._tell()
                if self._closing:
                    return
                self._work = anyio.Event()
                await self._work.wait()
            batch = self._pending[:]
            try:
                await lane.run(self._append, batch)
            except OSError as error:
                self._error, self._failed = error, self._written + len(batch)
                self._tell()
                if self._closing:
                    return
                if len(self._pending) == len(batch):
                    self._work = anyio.Event()
                    await self._work.wait()  # tried again with what comes next
            else:
                self._error = None
                self._written += len(batch)
                del self._pending[: len(batch)]

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    # -- on the lane -----------------------------------------------------------------------------

    def _open(self) -> list[RoundRecord]:
        if not self.path.parent.is_dir():
            raise Validation(f"record {self.path}: its folder does not exist")
        self._file = self._claimed()
        try:
            whole = self.path.read_bytes()
            cut = whole.rfind(b"\n") + 1  # behind it is what a crash left of a line
            found: dict[str, RoundRecord] = {}
            for number, line in enumerate(whole[:cut].splitlines(), start=1):
                record = self._read(line, number)
                found.pop(record.id, None)
                found[record.id] = record
            records = sorted(found.values(), key=lambda record: record.seq)[-KEPT:]
            self._last = {record.id: msgspec.json.encode(record) for record in records}
            self._rewrite()
        except BaseException:
            self._close()
            raise
        return records

    def _read(self, line: bytes, number: int) -> RoundRecord:
        try:
            return msgspec.json.decode(line, type=RoundRecord)
        except (msgspec.DecodeError, AiosyncError) as error:
            raise Validation(f"record {self.path}, line {number}: {error}") from error

    def _claimed(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink == 0:  # written anew meanwhile: it is another file now
                raise BlockingIOError
        except BlockingIOError:
            os.close(descriptor)
            raise Busy(f"record {self.path}: another gateway writes it") from None
        return descriptor

    def _append(self, batch: Sequence[tuple[str, bytes]]) -> None:
        for key, line in batch:
            self._last.pop(key, None)
            self._last[key] = line
        while len(self._last) > KEPT:
            del self._last[next(iter(self._last))]
        if self._lines + len(batch) > _GROWN:
            self._rewrite()
            return
        data = b"".join(line + b"\n" for _, line in batch)
        try:
            _write_all(self._file, data, self._size)
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):  # nobody may find there what nobody was promised
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        self._lines += len(batch)

    def _rewrite(self) -> None:
        """A new file takes the place of the old one, which is whole until then."""
        data = b"".join(line + b"\n" for line in self._last.values())
        fresh = self.path.with_name(f"{self.path.name}.new")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(descriptor, data, 0)
            os.fsync(descriptor)
            fresh.replace(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        before, self._file = self._file, descriptor
        os.close(before)
        self._size, self._lines = len(data), len(self._last)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __repr__(self) -> str:
        state = "closed" if self._lane is None else f"{self._lines} lines"
        return f"<RecordFile {self.path} {state}>"


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count
