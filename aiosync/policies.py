"""Commit policies: how many members must hold a version for its round to count."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiosync.errors import Validation

if TYPE_CHECKING:
    from typing import TypeAlias

_QUORUM = re.compile(r"quorum\((\d{1,9})\)")
_TEXTS = "'all', 'quorum(k)' or 'best_effort'"


class All(msgspec.Struct, frozen=True):
    """Every member commits, or none does."""

    def needed(self, members: int) -> int:
        """How many of `members` must commit."""
        return members

    def __str__(self) -> str:
        return "all"


class Quorum(msgspec.Struct, frozen=True):
    """At least `k` members commit, or none does; the rest is left behind.

    Raises:
        Validation: `k` is no int above 0.
    """

    k: int

    def __post_init__(self) -> None:
        k: Any = self.k
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise Validation(f"a quorum must be an int of at least 1, not {k!r}")

    def needed(self, members: int) -> int:
        """How many of `members` must commit: `k`, however few there are."""
        del members
        return self.k

    def __str__(self) -> str:
        return f"quorum({self.k})"


class BestEffort(msgspec.Struct, frozen=True):
    """Whoever can, commits; one is enough."""

    def needed(self, members: int) -> int:
        """How many of `members` must commit: one."""
        del members
        return 1

    def __str__(self) -> str:
        return "best_effort"


if TYPE_CHECKING:
    Policy: TypeAlias = All | Quorum | BestEffort
ALL: Final = All()


def policy_of(policy: str | Policy) -> Policy:
    """The policy that a text names, or the policy itself.

    Raises:
        Validation: It is neither.
    """
    if isinstance(policy, All | Quorum | BestEffort):
        return policy
    if policy == "all":
        return ALL
    if policy == "best_effort":
        return BestEffort()
    text: Any = policy
    found = _QUORUM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise Validation(f"policy must be {_TEXTS}, not {policy!r}")
    return Quorum(int(found[1]))
