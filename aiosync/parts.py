"""Members behind one server: a gateway whose policy lets a round go on without some of them.

To the trainer's control plane the gateway is one worker. Its data plane has a reader for each
member, and may go on without one exactly where the gateway may. So every answer of such a gateway
says who takes part (``detail["parts"]``) and how many must stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiosync.members import MemberLink

KEY: Final = "parts"
_BEHIND: Final = "left_behind"


class PartsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway says of the members that take part.

    Attributes:
        readers: By member, the endings of its readers' names, and how many readers each stands for.
        needed: How many members must stay.
    """

    readers: dict[str, dict[str, int]]
    needed: int


def facts(info: PartsInfo, behind: Iterable[str]) -> dict[str, Any]:
    """What a gateway adds to its ``detail``: who takes part, and who was left behind last."""
    return {KEY: msgspec.to_builtins(info), _BEHIND: sorted(behind)}


def left_behind(links: Iterable[MemberLink]) -> list[str]:
    """Members behind these servers that the last round went on without, as they say."""
    found = []
    for link in links:
        said = None if link.peer is None else link.peer.detail.get(_BEHIND)
        names = said if isinstance(said, list) else []
        found += [f"{link.name}/{name}" for name in names if isinstance(name, str)]
    return found


@final
class Parts:
    """The members behind one link, in one round; without any, where it is an ordinary worker."""

    def __init__(self, link: MemberLink) -> None:
        self._link = link
        self._lost: set[str] = set()

    @property
    def _info(self) -> PartsInfo | None:
        peer = self._link.peer
        said = None if peer is None else peer.detail.get(KEY)
        if said is None:
            return None
        try:
            return msgspec.convert(said, PartsInfo)
        except msgspec.ValidationError:
            return None  # not one of ours: all of it is needed

    @property
    def known(self) -> bool:
        """Whether the round may go on without some of its members."""
        return self._info is not None

    @property
    def pace(self) -> int:
        """How many of its readers must be through before the others count as slow."""
        info = self._info
        if info is None:
            return 1
        present = len(info.readers.keys() - self._lost)
        return max(info.needed, -(-present // 2), 1)

    def lose(self, reader: str) -> bool:
        """Go on without the member of `reader`; False: too few would be left."""
        info, name = self._info, self._member_of(reader)
        if info is None or name is None:
            return info is not None  # the gateway has struck it by itself
        if name not in self._lost and len(info.readers.keys() - self._lost) - 1 < info.needed:
            return False
        self._lost.add(name)
        return True

    def is_out(self, reader: str) -> bool:
        """Whether its member was struck here, or by the gateway."""
        name = self._member_of(reader)
        return self.known and (name is None or name in self._lost)

    def missing(self, present: Sequence[str]) -> list[str]:
        """Readers that are counted on beside those that are `present`."""
        info, found = self._info, []
        for name, readers in () if info is None else info.readers.items():
            if name not in self._lost:
                for ending, count in readers.items():
                    reader = f"{self._link.name}/{ending}"
                    if sum(_is_of(each, reader) for each in present) < count:
                        found.append(reader)
        return found

    def _member_of(self, reader: str) -> str | None:
        info = self._info
        for name, readers in () if info is None else info.readers.items():
            if any(_is_of(reader, f"{self._link.name}/{ending}") for ending in readers):
                return name
        return None


def _is_of(reader: str, name: str) -> bool:
    return reader == name or reader.startswith(f"{name}/")
