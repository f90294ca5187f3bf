"""State machines for async engines: legal by table, flipped in one step, watched from outside."""

from statemachines.diagrams import mermaid, table_markdown
from statemachines.errors import (
    AiosyncError,
    GateRejected,
    InvalidTransition,
    LocalError,
    ReentrantTransition,
    RemoteError,
    Validation,
    WrongThread,
)
from statemachines.events import Facts, Transition
from statemachines.gates import GATED, Check, GateContext
from statemachines.hub import (
    Hook,
    HookStatistics,
    HubStatistics,
    TransitionHub,
)
from statemachines.machine import StateMachine
from statemachines.subscription import Subscription
from statemachines.tables import (
    ENGINE,
    LEGAL_PAIRS,
    Rule,
    State,
    Table,
    Trigger,
    Weights,
    is_legal_pair,
)

__all__ = [
    "ENGINE",
    "GATED",
    "LEGAL_PAIRS",
    "AiosyncError",
    "Check",
    "Facts",
    "GateContext",
    "GateRejected",
    "Hook",
    "HookStatistics",
    "HubStatistics",
    "InvalidTransition",
    "LocalError",
    "ReentrantTransition",
    "RemoteError",
    "Rule",
    "State",
    "StateMachine",
    "Subscription",
    "Table",
    "Transition",
    "TransitionHub",
    "Trigger",
    "Validation",
    "Weights",
    "WrongThread",
    "is_legal_pair",
    "mermaid",
    "table_markdown",
]
