"""Registries of engines, one for each side: by class, by module path, or by entry point."""

from __future__ import annotations

import functools
import importlib
import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from aiosync.errors import Validation

if TYPE_CHECKING:
    from aiosync.client_protocol import VLLMWeightSyncClient
    from aiosync.config import TrainerInitInfo
    from aiosync.sources import Source
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.worker import WeightTransferEngine

T = TypeVar("T")
logger = logging.getLogger(__name__)
ENTRY_POINT_GROUP = "aiosync.backends"
"""An entry point of this group is a callable without arguments that registers engines."""


@final
class Registry(Generic[T]):
    """Engine classes by backend name; modules are imported when an engine is asked for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, type[T] | tuple[str, str]] = {}

    def register(
        self, name: str, module_path_or_cls: str | type[T], class_name: str | None = None
    ) -> None:
        """Add a backend.

        Raises:
            Validation: The name is taken or none, what is registered is no class, or a module
                path came without a class name.
        """
        _check_name(name)
        if name in self._entries:
            raise Validation(f"{self._what} backend {name!r} is registered already")
        if isinstance(module_path_or_cls, str):
            if not class_name:
                raise Validation(f"backend {name!r}: a module path needs a class name as well")
            self._entries[name] = (module_path_or_cls, class_name)
        elif isinstance(module_path_or_cls, type):
            self._entries[name] = module_path_or_cls
        else:
            raise Validation(
                f"backend {name!r}: an engine class or its module path is needed,"
                f" not {module_path_or_cls!r}"
            )

    def get(self, name: str) -> type[T]:
        """The class of a backend.

        Raises:
            Validation: Unknown; lists what is available, and what failed to load. Or its module
                has no such class.
        """
        if name not in self._entries:
            load_plugins()
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries))
            failed = "".join(f"; {plugin}" for plugin in _failed_plugins)
            raise Validation(f"unknown {self._what} backend {name!r}; available: {known}{failed}")
        if isinstance(entry, tuple):
            module, class_name = entry
            cls = getattr(importlib.import_module(module), class_name, None)
            if not isinstance(cls, type):
                raise Validation(f"backend {name!r}: module {module} has no class {class_name!r}")
            self._entries[name] = cls
            return cls
        return entry

    def names(self) -> list[str]:
        load_plugins()
        return sorted(self._entries)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise Validation(f"a backend needs a non-empty name, not {name!r}")


_failed_plugins: list[str] = []


@functools.cache
def load_plugins() -> None:
    """Call every entry point once; one that fails takes no other with it, and is named."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()()
        except Exception as error:  # noqa: BLE001  whatever a plugin does, the others still load
            said = f"plugin {point.value!r} failed: {type(error).__name__}: {error}"
            logger.warning("entry point group %s: %s", ENTRY_POINT_GROUP, said)
            _failed_plugins.append(said)


_WORKERS: Registry[Any] = Registry("worker")
_TRAINERS: Registry[Any] = Registry("trainer")


@final
class WeightTransferEngineFactory:
    """Worker engines."""

    @staticmethod
    def register_engine(
        name: str,
        module_path_or_cls: str | type[WeightTransferEngine[Any, Any]],
        class_name: str | None = None,
    ) -> None:
        """See `Registry.register`."""
        _WORKERS.register(name, module_path_or_cls, class_name)

    @staticmethod
    def create_engine(
        config: Any, vllm_config: Any = None, device: Any = None, model: Any = None, **options: Any
    ) -> WeightTransferEngine:
        """Construct the worker engine that ``config.backend`` names; nothing is opened yet.

        Args:
            config: A `WeightTransferConfig`, or any object with a `backend`.
            vllm_config: Any object.
            device: Where the model lives; None: the CPU.
            model: What takes the weights.
            options: Further keywords of the engine (``hub``, ``name``).
        """
        backend = getattr(config, "backend", None)
        if not isinstance(backend, str):
            raise Validation(f"config must have a backend's name in .backend, not {config!r}")
        engine: WeightTransferEngine = _WORKERS.get(backend)(
            config, vllm_config, device, model, **options
        )
        return engine


@final
class WeightTransferTrainerFactory:
    """Trainer engines."""

    @staticmethod
    def register_engine(
        name: str,
        module_path_or_cls: str | type[TrainerWeightTransferEngine[Any]],
        class_name: str | None = None,
    ) -> None:
        """See `Registry.register`."""
        _TRAINERS.register(name, module_path_or_cls, class_name)

    @staticmethod
    def engine_class(backend: str) -> Any:
        """The trainer engine class of a backend."""
        return _TRAINERS.get(backend)

    @staticmethod
    async def trainer_init(
        init_info: TrainerInitInfo,
        *,
        client: VLLMWeightSyncClient | None,
        source: Source | None = None,
        **options: Any,
    ) -> TrainerWeightTransferEngine:
        """Construct and initialise the trainer engine that ``init_info.backend`` names."""
        backend = getattr(init_info, "backend", None)
        if not isinstance(backend, str):
            raise Validation(f"init_info must be a TrainerInitInfo, not {init_info!r}")
        cls = _TRAINERS.get(backend)
        engine: TrainerWeightTransferEngine = await cls.trainer_init(
            init_info, client=client, source=source, **options
        )
        return engine


def available_backends() -> dict[str, list[str]]:
    """Names that both factories know."""
    return {"worker": _WORKERS.names(), "trainer": _TRAINERS.names()}


_BUILT_IN = {
    "gloo": ("aiosync.engines.gloo", "Gloo"),
    "ipc": ("aiosync.engines.ipc", "IPC"),
    "loopback": ("aiosync.engines.loopback", "Loopback"),
    "nccl": ("aiosync.engines.nccl", "NCCL"),
}
for _name, (_module, _prefix) in _BUILT_IN.items():
    WeightTransferEngineFactory.register_engine(_name, _module, f"{_prefix}WeightTransferEngine")
    WeightTransferTrainerFactory.register_engine(
        _name, _module, f"{_prefix}TrainerWeightTransferEngine"
    )
