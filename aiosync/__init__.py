"""aiosync: awaitable weight sync from a trainer into running inference workers.

Everything public is importable from here; a name's module is loaded when the name is first used,
so ``import aiosync`` stays light (no torch).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiosync import errors as errors
from aiosync.errors import *  # noqa: F403  all kinds of error; that module lists them

if TYPE_CHECKING:
    from aiosync.budget import Budget as Budget
    from aiosync.client import Capabilities as Capabilities
    from aiosync.client import HTTPVLLMWeightSyncClient as HTTPVLLMWeightSyncClient
    from aiosync.client import SupportsAbort as SupportsAbort
    from aiosync.client import SupportsDraft as SupportsDraft
    from aiosync.client import SupportsPause as SupportsPause
    from aiosync.client import SupportsPrepare as SupportsPrepare
    from aiosync.client import SupportsStatus as SupportsStatus
    from aiosync.client import VLLMWeightSyncClient as VLLMWeightSyncClient
    from aiosync.client import sync_client as sync_client
    from aiosync.client_protocol import Readiness as Readiness
    from aiosync.client_protocol import Reply as Reply
    from aiosync.concurrency import Milestone as Milestone
    from aiosync.config import TrainerInitInfo as TrainerInitInfo
    from aiosync.config import WeightTransferConfig as WeightTransferConfig
    from aiosync.config import WeightTransferInitInfo as WeightTransferInitInfo
    from aiosync.config import WeightTransferInitRequest as WeightTransferInitRequest
    from aiosync.config import WeightTransferUpdateInfo as WeightTransferUpdateInfo
    from aiosync.config import WeightTransferUpdateRequest as WeightTransferUpdateRequest
    from aiosync.copy_order import CopyOrder as CopyOrder
    from aiosync.copy_order import Reach as Reach
    from aiosync.defaults import DEFAULTS as DEFAULTS
    from aiosync.defaults import Defaults as Defaults
    from aiosync.driven import TicketState as TicketState
    from aiosync.engines.gloo import GlooTrainerInitInfo as GlooTrainerInitInfo
    from aiosync.engines.gloo import (
        GlooTrainerWeightTransferEngine as GlooTrainerWeightTransferEngine,
    )
    from aiosync.engines.gloo import GlooWeightTransferEngine as GlooWeightTransferEngine
    from aiosync.engines.gloo import GlooWeightTransferInitInfo as GlooWeightTransferInitInfo
    from aiosync.engines.gloo import GlooWeightTransferUpdateInfo as GlooWeightTransferUpdateInfo
    from aiosync.engines.ipc import IPCTrainerInitInfo as IPCTrainerInitInfo
    from aiosync.engines.ipc import IPCTrainerWeightTransferEngine as IPCTrainerWeightTransferEngine
    from aiosync.engines.ipc import IPCWeightTransferEngine as IPCWeightTransferEngine
    from aiosync.engines.ipc import IPCWeightTransferInitInfo as IPCWeightTransferInitInfo
    from aiosync.engines.ipc import IPCWeightTransferUpdateInfo as IPCWeightTransferUpdateInfo
    from aiosync.engines.ipc import share_tensors as share_tensors
    from aiosync.engines.loopback import LoopbackTrainerInitInfo as LoopbackTrainerInitInfo
    from aiosync.engines.loopback import (
        LoopbackTrainerWeightTransferEngine as LoopbackTrainerWeightTransferEngine,
    )
    from aiosync.engines.loopback import (
        LoopbackWeightTransferEngine as LoopbackWeightTransferEngine,
    )
    from aiosync.engines.loopback import (
        LoopbackWeightTransferInitInfo as LoopbackWeightTransferInitInfo,
    )
    from aiosync.engines.loopback import (
        LoopbackWeightTransferUpdateInfo as LoopbackWeightTransferUpdateInfo,
    )
    from aiosync.engines.nccl import NCCLTrainerInitInfo as NCCLTrainerInitInfo
    from aiosync.engines.nccl import (
        NCCLTrainerWeightTransferEngine as NCCLTrainerWeightTransferEngine,
    )
    from aiosync.engines.nccl import NCCLWeightTransferEngine as NCCLWeightTransferEngine
    from aiosync.engines.nccl import NCCLWeightTransferInitInfo as NCCLWeightTransferInitInfo
    from aiosync.engines.nccl import NCCLWeightTransferUpdateInfo as NCCLWeightTransferUpdateInfo
    from aiosync.factory import WeightTransferEngineFactory as WeightTransferEngineFactory
    from aiosync.factory import WeightTransferTrainerFactory as WeightTransferTrainerFactory
    from aiosync.factory import available_backends as available_backends
    from aiosync.fleet import FleetClient as FleetClient
    from aiosync.fleet import Member as Member
    from aiosync.fleet_round import FleetRound as FleetRound
    from aiosync.front_door import connect as connect
    from aiosync.gateway import FleetGateway as FleetGateway
    from aiosync.gateway_client import GatewayClient as GatewayClient
    from aiosync.generation import GenerationGate as GenerationGate
    from aiosync.generation import GenerationRequest as GenerationRequest
    from aiosync.generation import PauseMode as PauseMode
    from aiosync.generation_table import Hold as Hold
    from aiosync.generation_table import Span as Span
    from aiosync.generation_table import WeightsTag as WeightsTag
    from aiosync.grouping import layerwise_groups as layerwise_groups
    from aiosync.handle import RoundProgress as RoundProgress
    from aiosync.handle import WeightUpdate as WeightUpdate
    from aiosync.iterator_source import IteratorSource as IteratorSource
    from aiosync.layerwise import LayerwiseSink as LayerwiseSink
    from aiosync.legacy_source import LegacySource as LegacySource
    from aiosync.member_table import MEMBER as MEMBER
    from aiosync.member_table import MemberState as MemberState
    from aiosync.member_table import MemberTrigger as MemberTrigger
    from aiosync.memory_plan import PlanSummary as PlanSummary
    from aiosync.messages import PeerState as PeerState
    from aiosync.messages import RoundHeader as RoundHeader
    from aiosync.metadata import ParamMeta as ParamMeta
    from aiosync.metadata import Placement as Placement
    from aiosync.metadata import Replicate as Replicate
    from aiosync.metadata import Shard as Shard
    from aiosync.metadata import materialize_full_tensor as materialize_full_tensor
    from aiosync.offers import Offer as Offer
    from aiosync.offers import RoundRecord as RoundRecord
    from aiosync.pause import Pause as Pause
    from aiosync.policies import All as All
    from aiosync.policies import BestEffort as BestEffort
    from aiosync.policies import Quorum as Quorum
    from aiosync.push import PushSession as PushSession
    from aiosync.ray_actor import RayServed as RayServed
    from aiosync.ray_client import RayMember as RayMember
    from aiosync.ray_client import RayVLLMWeightSyncClient as RayVLLMWeightSyncClient
    from aiosync.relay import RelaySink as RelaySink
    from aiosync.relay import TensorReceiver as TensorReceiver
    from aiosync.report import MemberOutcome as MemberOutcome
    from aiosync.report import Report as Report
    from aiosync.round_options import Next as Next
    from aiosync.round_options import RoundOptions as RoundOptions
    from aiosync.routes import Response as Response
    from aiosync.routes import ServedEngine as ServedEngine
    from aiosync.server import Server as Server
    from aiosync.server import WeightUpdateService as WeightUpdateService
    from aiosync.server import serve as serve
    from aiosync.sinks import InPlaceSink as InPlaceSink
    from aiosync.sinks import Sink as Sink
    from aiosync.sinks import StagedSink as StagedSink
    from aiosync.sinks import make_sink as make_sink
    from aiosync.sources import ModuleSource as ModuleSource
    from aiosync.sources import WeightSource as WeightSource
    from aiosync.staging import StagingPlace as StagingPlace
    from aiosync.ticket import RoundTicket as RoundTicket
    from aiosync.trainer import TrainerWeightTransferEngine as TrainerWeightTransferEngine
    from aiosync.version import Version as Version
    from aiosync.weight_targets import Adapter as Adapter
    from aiosync.weight_targets import Draft as Draft
    from aiosync.weight_targets import Model as Model
    from aiosync.worker import WeightTransferEngine as WeightTransferEngine
    from aiosync.worker_group import WorkerGroup as WorkerGroup
    from statemachines import GateContext as GateContext
    from statemachines import HookStatistics as HookStatistics
    from statemachines import HubStatistics as HubStatistics
    from statemachines import Subscription as Subscription
    from statemachines import Transition as Transition
    from statemachines import TransitionHub as TransitionHub
    from statemachines.tables import ENGINE as ENGINE
    from statemachines.tables import State as State
    from statemachines.tables import Trigger as Trigger
    from statemachines.tables import Weights as Weights
    from transports.sharing import SharedStorage as SharedStorage

_LAZY = {
    "Adapter": "aiosync.weight_targets",
    "All": "aiosync.policies",
    "BestEffort": "aiosync.policies",
    "Budget": "aiosync.budget",
    "Capabilities": "aiosync.client",
    "DEFAULTS": "aiosync.defaults",
    "Defaults": "aiosync.defaults",
    "CopyOrder": "aiosync.copy_order",
    "Draft": "aiosync.weight_targets",
    "ENGINE": "statemachines.tables",
    "FleetClient": "aiosync.fleet",
    "FleetRound": "aiosync.fleet_round",
    "FleetGateway": "aiosync.gateway",
    "GatewayClient": "aiosync.gateway_client",
    "GateContext": "statemachines",
    "GenerationGate": "aiosync.generation",
    "GenerationRequest": "aiosync.generation",
    "GlooTrainerInitInfo": "aiosync.engines.gloo",
    "GlooTrainerWeightTransferEngine": "aiosync.engines.gloo",
    "GlooWeightTransferEngine": "aiosync.engines.gloo",
    "GlooWeightTransferInitInfo": "aiosync.engines.gloo",
    "GlooWeightTransferUpdateInfo": "aiosync.engines.gloo",
    "HTTPVLLMWeightSyncClient": "aiosync.client",
    "HookStatistics": "statemachines",
    "HubStatistics": "statemachines",
    "Hold": "aiosync.generation_table",
    "IPCTrainerInitInfo": "aiosync.engines.ipc",
    "IPCTrainerWeightTransferEngine": "aiosync.engines.ipc",
    "IPCWeightTransferEngine": "aiosync.engines.ipc",
    "IPCWeightTransferInitInfo": "aiosync.engines.ipc",
    "IPCWeightTransferUpdateInfo": "aiosync.engines.ipc",
    "InPlaceSink": "aiosync.sinks",
    "IteratorSource": "aiosync.iterator_source",
    "LayerwiseSink": "aiosync.layerwise",
    "LegacySource": "aiosync.legacy_source",
    "LoopbackTrainerInitInfo": "aiosync.engines.loopback",
    "LoopbackTrainerWeightTransferEngine": "aiosync.engines.loopback",
    "LoopbackWeightTransferEngine": "aiosync.engines.loopback",
    "LoopbackWeightTransferInitInfo": "aiosync.engines.loopback",
    "LoopbackWeightTransferUpdateInfo": "aiosync.engines.loopback",
    "MEMBER": "aiosync.member_table",
    "Member": "aiosync.fleet",
    "MemberOutcome": "aiosync.report",
    "MemberState": "aiosync.member_table",
    "MemberTrigger": "aiosync.member_table",
    "Milestone": "aiosync.concurrency",
    "Model": "aiosync.weight_targets",
    "ModuleSource": "aiosync.sources",
    "NCCLTrainerInitInfo": "aiosync.engines.nccl",
    "NCCLTrainerWeightTransferEngine": "aiosync.engines.nccl",
    "NCCLWeightTransferEngine": "aiosync.engines.nccl",
    "NCCLWeightTransferInitInfo": "aiosync.engines.nccl",
    "NCCLWeightTransferUpdateInfo": "aiosync.engines.nccl",
    "Next": "aiosync.round_options",
    "ParamMeta": "aiosync.metadata",
    "PauseMode": "aiosync.generation",
    "Offer": "aiosync.offers",
    "PeerState": "aiosync.messages",
    "Placement": "aiosync.metadata",
    "Pause": "aiosync.pause",
    "PlanSummary": "aiosync.memory_plan",
    "RayMember": "aiosync.ray_client",
    "RayServed": "aiosync.ray_actor",
    "RayVLLMWeightSyncClient": "aiosync.ray_client",
    "PushSession": "aiosync.push",
    "Quorum": "aiosync.policies",
    "Reach": "aiosync.copy_order",
    "Readiness": "aiosync.client_protocol",
    "RelaySink": "aiosync.relay",
    "Replicate": "aiosync.metadata",
    "Reply": "aiosync.client_protocol",
    "Report": "aiosync.report",
    "Response": "aiosync.routes",
    "RoundOptions": "aiosync.round_options",
    "RoundRecord": "aiosync.offers",
    "RoundTicket": "aiosync.ticket",
    "RoundHeader": "aiosync.messages",
    "StagingPlace": "aiosync.staging",
    "RoundProgress": "aiosync.handle",
    "ServedEngine": "aiosync.routes",
    "Server": "aiosync.server",
    "Shard": "aiosync.metadata",
    "SharedStorage": "transports.sharing",
    "Sink": "aiosync.sinks",
    "Span": "aiosync.generation_table",
    "StagedSink": "aiosync.sinks",
    "SupportsDraft": "aiosync.client",
    "SupportsPause": "aiosync.client",
    "TicketState": "aiosync.driven",
    "TensorReceiver": "aiosync.relay",
    "State": "statemachines.tables",
    "Subscription": "statemachines",
    "SupportsAbort": "aiosync.client",
    "SupportsPrepare": "aiosync.client",
    "SupportsStatus": "aiosync.client",
    "TrainerInitInfo": "aiosync.config",
    "TrainerWeightTransferEngine": "aiosync.trainer",
    "Transition": "statemachines",
    "TransitionHub": "statemachines",
    "Trigger": "statemachines.tables",
    "VLLMWeightSyncClient": "aiosync.client",
    "Version": "aiosync.version",
    "WeightSource": "aiosync.sources",
    "WeightTransferConfig": "aiosync.config",
    "WeightTransferEngine": "aiosync.worker",
    "WeightTransferEngineFactory": "aiosync.factory",
    "WeightTransferInitInfo": "aiosync.config",
    "WeightTransferInitRequest": "aiosync.config",
    "WeightTransferTrainerFactory": "aiosync.factory",
    "WeightTransferUpdateInfo": "aiosync.config",
    "WeightTransferUpdateRequest": "aiosync.config",
    "WeightsTag": "aiosync.generation_table",
    "WeightUpdate": "aiosync.handle",
    "WeightUpdateService": "aiosync.server",
    "Weights": "statemachines.tables",
    "WorkerGroup": "aiosync.worker_group",
    "available_backends": "aiosync.factory",
    "connect": "aiosync.front_door",
    "layerwise_groups": "aiosync.grouping",
    "make_sink": "aiosync.sinks",
    "materialize_full_tensor": "aiosync.metadata",
    "serve": "aiosync.server",
    "share_tensors": "aiosync.engines.ipc",
    "sync_client": "aiosync.client",
}

__version__ = "0.1.0"
__all__ = sorted({*_LAZY, *errors.__all__})


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        module = _LAZY.get(name)
        if module is None:
            from aiosync.former_names import unknown

            raise unknown("module 'aiosync'", name)
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
