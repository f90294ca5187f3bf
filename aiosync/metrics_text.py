"""A worker's state in Prometheus' text format; no library needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statemachines.tables import State, Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiosync.messages import PeerState

CONTENT_TYPE = "text/plain"


def metrics_of(peer: PeerState, *, streams: int) -> str:
    """What is known of the worker now, one sample a line."""
    lines = []
    for name, kind, text, samples in _families(peer, streams):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{label} {value:g}" for label, value in samples]
    return "\n".join(lines) + "\n"


def _families(
    peer: PeerState, streams: int
) -> Iterator[tuple[str, str, str, list[tuple[str, float]]]]:
    detail = peer.detail
    states = [(f'{{state="{state}"}}', float(state == peer.state)) for state in State]
    yield "aiosync_state", "gauge", "The engine's state is this one.", states
    weights = [(f'{{weights="{one}"}}', float(one == peer.weights)) for one in Weights]
    yield "aiosync_weights", "gauge", "The weights are this.", weights
    order = -1 if peer.version is None else peer.version.order
    yield "aiosync_version_order", "gauge", "Order of the version that serves.", [("", order)]
    yield "aiosync_round", "gauge", "Number of the last round.", [("", detail.get("round") or 0)]
    held = float(bool(detail.get("paused")))
    yield "aiosync_generation_paused", "gauge", "Whether generation stands still.", [("", held)]
    seconds = float(detail.get("seconds_paused") or 0.0)
    text = "Seconds that generation stood still."
    yield "aiosync_generation_paused_seconds_total", "counter", text, [("", seconds)]
    received = [("", detail.get("progress") or 0)]
    yield "aiosync_round_received_bytes", "gauge", "Bytes of the open round.", received
    yield "aiosync_event_streams", "gauge", "Readers of /events.", [("", streams)]
