"""A source whose pass a test can hold, end or break at any tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import nn

from aiosync import ParamMeta, WeightSource


class Paced(WeightSource):
    """Yields a module's parameters one by one; `before(index)` runs on the source's lane."""

    def __init__(self, module: nn.Module, before: Callable[[int], None] = lambda _: None) -> None:
        self.module = module
        self.before = before
        self.closed = 0
        self.passes = 0

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in self.module.named_parameters()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        try:
            for index, (name, parameter) in enumerate(self.module.named_parameters()):
                self.before(index)
                yield name, parameter
            self.before(len(self.metadata))
        finally:
            self.closed += 1


class Hold:
    """Holds a pass before tensor `at` until released; tells when it got there."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.reached = threading.Event()
        self.released = threading.Event()

    def __call__(self, index: int) -> None:
        if index == self.at and not self.released.is_set():
            self.reached.set()
            self.released.wait(30)
