"""A process whose memory others read, one JSON object a line.

``{"lend": [sizes]}`` answers with the addresses of pieces of such sizes, each of which ends right
before a page that nobody may read; byte `k` of piece `i` is ``(i + 3 * k) % 251``. ``{"unmap": i}``
gives a piece's memory back.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def lend(number, nbytes):
    room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    flags, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    start = LIBC.mmap(None, room + mmap.PAGESIZE, access, flags, -1, 0)
    LIBC.mprotect(start + room, mmap.PAGESIZE, 0)
    ctypes.memmove(
        start + room - nbytes, bytes((number + 3 * k) % 251 for k in range(nbytes)), nbytes
    )
    return start, room, start + room - nbytes


def main():
    mark = ctypes.create_string_buffer(b"the mark", 8)
    print(json.dumps({"pid": os.getpid(), "mark": ctypes.addressof(mark)}), flush=True)
    pieces = []
    for line in sys.stdin:
        command = json.loads(line)
        if "lend" in command:
            pieces = [lend(number, nbytes) for number, nbytes in enumerate(command["lend"])]
        else:
            start, room, _ = pieces[command["unmap"]]
            assert LIBC.munmap(start, room) == 0
        print(json.dumps([address for _, _, address in pieces]), flush=True)


main()
