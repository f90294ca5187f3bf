"""The sinks of one worker engine: one for each model that its rounds write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.sinks import build_sink

if TYPE_CHECKING:
    from aiosync.sinks import Sink
    from aiosync.worker_cycle import WorkerCycle


class Sinks:
    """Made when they are first needed, and kept; part of every worker engine."""

    config: Any
    device: Any
    model: Any
    cycle: WorkerCycle
    landing_device: str | None = None
    """Where the backend's bytes arrive; None: on the engine's own device."""
    _default_model: Any

    def begin_sinks(self) -> None:
        """There is none yet; called once, by the constructor."""
        self._sinks: dict[int, Sink] = {}

    @property
    def sink(self) -> Sink:
        """Where the open round's tensors go; asking for it makes the round use it."""
        sink = self.know_sink()
        if self.cycle.calls is not None:
            sink.attach(self.cycle.calls)
        self.cycle.sink = sink
        return sink

    @property
    def has_sink(self) -> bool:
        """Whether the model's sink is made already."""
        return id(self.model) in self._sinks

    def know_sink(self) -> Sink:
        """The model's sink, made if there is none yet; does not make the round use it."""
        model = self.model  # a round that begins meanwhile may aim at another one
        sink = self._sinks.get(id(model))
        if sink is None:
            is_own = model is self._default_model
            device = self.landing_device or self.device
            made = build_sink(self.config, model, device, is_own=is_own)
            sink = self._sinks.setdefault(id(model), made)
        return sink

    def known_sinks(self) -> list[Sink]:
        """Those that were made so far."""
        return list(self._sinks.values())

    def drop_sinks(self) -> None:
        """Make new sinks for later rounds; between rounds only."""
        for sink in self._sinks.values():
            for task in sink.left.running:  # they may still reach what a new sink hands on to
                self.cycle.left.add(task)
            sink.release()
        self._sinks.clear()
