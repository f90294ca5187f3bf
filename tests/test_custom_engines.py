"""Engines, sources and clients as users of the blocking API write them."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import models
import msgspec
import pytest
import spool
import torch
from limits import SLACK
from paced import Hold, Paced
from spool import (
    AsyncPoolClient,
    AsyncSpoolEngine,
    Loadable,
    PlainSpoolTrainerEngine,
    PlainSpoolTrainerInitInfo,
    Pool,
    PoolClient,
    SpoolEngine,
    SpoolTrainerEngine,
    SpoolTrainerInitInfo,
    StageSource,
)
from torch import nn

import aiosync
from aiosync import (
    Busy,
    InvalidTransition,
    PhaseTimeout,
    RemoteError,
    RoundCancelled,
    State,
    TrainerInitInfo,
    Validation,
    WeightTransferConfig,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferTrainerFactory,
)
from aiosync.feed import SourceFeed
from aiosync.infos import parse_info
from aiosync.testing import DirectClient
from statemachines.tables import is_legal_pair

pytestmark = pytest.mark.asyncio

SUCCESS = ["start", "update", "finalize", "complete"]
ASYNC = (SpoolTrainerEngine, SpoolTrainerInitInfo)
PLAIN = (PlainSpoolTrainerEngine, PlainSpoolTrainerInitInfo)
TRAINERS = pytest.mark.parametrize("trainer", [ASYNC, PLAIN], ids=["async", "plain"])


@pytest.fixture(autouse=True)
def registries(monkeypatch, blocking_detector):
    """The four registrations of this file, and user code that may block as it does today."""
    blocking_detector.deactivate()
    for registry in (aiosync.factory._WORKERS, aiosync.factory._TRAINERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    WeightTransferTrainerFactory.register_engine("spool", "spool", "SpoolTrainerEngine")
    WeightTransferTrainerFactory.register_engine("plain_spool", PlainSpoolTrainerEngine)
    WeightTransferEngineFactory.register_engine("spool", SpoolEngine)
    WeightTransferEngineFactory.register_engine("async_spool", "spool", "AsyncSpoolEngine")


class Setup:
    def __init__(self, trainer, workers, model, copies, pool):
        self.trainer, self.workers, self.model, self.copies = trainer, workers, model, copies
        self.pool = pool
        self.path: list[str] = []
        self.theirs: list[str] = []
        self.illegal: list[Any] = []

        def judge(_):
            for worker in self.workers:
                if not is_legal_pair(trainer.state, worker.state):
                    self.illegal.append((trainer.state, worker.state))

        trainer.on_transition(lambda t: self.path.append(t.trigger))
        self.worker.on_transition(lambda t: self.theirs.append(t.trigger))
        for machine in (trainer, *workers):
            machine.on_transition(judge)

    @property
    def worker(self):
        return self.workers[0]

    def is_equal(self):
        want = models.fingerprint(self.model)
        return all(models.fingerprint(copy) == want for copy in self.copies)


def loadable(seed):
    return Loadable(*models.make("small", seed))


CLIENTS = {
    "blocking": lambda pool, workers: PoolClient(pool),
    "async": lambda pool, workers: AsyncPoolClient(pool),
    "direct": lambda pool, workers: aiosync.FleetClient(
        [aiosync.Member(w.name, DirectClient(w, name=w.name)) for w in workers]
    ),
}


@asynccontextmanager
async def spooled(folder, kinds=ASYNC, *, client="direct", worker="spool", workers=1, hold=None):
    engine_cls, info_cls = kinds
    model = loadable(1)
    copies = [loadable(2 + n) for n in range(workers)]
    engines = [
        WeightTransferEngineFactory.create_engine(
            config=WeightTransferConfig(worker),
            vllm_config=None,
            device=torch.device("cpu"),
            model=copy,
            name=f"w{n}",
        )
        for n, copy in enumerate(copies)
    ]
    pool = Pool(*engines)
    trainer = await WeightTransferTrainerFactory.trainer_init(
        init_info=info_cls(rank=0, folder=str(folder), piece_bytes=1 << 10),
        client=CLIENTS[client](pool, engines),
        source=Paced(model, hold or (lambda _: None)),
    )
    assert type(trainer) is engine_cls
    try:
        yield Setup(trainer, engines, model, copies, pool)
    finally:
        if hold is not None:
            hold.released.set()
        await trainer.aclose()
        for engine in engines:
            await engine.aclose()


async def until(event):
    async with asyncio.timeout(20):
        while not event.is_set():
            await asyncio.sleep(0.005)


# -- the six things of the public pages


@TRAINERS
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("worker", ["spool", "async_spool"])
async def test_rounds_arrive_bit_equal(tmp_path, trainer, client, worker):
    async with spooled(tmp_path, trainer, client=client, worker=worker, workers=2) as setup:
        assert setup.trainer.state is State.INITIALIZED
        assert setup.worker.state is State.INITIALIZED
        assert setup.worker.piece_bytes == 1 << 10  # shipped once, in the handshake
        for number in (1, 2, 3):
            with torch.no_grad():
                setup.model[0].weight.add_(1)
            await setup.trainer.send_weights()
            assert setup.is_equal()
            assert setup.trainer.version.order == number
            assert setup.worker.weights == "intact"
        assert setup.path == SUCCESS * 3
        assert setup.theirs == SUCCESS * 3
        assert setup.illegal == []
        if client == "direct":
            assert setup.worker.version == setup.trainer.version
        else:
            assert setup.pool.version == "3"
            assert setup.pool.calls[-2:] == ["finish_weight_update", "update_weight_version"]


@TRAINERS
async def test_report_of_an_engine_that_sends_by_itself(tmp_path, trainer):
    async with spooled(tmp_path, trainer) as setup:
        report = await setup.trainer.send_weights(version=7)
        assert report is setup.trainer.last_report
        assert (report.outcome, report.version.label, report.round) == ("committed", 7, 1)
        assert [m.outcome for m in report.members] == ["committed"]


@TRAINERS
async def test_background_round_of_an_engine_that_sends_by_itself(tmp_path, trainer):
    hold = Hold(2)
    async with spooled(tmp_path, trainer, hold=hold if trainer is PLAIN else None) as setup:
        update = setup.trainer.begin_update(version=7)
        if trainer is PLAIN:
            await until(hold.reached)
            with pytest.raises(Busy, match="version 7"):
                await setup.trainer.send_weights()
            hold.released.set()
        report = await update
        assert report.version.label == 7
        assert update.released.is_set()
        assert setup.is_equal()


@TRAINERS
async def test_source_that_raises(tmp_path, trainer):
    class Mine(ValueError):
        pass

    def boom(index):
        if index == 3:
            raise Mine("gather failed")

    async with spooled(tmp_path, trainer) as setup:
        old = models.fingerprint(setup.copies[0])
        setup.trainer.source.before = boom
        with pytest.raises(Mine, match="gather failed") as caught:
            await setup.trainer.send_weights(version=1)
        assert caught.value.report.outcome == "failed"
        assert setup.path == ["start", "fail"]
        assert setup.theirs == ["start", "fail"]
        assert models.fingerprint(setup.copies[0]) == old
        setup.trainer.source.before = lambda _: None
        report = await setup.trainer.send_weights(version=1)
        assert report.recovered
        assert setup.is_equal()
        assert setup.path[2:] == ["reset", "initialize", *SUCCESS]
        assert setup.illegal == []


@TRAINERS
@pytest.mark.parametrize("client", CLIENTS)
async def test_worker_that_raises(tmp_path, trainer, client):
    async with spooled(tmp_path, trainer, client=client) as setup:
        load = setup.copies[0].load_weights

        def broken(weights):
            next(iter(weights))
            raise RuntimeError("no memory for down_proj")

        setup.copies[0].load_weights = broken
        with pytest.raises(Exception, match="no memory for down_proj") as caught:
            await setup.trainer.send_weights(version=1)
        if client == "direct":
            assert isinstance(caught.value, RemoteError)
            assert caught.value.replica == "w0"
        assert setup.path == ["start", "fail"]
        assert setup.theirs == ["start", "update", "fail"]
        assert setup.worker.weights == "unknown"
        setup.copies[0].load_weights = load
        await setup.trainer.send_weights(version=1)
        assert setup.is_equal()
        assert setup.worker.weights == "intact"
        assert setup.illegal == []


@pytest.mark.parametrize("how", ["native", "timeout", "handle", "aclose"])
async def test_plain_sender_given_up_inside_its_source(tmp_path, how):
    hold = Hold(3)
    async with spooled(tmp_path, PLAIN, hold=hold) as setup:
        trainer = setup.trainer
        loop = asyncio.get_running_loop()
        if how == "handle":
            task = asyncio.ensure_future(trainer.begin_update(version=1).wait())
        else:
            options = {"timeout": 1.5} if how == "timeout" else {}
            task = asyncio.ensure_future(trainer.send_weights(version=1, **options))
        await until(hold.reached)
        loop.call_later(2.0 if how == "timeout" else 0.5, hold.released.set)
        began = time.monotonic()
        if how == "native":
            task.cancel()
        elif how == "handle":
            trainer.admission.current.cancel()
        elif how == "aclose":
            await trainer.aclose()
        await asyncio.wait([task], timeout=10)
        assert time.monotonic() - began < 3 + SLACK
        expected = {"native": asyncio.CancelledError, "timeout": PhaseTimeout}
        with pytest.raises(expected.get(how, RoundCancelled)):
            await task
        assert setup.path[:2] == ["start", "fail"]
        assert setup.theirs[:2] == ["start", "fail"]
        if how != "aclose":
            await trainer.send_weights(version=1)
            assert setup.is_equal()


@TRAINERS
@pytest.mark.parametrize("method", ["start", "update", "finish"])
async def test_cancelled_while_a_call_is_out(tmp_path, trainer, method):
    async with spooled(tmp_path, trainer) as setup:
        reached, go = asyncio.Event(), asyncio.Event()
        step = {"start": "start_weight_update", "update": "receive_weights"}.get(
            method, "finish_weight_update"
        )
        called = getattr(setup.worker, step)
        active = True

        async def slow(*args, **options):
            if active:
                reached.set()
                await go.wait()
            await called(*args, **options)

        setattr(setup.worker, step, slow)
        task = asyncio.ensure_future(setup.trainer.send_weights(version=1))
        await until(reached)
        began = time.monotonic()
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert time.monotonic() - began < 3 + SLACK
        assert task.cancelled()
        assert setup.trainer.state is State.FAILED
        outcome = setup.trainer.last_report.outcome
        assert outcome == "failed"  # the worker says so, when it is told to abort
        active = False
        go.set()
        await setup.trainer.send_weights()
        assert setup.is_equal()


@TRAINERS
async def test_sender_that_takes_longer_than_the_lease_is_kept_alive(tmp_path, trainer):
    async with spooled(tmp_path, trainer) as setup:
        setup.trainer.lease_s = 0.3
        if trainer is PLAIN:
            setup.trainer.source.before = lambda index: time.sleep(0.8) if index == 2 else None
        else:
            called = setup.trainer.client.update_weights

            async def slow(info):
                await asyncio.sleep(0.8)
                await called(info)

            setup.trainer.client.update_weights = slow
        await setup.trainer.send_weights()
        assert setup.is_equal()


@pytest.mark.parametrize("client", CLIENTS)
async def test_label_that_the_sender_gives_to_finish_is_the_versions_name(tmp_path, client):
    class Labelled(SpoolTrainerEngine):
        async def send_weights(self):
            self.labels = getattr(self, "labels", 0) + 1
            finish = self.client.finish_weight_update
            self.client.finish_weight_update = lambda: finish(f"step-{self.labels}")
            try:
                await super().send_weights()
            finally:
                del self.client.finish_weight_update

    @dataclass
    class Info(SpoolTrainerInitInfo):
        backend: ClassVar[str] = "labelled"

    WeightTransferTrainerFactory.register_engine("labelled", Labelled)
    async with spooled(tmp_path, (Labelled, Info), client=client) as setup:
        for number in (1, 2):
            report = await setup.trainer.send_weights()
            assert (report.version.label, report.version.order) == (f"step-{number}", number)
            assert setup.trainer.version == report.version
            if client == "direct":
                assert setup.worker.version == report.version
            else:
                assert setup.pool.version == f"step-{number}"


@TRAINERS
async def test_gates_of_a_custom_sender_know_round_and_version(tmp_path, trainer):
    async with spooled(tmp_path, trainer) as setup:
        seen = []

        def check(context):
            seen.append((context.trigger, context.round, context.version))
            return context.version != "3"

        for trigger in ("start", "complete"):
            setup.trainer.gate(trigger, check)
        await setup.trainer.send_weights(version=2)
        assert seen == [("start", 1, "2"), ("complete", 1, "2")]
        with pytest.raises(aiosync.GateRejected):
            await setup.trainer.send_weights(version=3)
        assert setup.trainer.state is State.INITIALIZED
        assert setup.worker.state is State.INITIALIZED
        await setup.trainer.send_weights(version=4)
        assert setup.is_equal()


async def test_sender_that_forgets_to_finish(tmp_path):
    class Forgetful(SpoolTrainerEngine):
        async def send_weights(self):
            await self.client.start_weight_update()

    WeightTransferTrainerFactory.register_engine("forgetful", Forgetful)

    @dataclass
    class Info(SpoolTrainerInitInfo):
        backend: ClassVar[str] = "forgetful"

    async with spooled(tmp_path, (Forgetful, Info)) as setup:
        with pytest.raises(InvalidTransition, match="without finish_weight_update"):
            await setup.trainer.send_weights()
        assert setup.path == ["start", "fail"]
        assert setup.theirs == ["start", "fail"]


async def test_override_that_calls_super():
    class Logged(aiosync.LoopbackTrainerWeightTransferEngine):
        log: ClassVar[list[Any]] = []

        async def send_weights(self, **options):
            self.log.append("begin")
            report = await super().send_weights(**options)
            self.log.append(report.outcome)
            return report

    from looped import looped

    from transports.loopback import LoopbackLink

    async with looped(initialized=False) as pair:
        with LoopbackLink() as link:
            async with Logged(
                client=pair.trainer.links[0].client, source=pair.model, link=link
            ) as trainer:
                triggers = []
                trainer.on_transition(lambda t: triggers.append(t.trigger))
                report = await trainer.send_weights(version=4)
                assert report.version.label == 4
                assert report is trainer.last_report
                assert (await trainer.begin_update(version=5)).outcome == "committed"
                assert trainer.log == ["begin", "committed"] * 2
                assert triggers == ["initialize", *SUCCESS * 2]
                assert pair.is_equal()


async def test_rank_that_does_not_send_stays_in_the_sources_collectives(tmp_path):
    model = loadable(1)
    source = Paced(model)

    class Untouchable:
        def __getattr__(self, name):
            if name.startswith("__") or name in ("members", "name"):
                raise AttributeError(name)
            return self._never

        async def _never(self, *args, **options):
            raise AssertionError("a rank that does not send touched the client")

    trainer = await WeightTransferTrainerFactory.trainer_init(
        init_info=SpoolTrainerInitInfo(rank=1, folder=str(tmp_path)),
        client=Untouchable(),
        source=source,
    )
    async with trainer:
        assert not trainer.is_sender
        await trainer.send_weights()
        assert source.passes == source.closed == 1


async def test_use_as_the_public_page_shows_it(tmp_path):
    model, copy = loadable(1), loadable(2)
    worker = WeightTransferEngineFactory.create_engine(
        config=WeightTransferConfig("spool"),
        vllm_config=object(),
        device=torch.device("cpu"),
        model=copy,
    )
    trainer = await WeightTransferTrainerFactory.trainer_init(
        init_info=SpoolTrainerInitInfo(rank=0, folder=str(tmp_path)),
        client=PoolClient(Pool(worker)),
        source=Paced(model),
    )
    await trainer.send_weights()
    await worker.drain_pending()
    await trainer.shutdown()
    assert models.fingerprint(copy) == models.fingerprint(model)
    assert trainer.state is State.IDLE
    await trainer.aclose()
    await worker.aclose()


@pytest.mark.parametrize("kinds", [ASYNC, PLAIN], ids=["async", "plain"])
async def test_trainer_init_that_raises(tmp_path, kinds):
    with pytest.raises(ValueError, match="spool needs a WeightSource"):
        await WeightTransferTrainerFactory.trainer_init(
            init_info=kinds[1](rank=0, folder=str(tmp_path)), client=AsyncPoolClient(None)
        )


async def test_trainer_init_without_a_hub_parameter_says_so(tmp_path):
    with pytest.raises(Validation, match="takes no hub"):
        await WeightTransferTrainerFactory.trainer_init(
            init_info=SpoolTrainerInitInfo(rank=0, folder=str(tmp_path)),
            client=AsyncPoolClient(None),
            source=Paced(loadable(1)),
            hub=aiosync.TransitionHub(),
        )


async def test_stage_source_yields_what_its_rank_owns():
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    layout = [(name, p.dtype, tuple(p.shape), int(name[0])) for name, p in whole.named_parameters()]
    first, second = nn.Sequential(whole[0]), nn.Module()
    second.add_module("1", whole[1])
    for rank, stage in enumerate((first, second)):
        source = StageSource(stage, layout, {0: (0,), 1: (1,)})
        feed = SourceFeed(source, rank=rank)
        assert [m.name for m in feed.metadata] == [name for name, *_ in layout]
        got = [feed.metadata[i].name for batch in feed.iter_batches() for i, _ in batch]
        assert got == [name for name, *_ in layout if name.startswith(str(rank))]
        assert source.metadata is source.metadata


async def test_stage_source_of_one_stage_is_sent(tmp_path):
    async with spooled(tmp_path) as setup:
        layout = [(n, p.dtype, tuple(p.shape), 0) for n, p in setup.model.named_parameters()]
        setup.trainer.source = StageSource(setup.model, layout, {0: (0,)})
        await setup.trainer.send_weights()
        assert setup.is_equal()


async def test_plain_sender_does_not_block_the_loop(tmp_path):
    hold = Hold(2)
    async with spooled(tmp_path, PLAIN, hold=hold) as setup:
        task = asyncio.ensure_future(setup.trainer.send_weights())
        await until(hold.reached)
        assert threading.current_thread() is threading.main_thread()
        for _ in range(10):
            await asyncio.sleep(0)  # the loop turns
        hold.released.set()
        await task
        assert setup.is_equal()


# -- registries


async def test_registries_are_separate_and_list_what_they_have():
    with pytest.raises(ValueError, match=r"unknown worker backend 'plain_spool'.*async_spool"):
        WeightTransferEngineFactory.create_engine(config=WeightTransferConfig("plain_spool"))
    with pytest.raises(ValueError, match=r"unknown trainer backend 'async_spool'.*plain_spool"):
        WeightTransferTrainerFactory.engine_class("async_spool")
    names = aiosync.available_backends()
    assert {"ipc", "loopback", "spool"} <= set(names["worker"]) & set(names["trainer"])
    assert "plain_spool" not in names["worker"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("spool", SpoolEngine), "registered already"),
        (("", SpoolEngine), "non-empty name"),
        (("other", "spool"), "needs a class name"),
    ],
)
async def test_registration_that_cannot_be_right(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        WeightTransferEngineFactory.register_engine(*arguments)


async def test_module_of_a_backend_is_imported_when_it_is_asked_for():
    WeightTransferEngineFactory.register_engine("absent", "no_such_module_at_all", "Engine")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        WeightTransferEngineFactory.create_engine(config=WeightTransferConfig("absent"))
    assert WeightTransferTrainerFactory.engine_class("spool") is spool.SpoolTrainerEngine


# -- info classes


@dataclass
class Dense(WeightTransferInitInfo):
    address: str
    ports: list[int] = field(default_factory=list)
    ratio: float = 1.0
    extra: dict[str, int] | None = None


class DenseStruct(msgspec.Struct, WeightTransferInitInfo):
    address: str
    ports: list[int] = []
    ratio: float = 1.0
    extra: dict[str, int] | None = None


@dataclass
class WithTensor(WeightTransferInitInfo):
    tensor: torch.Tensor
    name: str = "t"


BOTH = pytest.mark.parametrize("cls", [Dense, DenseStruct])


@BOTH
async def test_info_out_of_a_dict(cls):
    data = {"address": "here", "ports": [1, 2], "ratio": 2, "extra": {"a": 1}}
    info = parse_info(cls, data, what="init_info")
    assert type(info) is cls
    assert (info.address, info.ports, info.ratio, info.extra) == ("here", [1, 2], 2.0, {"a": 1})
    assert parse_info(cls, info, what="init_info") is info


@BOTH
@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({}, "address"),
        ({"address": 5}, r"\$\.address"),
        ({"address": None}, r"\$\.address"),
        ({"address": "here", "ports": [1, "two"]}, r"\$\.ports\[1\]"),
        ({"address": "here", "ports": 1}, r"\$\.ports"),
        ({"address": "here", "extra": {"a": 1.5}}, r"\$\.extra\[\.\.\.\]"),
        ({"address": "here", "adress": 1}, "adress"),
        ({"address": "here", 5: 1}, "5"),
        ("here", "must be a dict"),
        (None, "must be a dict"),
    ],
)
async def test_info_that_cannot_be_right_is_named(cls, data, path):
    with pytest.raises(ValueError, match=path) as caught:
        parse_info(cls, data, what="init_info")
    assert isinstance(caught.value, Validation)
    assert "init_info" in str(caught.value)


async def test_info_with_fields_of_a_users_own_types():
    tensor = torch.zeros(3)
    info = parse_info(WithTensor, {"tensor": tensor}, what="init_info")
    assert info.tensor is tensor
    for data in ({}, {"tensor": tensor, "nmae": "t"}):
        with pytest.raises(ValueError, match=r"tensor|nmae"):
            parse_info(WithTensor, data, what="init_info")


async def test_worker_names_the_bad_field_of_a_users_info(tmp_path):
    async with spooled(tmp_path) as setup:
        worker = setup.worker
        header = None
        with pytest.raises(ValueError, match=r"init_info.*\$\.piece_bytes"):
            await worker.init_transfer_engine({"folder": "f", "piece_bytes": "many"})
        with pytest.raises(ValueError, match=r"update_info.*\$\.shapes\[0\]"):
            worker.parse_update_info({"names": ["a"], "dtype_names": ["b"], "shapes": [1]})
        assert header is None
        await setup.trainer.send_weights()
        assert setup.is_equal()


async def test_trainer_init_info_needs_a_backend():
    with pytest.raises(TypeError, match="Nameless must set the class attribute 'backend'"):

        class Nameless(TrainerInitInfo):
            pass


async def test_trainer_init_info_ranks():
    assert SpoolTrainerInitInfo(rank=0, folder="f").is_sender
    assert not SpoolTrainerInitInfo(rank=1, folder="f").is_sender
    with pytest.raises(TypeError, match="rank"):
        SpoolTrainerInitInfo(folder="f")


async def test_client_that_lacks_a_method_is_named():
    class Half:
        def start_weight_update(self):
            pass

    with pytest.raises(TypeError, match=r"Half.*init_weight_transfer_engine"):
        await WeightTransferTrainerFactory.trainer_init(
            init_info=SpoolTrainerInitInfo(rank=0, folder="f"),
            client=Half(),
            source=Paced(loadable(1)),
        )


async def test_metadata_must_be_a_cached_property():
    with pytest.raises(TypeError, match="cached_property"):

        class Wrong(aiosync.WeightSource):
            @property
            def metadata(self):
                return []


async def test_async_worker_engine_and_plain_one_see_the_same_calls(tmp_path):
    for worker in ("spool", "async_spool"):
        async with spooled(tmp_path, worker=worker) as setup:
            kind = AsyncSpoolEngine if worker == "async_spool" else SpoolEngine
            assert type(setup.worker) is kind
            await setup.trainer.send_weights()
            assert setup.theirs == SUCCESS
