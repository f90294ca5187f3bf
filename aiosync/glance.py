"""Whether a module's tensors are the very ones they were, without a step of Python for each.

In a round over a GPU's memory the copy takes some milliseconds, and walking tens of thousands of
tensors takes longer. A glance compares lists: the submodules and the names in them, the tensors'
identities and addresses, and, by torch's own guards, their dtypes, shapes, strides and devices. It
holds no tensor. Where a module is not walked plainly, or torch has no such guards, there is none.
"""

from __future__ import annotations

import weakref
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

import torch
from torch import nn

from aiosync.module_walk import walks_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
_HELD: tuple[Callable[[Any], dict[str, Any]], ...]
_HELD = (attrgetter("_parameters"), attrgetter("_buffers"), attrgetter("_modules"))


@final
class Glance:
    """What `look` compares with; made by `of`.

    Attributes:
        addresses: Of the tensors that it returns.
    """

    def __init__(self, module: nn.Module) -> None:
        self._refs = [weakref.ref(each) for each in _preorder(module)]
        state = self._state()
        if state is None:
            raise ValueError("no plain tree of modules")
        self._known, tensors = state[:3], state[3]
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        firsts = {id(tensor): at for at, tensor in reversed(list(enumerate(tensors)))}
        # Torch's guards take no tensor twice. None: there is none.
        self._firsts = None if len(firsts) == len(tensors) else sorted(firsts.values())
        self._guards = _guards(in_order(tensors, self._firsts))

    @classmethod
    def of(cls, module: Any, tensors: Mapping[str, torch.Tensor]) -> Self | None:
        """A glance at a module that holds these tensors, in this order; None: there is none."""
        if not isinstance(module, nn.Module):
            return None
        try:
            made = cls(module)
            seen = made.look()
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
            return None  # torch's guards are its own affair, and may change
        if seen is None or list(map(id, seen)) != list(map(id, tensors.values())):
            return None
        return made

    def look(self) -> list[torch.Tensor] | None:
        """All tensors, parameters first, if they are what and where they were; else None."""
        state = self._state()
        if state is None:
            return None
        tensors = state[3]
        if (
            state[:3] == self._known
            and list(map(torch.Tensor.data_ptr, tensors)) == self.addresses
            and self._guards.check(*in_order(tensors, self._firsts))
        ):
            return tensors
        return None

    def _state(self) -> tuple[list[int], list[str], list[int], list[torch.Tensor]] | None:
        """How many each module holds; names; identities of what is under them; the tensors."""
        modules = [ref() for ref in self._refs]
        if None in modules:
            return None
        # Mapped throughout: a step of Python for each module would be most of it.
        parameters, buffers, children = (list(map(held, modules)) for held in _HELD)
        counts = [*map(len, parameters), *map(len, buffers), *map(len, children)]
        below = [*filter(None, parameters), *filter(None, buffers)]
        tensors: list[Any] = list(chain.from_iterable(map(dict.values, below)))
        below += filter(None, children)
        keys = list(chain.from_iterable(below))
        ids = list(map(id, chain.from_iterable(map(dict.values, below))))
        if type(None) in set(map(type, tensors)):
            tensors = [tensor for tensor in tensors if tensor is not None]
        return counts, keys, ids, tensors


def _preorder(module: nn.Module) -> list[nn.Module]:
    if not walks_plainly(type(module)):  # type: ignore[arg-type] # a class is hashable
        raise ValueError(f"{type(module).__name__} walks in its own way")
    found = [module]
    for child in module._modules.values():  # noqa: SLF001 -- torch has no quick public form
        if child is not None:
            found += _preorder(child)
    return found


def _guards(tensors: list[torch.Tensor]) -> Any:
    from torch._C._dynamo import guards

    make: Any = guards.TensorGuards  # untyped
    return make(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


def places_in(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[int] | None:
    """Positions of `names` among those of `tensors`; None: they come first, in that order."""
    known = list(tensors)
    if known[: len(names)] == list(names):
        return None
    positions = {name: at for at, name in enumerate(known)}
    return [positions[name] for name in names]


def in_order(tensors: list[T], places: list[int] | None) -> list[T]:
    """The tensors that `places_in` spoke of; perhaps more behind them where it is None."""
    return tensors if places is None else [tensors[at] for at in places]
