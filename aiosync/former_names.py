"""Names of vLLM's earlier weight transfer code and of its relatives, with what to call instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

_SEND: Final = "await engine.send_weights(version=...) on the trainer"
_INIT: Final = "await Engine.trainer_init(init_info, client=..., source=...), or aiosync.connect"

INSTEAD: Final = {
    "close_communicator": "await engine.shutdown()",
    "init_communicator": _INIT,
    "init_weight_transfer": _INIT,
    "init_weight_update_group": _INIT,
    "init_weights_update_group": _INIT,
    "send_weights_async": "await engine.send_weights(version=...), or engine.begin_update(...)",
    "sync_weights": _SEND,
    "trainer_send_weights": "await engine.send_weights(version=...), or the one in aiosync.legacy",
    "update_named_param": _SEND,
    "update_weight": _SEND,
    "update_weights_async": _SEND,
    "update_weights_from_distributed": _SEND,
    "update_weights_from_ipc_handles": _SEND,
    "update_weights_from_tensor": _SEND,
}


def unknown(owner: str, name: str) -> AttributeError:
    """The error for a name that `owner` does not have, with advice where the name is known."""
    if name in INSTEAD:
        return AttributeError(f"{owner} has no {name!r}: use {INSTEAD[name]}")
    return AttributeError(f"{owner} has no attribute {name!r}")


class KnowsFormerNames:
    """Says what to call instead; type checkers just see an unknown attribute."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in INSTEAD:
                raise unknown(type(self).__name__, name)
            # Again, for the error it ended with: it may come from within a property.
            return object.__getattribute__(self, name)
