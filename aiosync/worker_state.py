"""What a worker says of itself in every reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.generation_table import GateState
from aiosync.messages import PROTOCOL, STARTS, PeerState
from aiosync.sinks import sink_name
from aiosync.staging import SHARED, shares
from transports.digest import available as available_digests

if TYPE_CHECKING:
    from aiosync.worker import WeightTransferEngine

FEATURES = (
    "prepare",
    "abort",
    "status",
    "lease",
    "versions",
    "events",
    "pause",
    "targets",
    "tickets",
)


def describe(engine: WeightTransferEngine[Any, Any]) -> PeerState:
    """State, weights, versions and abilities of `engine` as they are now."""
    ownership, gate = engine.cycle.ownership, engine.generation
    outcome = ownership.outcome
    features = list(FEATURES)
    if engine.supports_draft_weight_update and engine.draft_model is not None:
        features.append("draft")
    if engine.one_update:
        features.append("one_update")
    if engine.sends_copies:
        features.append("copies")
    if engine.supports_adapters:
        features.append("adapters")
    if engine.cycle.starts_quickly:
        features.append(STARTS)
    state = PeerState(
        protocol=PROTOCOL,
        incarnation=engine.incarnation,
        epoch=ownership.epoch,
        state=engine.state.value,
        weights=engine.weights.value,
        version=engine.version,
        versions=dict(engine.target_versions),
        owner=ownership.owner,
        features=features,
        digests=list(available_digests()) if engine.verifies else [],
        lease_s=getattr(engine.config, "lease_s", None),
        detail={
            "seq": engine.machine.seq,
            "paused": gate.state is not GateState.RUNNING,
            "held_by": [str(hold) for hold in gate.holds],
            "seconds_paused": gate.seconds_paused,
            "paused_before": engine.cycle.paused_before,
            "weights_id": gate.weights.weights_id,
            "target": engine.cycle.aim.key,
            "asked": [] if engine.cycle.session is None else engine.cycle.session.asked,
            "allowed": list(engine.machine.allowed()),
            "round": ownership.last_round,
            "settled": ownership.settled,
            "outcome": None if outcome is None else f"{type(outcome).__name__}: {outcome}",
            "progress": engine.received_bytes(),
            "backend": getattr(engine.config, "backend", None),
            "sink": sink_name(engine.config),
            "writes_early": engine.writes_early,
        },
    )
    if shares(engine.config):
        state.detail["staging"] = SHARED
    return state
