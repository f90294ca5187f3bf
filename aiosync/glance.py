"""Whether a module's tensors are where they were, without a step of Python for each.

In a round over a GPU's memory the copy takes some milliseconds, and walking tens of thousands of
tensors takes longer. A glance goes down the tree by the names it knows, some hundred modules at a
time: what is read of them is then in the processor's cache, and the interpreter's other threads
have their turn in between. It compares the submodules and the names in them, the tensors'
addresses, and, by torch's own guards, their dtypes, shapes, strides and devices. It holds no module
and no tensor. Where a module is not walked plainly, or torch has no such guards, there is none.
"""

from __future__ import annotations

from itertools import chain, repeat
from operator import getitem, is_, itemgetter
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import nn

from aiosync.module_walk import walks_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_RUN = 256  # modules
_DEEPEST = 900  # levels; a tree without an end has more
_HELD: Callable[[Any], tuple[dict[str, Any], ...]]
_HELD = itemgetter("_parameters", "_buffers", "_modules")
_OF_MODULES = 2  # of these three


@final
class Glance:
    """What `look` compares with; made by `of`.

    Attributes:
        addresses: Of the tensors that it returns.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._levels: list[list[_Run]] = []
        self._classes: set[type] = set()
        found = self._descend(module)
        at = {name: position for position, name in enumerate(found)}
        self._chosen = _picker([at[name] for name in names])
        addresses = chain.from_iterable(run.addresses for level in self._levels for run in level)
        self.addresses = list(self._chosen(list(addresses)))

    @classmethod
    def of(
        cls, module: Any, tensors: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> Self | None:
        """A glance at those of these names in a module that has these tensors; None: there is none.

        Args:
            module: What is looked at.
            tensors: All that it has, as they are now.
            names: Those that `look` returns.
        """
        if not isinstance(module, nn.Module):
            return None
        try:
            made = cls(module, names)
            seen = made.look(module)
        except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return None  # torch's guards are its own affair, and may change
        if seen is None or not all(map(is_, seen, map(tensors.__getitem__, names))):
            return None
        return made

    def look(self, module: nn.Module) -> list[torch.Tensor] | None:
        """The tensors of those names, if all of the module's are as and where they were."""
        tensors: list[torch.Tensor] = []
        level: list[Any] = [module]
        try:
            for runs in self._levels:
                below: list[Any] = []
                start = 0
                for run in runs:
                    modules = level[start : start + run.count]
                    start += run.count
                    is_known = self._classes.issuperset(map(type, modules))
                    if not is_known or not run.look(modules, tensors, below):
                        return None
                level = below
        except (KeyError, TypeError, RuntimeError):
            return None  # a name is gone, or it stands for something else
        return list(self._chosen(tensors))

    def _descend(self, module: nn.Module) -> list[str]:
        """Take note of the whole tree; the names of its tensors, in the order they are looked at.

        A module that is in several places is looked at in each of them, as its names are.
        """
        names: list[str] = []
        level = [("", module)]
        while level:
            if len(self._levels) == _DEEPEST:
                raise ValueError("this tree has no end")
            runs, below = [], []
            for start in range(0, len(level), _RUN):
                prefixes, modules = zip(*level[start : start + _RUN], strict=True)
                self._note_classes(modules)
                run = _Run(modules)
                names += [prefixes[of] + key for of, key in run.tensors]
                children = run.children(modules)
                below += [(f"{prefixes[of]}{key}.", each) for of, key, each in children]
                runs.append(run)
            self._levels.append(runs)
            level = below
        return names

    def _note_classes(self, modules: Sequence[nn.Module]) -> None:
        kinds = set(map(type, modules))
        for kind in kinds - self._classes:
            if not walks_plainly(kind):
                raise ValueError(f"{kind.__name__} walks in its own way")
        self._classes |= kinds


@final
class _Run:
    """Neighbours on one level of the tree.

    Attributes:
        count: Of modules.
        tensors: Which of them has it, and under which key.
        addresses: Theirs.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.count = len(modules)
        held = _held(modules)
        entries = [
            (at, key, value) for at, content in enumerate(held) for key, value in content.items()
        ]
        there = [entry for entry in entries if entry[2] is not None]
        tensors = [entry for entry in there if entry[0] % 3 != _OF_MODULES]
        self._children = [entry[:2] for entry in there if entry[0] % 3 == _OF_MODULES]
        vacant = [entry[:2] for entry in entries if entry[2] is None]
        self.tensors = [(at // 3, key) for at, key, _ in tensors]
        wanted = [*(entry[:2] for entry in tensors), *self._children, *vacant]
        self._keys = [key for _, key in wanted]
        self._of = _picker([at for at, _ in wanted])
        values = [value for _, _, value in tensors]
        self.addresses = list(map(torch.Tensor.data_ptr, values))
        # Torch's guards take no tensor twice.
        firsts = {id(value): at for at, value in reversed(list(enumerate(values)))}
        self._firsts = _picker(sorted(firsts.values()))
        self._guards = _guards(self._firsts(values)) if values else None
        again = sorted(set(range(len(values))) - set(firsts.values()))
        self._again = _picker(again)
        self._as = _picker([firsts[id(values[at])] for at in again])

    def children(self, modules: Sequence[nn.Module]) -> list[tuple[int, str, Any]]:
        """Which of the modules has it, under which key, and the submodule."""
        held = _held(modules)
        return [(at // 3, key, held[at][key]) for at, key in self._children]

    def look(self, modules: list[Any], tensors: list[torch.Tensor], below: list[Any]) -> bool:
        """Whether all is as it was; adds what it found to the two lists."""
        held = _held(modules)
        # With as many entries as there were, and each of the known ones there, none is new.
        if sum(map(len, held)) != len(self._keys):
            return False
        values = list(map(getitem, self._of(held), self._keys))
        end = len(self.addresses)
        found, last = values[:end], end + len(self._children)
        if list(map(torch.Tensor.data_ptr, found)) != self.addresses:
            return False
        if self._guards is not None and not self._guards.check(*self._firsts(found)):
            return False
        if not all(map(is_, self._again(found), self._as(found))):
            return False
        tensors += found
        below += values[end:last]
        return all(map(is_, values[last:], repeat(None)))


def _held(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Parameters, buffers and submodules of the first, then of the next."""
    # Torch has no quick public form.
    return list(chain.from_iterable(map(_HELD, map(vars, modules))))


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes the entries at these places out of a list, all at once."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda entries: [entries[at] for at in places]


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    from torch._C._dynamo import guards

    make: Any = guards.TensorGuards  # untyped
    return make(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
