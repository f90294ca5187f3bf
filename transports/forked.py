"""What a forked child must not keep open.

A child that `fork` makes (a DataLoader's worker, ``multiprocessing`` on Linux before 3.14) gets a
copy of every descriptor. A connection that its parent closes then stays open: the peer sees no end
of file, and a port of a dead server still takes connections, for as long as the child lives. So
the child lets go of them, first thing.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class Owner(Protocol):
    def descriptors(self) -> Iterable[int]:
        """What is open now; called in the child, so it must take no lock."""


_OWNERS: weakref.WeakSet[Owner] = weakref.WeakSet()


def keep_from_children(owner: Owner) -> None:
    """Have forked children let go of what `owner`, as long as it lives, has open."""
    _OWNERS.add(owner)


def _let_go() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for owner in list(_OWNERS):
        for descriptor in owner.descriptors():
            if descriptor >= 0:
                # The number stays taken: the child's copy of the owner may close it once more.
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _OWNERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
