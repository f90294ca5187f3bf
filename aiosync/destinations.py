"""Where announced tensors go: for each of them, tensors of the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiosync.errors import Coverage
from aiosync.module_layout import compact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiosync.glance import Glance, Looking
    from statemachines.tables import Weights


class Destinations(NamedTuple):
    """For each announced tensor, the model's tensors it is written to (none: it is skipped)."""

    writes: Sequence[Sequence[torch.Tensor]]
    ties: list[tuple[int, int]]
    """Announced tensors that end in one memory here: (first, later). They must agree."""
    left_out: list[str]
    """Names of the model that keep their values."""
    skipped: int
    """Announced tensors this model does not have."""


class Names:
    """A list of names for each position, nearly all of length one, which are kept as they are.

    A list object for each would be as much again for the garbage collector to walk.

    Attributes:
        more: The lists of other lengths, by position.
    """

    __slots__ = ("more", "single")

    def __init__(self, groups: Iterable[list[str]]) -> None:
        self.single: list[str] = []
        self.more: dict[int, list[str]] = {}
        for index, group in enumerate(groups):
            if len(group) != 1:
                self.more[index] = group
            self.single.append(group[0] if len(group) == 1 else "")

    @classmethod
    def of(cls, names: list[str]) -> Names:
        """One name for each position."""
        made = cls(())
        made.single = names
        return made

    def all(self) -> Iterable[str]:
        """Every name once."""
        yield from (n for i, n in enumerate(self.single) if i not in self.more)
        for group in self.more.values():
            yield from group


class Writes(Sequence[Sequence[torch.Tensor]]):
    """The tensors of `Names`, made ready for writing when they are asked for.

    Attributes:
        device: Where all of them are, if each position has one, and that one is plain, contiguous
            and not made in inference mode: then `plain` has them as they are. Else None.
        addresses: Where those are, if that is known.
        looking: The look at the model that finds them; None: all was looked at before.
    """

    __slots__ = ("_is_tracked", "_more", "_single", "addresses", "device", "looking")

    @property
    def are_single(self) -> bool:
        """Whether each position has exactly one."""
        return not self._more

    def __init__(
        self, names: Names, tensors: Mapping[str, torch.Tensor], device: torch.device | None
    ) -> None:
        self._single: list[Any] = list(map(tensors.get, names.single))
        self._more = {i: [tensors[name] for name in group] for i, group in names.more.items()}
        self.addresses: list[int] | None = None
        self.device = device
        self.looking: Looking | None = None
        self._is_tracked: bool | None = None

    @property
    def is_tracked(self) -> bool:
        """Whether autograd is told of what is written to addresses: one requires a gradient."""
        if self._is_tracked is None:
            tensors = chain(self._single, *self._more.values())
            self._is_tracked = any(
                tensor is not None and tensor.requires_grad for tensor in tensors
            )
        return self._is_tracked

    @classmethod
    def of(cls, glance: Glance, looking: Looking, device: torch.device | None) -> Writes:
        """One tensor for each position, as a look at the model finds them."""
        made = cls(Names(()), {}, device)
        made.addresses, made.looking = glance.addresses, looking
        made._is_tracked = glance.requires_grad
        return made

    @property
    def is_looked_at(self) -> bool:
        """Whether a look at the model is still under way."""
        return self.looking is not None and not self.looking.is_whole

    def are_seen(self, count: int | None = None) -> bool:
        """Whether the first `count`, or all and the model as a whole, are as they were.

        It goes on with the look; False for good once something is found that is not.
        """
        looking = self.looking
        if looking is None:
            return True
        if count is not None:
            return looking.reaches(count)
        return looking.ends_well()

    def __len__(self) -> int:
        return len(self._single) if self.looking is None else len(self.addresses or ())

    def __getitem__(self, index: Any) -> Any:
        if self.looking is not None:
            if not self.are_seen():
                raise moved()
            index = range(len(self))[index]  # raises: beyond the end
            return tuple(map(writable, self.looking.tensors(index, index + 1)))
        more = self._more.get(index)
        return tuple(map(writable, (self._single[index],) if more is None else more))

    def plain(self, first: int, end: int) -> list[torch.Tensor]:
        """Tensors from position `first` up to `end`; they may require gradients."""
        looking = self.looking
        if looking is None:
            return self._single[first:end]
        if not looking.reaches(end):
            raise moved()
        return looking.tensors(first, end)


def moved(weights: Weights | None = None, *, again: bool = False) -> Coverage:
    """What is said where tensors of a model are not what and where they were.

    Args:
        again: A round that begins anew would take the model as it is now: the trainer's does.
    """
    return Coverage(
        "tensors of the model were replaced, renamed or moved during the round",
        weights=weights,
        detail={"moved": True} if again else None,
    )


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as `write` takes it."""
    tensor = tensor.detach()
    return compact(tensor) if tensor.is_contiguous() else tensor
