"""Whether somebody wrote to the tensors that a round was reading.

An optimizer that steps in the middle of a round makes a mixture of two versions, which arrives as
it was sent. torch counts the in-place writes to each tensor; what a pass reads is counted when the
pass begins, and again when the workers have it all. Writes through ``.data``, through another
tensor of the same storage, and by torch's fused optimizers are not counted, so they stay unseen.

Of thousands of tensors only some are asked, evenly spread: a step writes to all that it trains, and
asking tens of thousands would take as long as copying them.

Only a module's own tensors are compared, and only where the pass is known to read them: a source
with a session or methods of its own may write to what it yields, and a DTensor's count says little.
"""

from __future__ import annotations

from itertools import compress
from operator import attrgetter, ne
from typing import TYPE_CHECKING, Any, Self, final

from aiosync.errors import Validation
from aiosync.module_walk import PLAIN_TYPES
from aiosync.sources import ModuleSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from aiosync.feed import SourceFeed

_COUNT = attrgetter("_version")  # torch has no other public form
_MOST = 1024
"""How many tensors are asked, about: half a millisecond's worth."""
_AHEAD = 64
"""How many of those that are not read yet, when a pass begins."""


@final
class Reading:
    """The tensors of one pass, and how often each had been written to before it read them.

    Attributes:
        grows: They are not known beforehand: `note` is told of them.
    """

    def __init__(
        self, count: int, names: Callable[[], list[str]], tensors: Sequence[torch.Tensor] | None
    ) -> None:
        self.grows = tensors is None
        self._step = -(-count // _MOST) or 1
        self._names = names
        self._seen = 0
        self._tensors: list[torch.Tensor] = []
        self._counts: list[int] = []
        self._ahead: Sequence[torch.Tensor] = ()
        self._ahead_step = -(-count // _AHEAD) or 1
        self._ahead_counts: list[int] = []
        self.note(tensors or ())

    @classmethod
    def of(cls, feed: SourceFeed, *, late: bool = False) -> Self | None:
        """What a pass over `feed` would read, on the thread that runs the source; may be None.

        Args:
            late: Nothing is read before `note` is told of it, and some are counted before that.
        """
        if feed.plain is not None or feed.looking is not None:
            metadata = feed.metadata
            known = None if late else feed.plain
            made = cls(len(metadata), lambda: [meta.name for meta in metadata], known)
            if late:
                made._note_ahead(feed.plain or ())
            return made
        if not isinstance(feed.source, ModuleSource):
            return None
        read = {
            name: tensor
            for name, tensor in feed.source.read().items()
            if type(tensor) in PLAIN_TYPES
        }
        return cls(len(read), lambda: list(read), list(read.values())) if read else None

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """The pass is about to read these, the next ones in order."""
        some = tensors[-self._seen % self._step :: self._step]
        self._seen += len(tensors)
        self._tensors += some
        self._counts += _counts(some)

    def _note_ahead(self, tensors: Sequence[torch.Tensor]) -> None:
        """The pass will read these, after what a device was told to write to them before now.

        What it is told to write from now on may come before or after that.
        """
        self._ahead = tensors[:: self._ahead_step]
        self._ahead_counts = _counts(self._ahead)

    def check(self, *, rank: int) -> None:
        """Call it once the pass is over and nothing is read any more.

        Raises:
            Validation: A tensor was written to meanwhile; the first is named.
        """
        now, ahead = _counts(self._tensors), _counts(self._ahead)
        if now == self._counts and ahead == self._ahead_counts:
            return
        names = self._names()
        written = list(compress(names[:: self._step], map(ne, now, self._counts)))
        if not written:
            written = list(compress(names[:: self._ahead_step], map(ne, ahead, self._ahead_counts)))
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        raise Validation(
            f"{written[0]}{more} changed while the round was reading: the workers would have got a"
            " mixture of two versions",
            tensor=written[0],
            rank=rank,
            phase="update",
            next_step="step the optimizer after `await update.released`, or after `send_weights`",
        )


def _counts(tensors: Sequence[Any]) -> list[int]:
    try:
        return list(map(_COUNT, tensors))
    except RuntimeError:  # made in inference mode, where nothing is counted
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # noqa: SLF001
