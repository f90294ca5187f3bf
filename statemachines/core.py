"""The `transitions` library behind one narrow door.

Only the synchronous machine is used, over a private model and without callbacks. Its async class
reports cancelled work as done, and its queue, exception and finalize hooks swallow errors.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, final

from transitions import Machine

if TYPE_CHECKING:
    from statemachines.tables import Table

# At INFO the library's own lines cost more than the flip, and say less than the hub's one.
logging.getLogger("transitions").setLevel(logging.WARNING)


class _Record(Protocol):
    def __call__(self, trigger: str, source: str, dest: str, facts: dict[str, Any]) -> None: ...


class _Model:
    """Holds the state, so that the library binds nothing to a class of ours."""

    def __init__(self, state: str) -> None:
        self.state = state


@final
class Core:
    """A table, a state, and what is told of each flip, inside of it."""

    __slots__ = ("_machine", "_model", "_record")

    def __init__(self, table: Table, record: _Record) -> None:
        self._record = record
        # Plain strings: of an enum, the library takes the member's name, not its value.
        self._model = _Model(str(table.initial))
        self._machine = Machine(
            model=None,
            states=[str(state) for state in table.states],
            initial=str(table.initial),
            transitions=[
                {
                    "trigger": str(rule.trigger),
                    "source": [str(source) for source in rule.sources],
                    "dest": str(rule.dest),
                }
                for rule in table.rules
            ],
            auto_transitions=False,
            queued=False,
        )

    @property
    def state(self) -> str:
        return self._model.state

    def flip(self, trigger: str, facts: dict[str, Any]) -> bool:
        """Whether `trigger` was legal; if not, nothing has changed.

        Not by the library's own trigger: it goes through nine lists of callbacks, all of them
        empty here, which costs more than all else that a flip does.
        """
        event = self._machine.events.get(trigger)
        source = self._model.state
        legal = None if event is None else event.transitions.get(source)
        if not legal:
            return False
        dest = legal[0].dest
        assert dest is not None  # no rule is without
        self._model.state = dest
        self._record(str(trigger), source, dest, facts)
        return True
