"""Whether a module's tensors are where they were, without a step of Python for each.

In a round over a GPU's memory the copy takes some milliseconds, and walking tens of thousands of
tensors takes longer. A glance goes down the tree by the names it knows, some hundred modules at a
time: what is read of them is then in the processor's cache. It compares the submodules and the
names in them, the tensors' addresses, and, by torch's own guards, their dtypes, shapes, strides and
devices. It holds no module and no tensor. Where a module is not walked plainly, or torch has no
such guards, there is none.

A look can be taken in steps (`Looking`): the first tensors are on their way while the last ones are
not looked at yet.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate, chain, groupby, repeat
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

import torch
from torch import nn

from aiosync.few_collections import few_collections
from aiosync.module_walk import walks_plainly
from aiosync.short_turns import short_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# The first steps are short: what they see is on its way while the others are taken.
_RUN = (32, 256)  # modules, at first and later
_PART = (64, 768)  # tensors, of which a single module may have tens of thousands
_FIRST = 12  # steps; a tree's upper levels have one or two each, if they are no wider than that
FRESH_S = 0.02  # what was seen before a longer pause is looked at again
_DEEPEST = 900  # levels; a tree without an end has more
_Take: TypeAlias = "Callable[[Any], Any]"
_HELD: Callable[[Any], tuple[dict[str, Any], ...]]
_HELD = itemgetter("_parameters", "_buffers", "_modules")
_DICTS = frozenset({dict, OrderedDict})


@final
class Glance:
    """What `look` compares with; made by `of`.

    Attributes:
        addresses: Of the tensors that it returns.
        requires_grad: Whether one of the module's does; torch's guards see to it that it stays so.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.requires_grad = False
        self._levels: list[list[_Run]] = []
        self._classes: set[type] = set()
        found = self._descend(module)
        at = {name: position for position, name in enumerate(found)}
        self._order = [at[name] for name in names]
        self._is_ordered = self._order == list(range(len(names)))
        runs = list(chain.from_iterable(self._levels))
        parts = list(chain.from_iterable(run.parts for run in runs))
        addresses = list(chain.from_iterable(part.addresses for part in parts))
        self.addresses = [addresses[position] for position in self._order]
        furthest, looked_at = list(accumulate(self._order, max)), 0
        for part in parts:
            looked_at += len(part.addresses)
            part.known = bisect_left(furthest, looked_at)

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
            with few_collections:
                made = cls(module, names)
                seen = made.look(module)
        except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return None  # torch's guards are its own affair, and may change
        if seen is None or not all(map(is_, seen, map(tensors.__getitem__, names))):
            return None
        made.requires_grad = any(tensor.requires_grad for tensor in tensors.values())
        return made

    def look(self, module: nn.Module) -> list[torch.Tensor] | None:
        """The tensors of those names, if all of the module's are as and where they were."""
        looking = Looking(self, module)
        return looking.tensors(0, len(self.addresses)) if looking.ends_well() else None

    def walk(self, module: nn.Module, tensors: list[torch.Tensor]) -> Iterator[int]:
        """Look at a few, put them into the list, yield how many of those of `names` are there.

        Ends early where something is not as it was.
        """
        level: list[Any] = [module]
        known = 0
        for runs in self._levels:
            below: list[Any] = []
            start = 0
            for run in runs:
                modules = level[start : start + run.count]
                start += run.count
                is_known = self._classes.issuperset(map(type, modules))
                own = run.look(modules, below) if is_known else None
                if own is None:
                    return
                yield known
                for part in run.parts:
                    found = own[part.start : part.end]
                    if not part.are_same(found):
                        return
                    tensors += found
                    known = part.known
                    yield known
            level = below
        yield -1  # that was all

    def pick(self, seen: list[torch.Tensor], first: int, end: int) -> list[torch.Tensor]:
        """Of what was seen, in the order it was looked at, those of `names`."""
        if self._is_ordered:
            return seen[first:end]
        return list(map(seen.__getitem__, self._order[first:end]))

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
            for start, end in _graded(len(level), _RUN):
                prefixes, modules = zip(*level[start:end], strict=True)
                self._note_classes(modules)
                run = _Run(modules, len(names))
                names += [prefixes[of] + key for of, key in run.tensors]
                children: list[Any] = []
                run.look(modules, children)  # too few of them are an error below
                for (of, key), child in zip(run.children, children, strict=True):
                    below.append((f"{prefixes[of]}{key}.", child))
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
class Looking:
    """One look at a module, which goes as far as it is asked to; on one thread.

    Attributes:
        failed: Something is not as it was; what was seen before that is.
        is_whole: All was seen, and is as it was.
        known: How many of the tensors of those names were seen.
    """

    def __init__(self, glance: Glance, module: nn.Module) -> None:
        self._glance, self._module = glance, module
        self._begin()

    def _begin(self) -> None:
        self.failed = self.is_whole = False
        self._seen: list[torch.Tensor] = []
        self._steps = self._glance.walk(self._module, self._seen)
        self._paused = time.monotonic()
        self.known = 0

    def begins_well(self) -> bool:
        """Whether a first glance finds no change; it takes no longer than one may on a loop."""
        for _ in range(_FIRST):
            if not self.failed and not self.is_whole and not self.known:
                self._step()
        self._paused = time.monotonic()
        return not self.failed

    def goes_on(self) -> bool:
        """Look at a few more, from the beginning after a pause; whether there may be more."""
        if not self._is_fresh:
            self._begin()
        with short_turns:
            self._step()
        self._paused = time.monotonic()
        return not self.failed and not self.is_whole

    def renewed(self) -> Looking:
        """This look; or one from the beginning, if what it saw ahead was seen a while ago."""
        return self if self._is_fresh else Looking(self._glance, self._module)

    @property
    def _is_fresh(self) -> bool:
        return time.monotonic() - self._paused < FRESH_S

    def reaches(self, count: int) -> bool:
        """Whether the first `count` tensors are as and where they were."""
        if self.known < count:
            with short_turns:
                while self.known < count and not self.failed and not self.is_whole:
                    self._step()
        return self.known >= count

    def ends_well(self) -> bool:
        """Whether all of the module's tensors are."""
        if not self.is_whole:
            with short_turns:
                while not self.failed and not self.is_whole:
                    self._step()
        return self.is_whole

    def tensors(self, first: int, end: int) -> list[torch.Tensor]:
        """Some that were reached."""
        return self._glance.pick(self._seen, first, end)

    def _step(self) -> None:
        try:
            known = next(self._steps, None)
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError):
            known = None  # a name is gone, or stands for something else; perhaps at this moment
        if known is None:
            self.failed = True
        elif known < 0:
            self.is_whole = True
        else:
            self.known = known


@final
class _Run:
    """Neighbours on one level of the tree.

    Attributes:
        count: Of modules.
        tensors, children: Which of them has it, and under which key.
        parts: Of the tensors.
    """

    def __init__(self, modules: Sequence[Any], before: int) -> None:
        self.count = len(modules)
        held = _held(modules)
        *own, branches = self._shelves = [_Shelf(dicts) for dicts in held]
        self.tensors = [entry for shelf in own for entry in shelf.entries]
        self.children = branches.entries
        values: list[Any] = []
        for shelf, dicts in zip(own, held[:-1], strict=True):
            shelf.put(dicts, values)
        firsts = {id(value): at for at, value in reversed(list(enumerate(values)))}
        again = sorted(set(range(len(values))) - set(firsts.values()))
        self._again = _picker(again)
        self._as = _picker([firsts[id(values[at])] for at in again])
        self.parts = [
            _Part(values, start, end, set(firsts.values()))
            for start, end in _graded(len(values), _PART, before)
        ]

    def look(self, modules: Sequence[Any], below: list[Any]) -> Sequence[torch.Tensor] | None:
        """The tensors, if the modules hold what they held; adds the submodules to the list."""
        found: list[Any] = []
        into = (found, found, below)
        for shelf, dicts, values in zip(self._shelves, _held(modules), into, strict=True):
            if not shelf.put(dicts, values):
                return None
        if not all(map(is_, self._again(found), self._as(found))):
            return None
        return found


@final
class _Shelf:
    """What the modules of a run hold of one kind: neighbours with the same names at once, if the
    same of these stand for None.

    Attributes:
        entries: Which module has it, and under which key, in the order of `put`.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        if not _DICTS.issuperset(map(type, dicts)):
            raise ValueError("to take something out of another kind of dict may do more than that")
        self._counts = list(map(len, dicts))
        self._is_empty = not any(self._counts)
        self._stretches: list[tuple[slice, _Take | None, bool, list[_Take]]] = []
        self.entries: list[tuple[int, str]] = []
        start = 0
        for (keys, vacant), alike in groupby(map(_keys_of, dicts)):
            end = start + len(list(alike))
            if keys or vacant:
                take: _Take | None = itemgetter(*keys) if keys else None
                vacancies: list[_Take] = list(map(itemgetter, vacant))
                self._stretches.append((slice(start, end), take, len(keys) > 1, vacancies))
            self.entries += [(at, key) for at in range(start, end) for key in keys]
            start = end

    def put(self, dicts: Sequence[dict[str, Any]], values: list[Any]) -> bool:
        """Add what they hold but None; False: other counts, or something in the place of None.

        Raises:
            KeyError: One of other names.
        """
        if self._is_empty:
            return not any(dicts)
        if list(map(len, dicts)) != self._counts:
            return False
        for stretch, take, are_several, vacancies in self._stretches:
            some = dicts[stretch]
            if take is not None:
                taken = map(take, some)
                values += chain.from_iterable(taken) if are_several else taken
            for vacancy in vacancies:
                if not all(map(is_, map(vacancy, some), repeat(None))):
                    return False
        return True


@final
class _Part:
    """Some of a run's tensors, from `start` up to `end`.

    Attributes:
        addresses: Theirs.
        known: How many of a glance's names are seen with this part; set by it.
    """

    def __init__(
        self, values: Sequence[torch.Tensor], start: int, end: int, firsts: set[int]
    ) -> None:
        own = values[start:end]
        self.start, self.end = start, end
        self.addresses = list(map(torch.Tensor.data_ptr, own))
        self.known = 0
        # Torch's guards take no tensor twice.
        fresh = [at - start for at in range(start, self.end) if at in firsts]
        self._fresh = _picker(fresh)
        self._guards = _guards(self._fresh(own)) if fresh else None

    def are_same(self, found: Sequence[torch.Tensor]) -> bool:
        """Whether these are as and where they were."""
        if list(map(torch.Tensor.data_ptr, found)) != self.addresses:
            return False
        return self._guards is None or bool(self._guards.check(*self._fresh(found)))


def _held(modules: Sequence[Any]) -> tuple[tuple[dict[str, Any], ...], ...]:
    """The dicts of parameters of all of them, of buffers, and of submodules."""
    # Torch has no quick public form.
    return tuple(zip(*map(_HELD, map(vars, modules)), strict=True))


def _keys_of(held: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of something, and those of None."""
    there = tuple(key for key, value in held.items() if value is not None)
    return there, tuple(key for key, value in held.items() if value is None)


def _graded(count: int, sizes: tuple[int, int], before: int = 0) -> Iterator[tuple[int, int]]:
    """Where `count` are cut, of which there were `before`: as many as there were so far."""
    start = 0
    while start < count:
        end = min(start + min(max(before + start, sizes[0]), sizes[1]), count)
        yield start, end
        start = end


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes the entries at these places out of a list, all at once."""
    if places and list(places) == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
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
