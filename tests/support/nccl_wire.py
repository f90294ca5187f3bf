"""vLLM's dense NCCL wire, written from its description alone: plain bytes, no torch, no aiosync.

    python tests/support/nccl_wire.py > tests/fixtures/nccl_wire.json

makes the committed fixture: for each case the broadcasts, one after the other, as type, number of
elements, and SHA-256 of the bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys

ITEMSIZE = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4,
    "int64": 8, "float8_e4m3fn": 1, "bool": 1, "int16": 2, "complex64": 8,
}  # fmt: skip
# NCCL's numbers of types; the rest has none on the unpacked wire.
NCCL_TYPE = {
    "int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8,
    "bfloat16": 9, "float8_e4m3fn": 10,
}  # fmt: skip

DENSE = [
    ("embed", "bfloat16", (40, 8)),
    ("layers.0.scale", "float32", (3,)),
    ("layers.0.w", "bfloat16", (17, 4)),
    ("layers.0.empty", "bfloat16", (0, 4)),
    ("layers.0.scalar", "float32", ()),
    ("layers.1.big", "float16", (33, 16)),
    ("layers.1.bytes", "int8", (7,)),
    ("layers.1.fp8", "float8_e4m3fn", (9, 3)),
    ("head", "int64", (5,)),
]
CASES = {
    "one chunk": (DENSE, True, 1 << 20),
    "exactly at the limit": ([("a", "uint8", (64,)), ("b", "uint8", (64,))], True, 128),
    "one over the limit": ([("a", "uint8", (64,)), ("b", "uint8", (65,)), ("c", "uint8", (1,))],
                           True, 128),
    "a tensor above the limit": (DENSE, True, 300),
    "every tensor above the limit": (DENSE, True, 1),
    "unpacked": ([t for t in DENSE if t[1] in NCCL_TYPE], False, 1 << 20),
}  # fmt: skip


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * ITEMSIZE[dtype]


def content(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The tensor's bytes, row-major, the same on every machine."""
    return random.Random(name).randbytes(nbytes(dtype, shape))


def packed(tensors: list, limit: int) -> list[list]:
    """Broadcasts of the packed wire: ``[[names of a chunk, its bytes], ...]``."""
    chunks, names, running = [], [], b""
    for name, dtype, shape in tensors:
        names.append(name)
        running += content(name, dtype, shape)
        if len(running) > limit:
            chunks.append([names, running])
            names, running = [], b""
    if running:
        chunks.append([names, running])
    return chunks


def broadcasts(tensors: list, is_packed: bool, limit: int) -> list[list]:
    """``[[number of NCCL's type, elements, bytes], ...]``; those without bytes never show."""
    if is_packed:
        return [[NCCL_TYPE["uint8"], len(data), data] for _, data in packed(tensors, limit)]
    found = []
    for name, dtype, shape in tensors:
        data = content(name, dtype, shape)
        if data:
            found.append([NCCL_TYPE[dtype], len(data) // ITEMSIZE[dtype], data])
    return found


def fixture() -> dict:
    return {
        name: {
            "packed": is_packed,
            "limit": limit,
            "tensors": [[n, d, list(s)] for n, d, s in tensors],
            "broadcasts": [
                [kind, count, hashlib.sha256(data).hexdigest()]
                for kind, count, data in broadcasts(tensors, is_packed, limit)
            ],
        }
        for name, (tensors, is_packed, limit) in CASES.items()
    }


if __name__ == "__main__":
    json.dump(fixture(), sys.stdout, indent=1)
    sys.stdout.write("\n")
