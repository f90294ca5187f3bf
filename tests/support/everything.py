"""A source of every dtype and layout, on any device."""

from __future__ import annotations

from functools import cached_property

import torch

from aiosync import ParamMeta, WeightSource

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


class Everything(WeightSource):
    """Each dtype as a scalar, empty, odd and larger; strided, expanded; all bit patterns."""

    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(5)
        self.tensors = {}
        for shape in [(), (0, 7), (7,), (3, 5), (50, 101)]:
            for dtype in DTYPES:
                count = torch.Size(shape).numel() * dtype.itemsize
                top = 2 if dtype == torch.bool else 256  # other bits are no bool
                raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
                name = f"{dtype}.{'x'.join(map(str, shape))}"
                self.tensors[name] = raw.to(device).view(dtype).view(shape)
        whole = torch.arange(120.0, device=device)
        self.tensors["turned"] = whole.view(10, 12).t()
        self.tensors["strided"] = whole[::3]
        self.tensors["expanded"] = torch.arange(5.0, device=device)[:, None].expand(5, 4)
        self.tensors["column"] = whole.view(10, 12)[:, 4]
        self.tensors["conjugated"] = torch.randn(4, 3, dtype=torch.complex64, device=device).conj()

    @cached_property
    def metadata(self):
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self):
        yield from self.tensors.items()


def empty() -> dict[str, torch.Tensor]:
    """A model for all of it."""
    shapes = {name: (t.shape, t.dtype) for name, t in Everything().tensors.items()}
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
