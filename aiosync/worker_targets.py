"""What a worker's rounds update, and which version each of it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from aiosync.errors import Refused, Validation
from aiosync.generation_table import WeightsTag
from aiosync.weight_targets import MODEL, Draft, Model

if TYPE_CHECKING:
    from aiosync.generation import GenerationGate
    from aiosync.version import Version
    from aiosync.weight_targets import Target


class Targets:
    """The model, its draft and its adapters; part of every worker engine."""

    supports_draft_weight_update: ClassVar[bool] = True
    supports_adapters: ClassVar[bool] = False

    uses_sink: ClassVar[bool]
    name: str
    config: Any
    model: Any
    model_config: Any
    generation: GenerationGate
    version: Version | None

    def begin_targets(self) -> None:
        """The model as it was given is the default; called once, by the constructor."""
        self._default_model = self.model
        self._default_model_config = self.model_config
        self.draft_model: Any = None
        self.draft_model_config: Any = None
        self.target_versions: dict[str, Version] = {}
        self.unlabelled = False
        """Whether the model's last commit carried no version."""

    @property
    def lacks_model(self) -> bool:
        """Whether there is nothing yet that a round could fill."""
        is_ours = self.uses_sink and isinstance(getattr(self.config, "sink", "staged"), str)
        return is_ours and self.model is None

    def check_model(self) -> None:
        """Refuse an update that nothing could take.

        Raises:
            Validation: The engine has no model.
        """
        if self.lacks_model:
            raise Validation(
                f"model: {self.name} was made without one",
                phase="update",
                next_step="pass model= to the worker's engine, or a config.sink of your own",
            )

    def set_draft_model(self, model: Any, model_config: Any = None) -> None:
        """The draft model that rounds with the target `Draft` update."""
        self.draft_model, self.draft_model_config = model, model_config

    def resolve_target(self, target: Target) -> tuple[Any, Any]:
        """The model (and its config) that a round of `target` writes; may be overridden.

        Raises:
            Refused: The engine cannot update it.
        """
        if isinstance(target, Model):
            return self._default_model, self._default_model_config
        if isinstance(target, Draft):
            if not self.supports_draft_weight_update:
                raise Refused(f"{type(self).__name__} does not update draft models", phase="start")
            if self.draft_model is None:
                raise Refused("this worker has no draft model: set_draft_model()", phase="start")
            return self.draft_model, self.draft_model_config
        raise Refused(f"{type(self).__name__} takes no adapters ({target.key})", phase="start")

    def set_weight_update_target(self, model: Any, model_config: Any = None) -> None:
        """Point the next round at another model (a draft)."""
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self) -> None:
        """Point rounds at the engine's own model again; done at the end of each, however."""
        self.model, self.model_config = self._default_model, self._default_model_config

    def version_of(self, target: Target) -> Version | None:
        """What a target holds since its last commit."""
        return self.version if target == MODEL else self.target_versions.get(target.key)

    def take_version(self, target: Target, version: Version | None, weights_id: str) -> None:
        """A commit became visible; called inside the swap."""
        if target != MODEL:
            if version is not None:
                self.target_versions[target.key] = version
            return
        if version is not None:
            self.version = version
        self.unlabelled = version is None
        self.generation.adopt(WeightsTag(self.version, weights_id))
