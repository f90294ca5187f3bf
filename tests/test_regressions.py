"""Defects that were found once, each with the test that would have found it."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import nullcontext, suppress

import pytest
import torch
from looped import BUDGET, change, looped
from torch import nn

import aiosync
from aiosync import Budget, State, foreign
from aiosync.testing import DirectClient
from transports.loopback import LoopbackLink

pytestmark = pytest.mark.asyncio


class Faulty:
    """A client of the user's own: `fault` replaces or follows one method of `DirectClient`."""

    def __init__(self, engine, method, fault, *, instead=True):
        self.inner = DirectClient(engine)
        self.name = "faulty"
        self.active = True
        self._method, self._fault, self._instead = method, fault, instead
        for name in (
            "capabilities",
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "prepare_weight_update",
            "finish_weight_update",
            "abort_weight_update",
            "shutdown_weight_transfer_engine",
            "weight_update_status",
        ):
            setattr(self, name, self._wrapped(name))

    def _wrapped(self, name):
        method = getattr(self.inner, name)

        async def call(*args, **options):
            hit = self.active and name == self._method
            if hit and self._instead:
                answer = self._fault()
                return await answer if inspect.isawaitable(answer) else answer
            reply = await method(*args, **options)
            return self._fault() if hit else reply

        return call


def stray():
    raise asyncio.CancelledError("of somebody else's task")


def trainer_of(client, source, link, **options):
    return aiosync.LoopbackTrainerWeightTransferEngine(
        client=client, source=source, link=link, buffer_size_bytes=4096, **options
    )


def worker_of(model, **options):
    config = aiosync.WeightTransferConfig("loopback", **options)
    return aiosync.WeightTransferEngineFactory.create_engine(config, model=model, name="w")


async def faulty_round(method, fault, *, instead=True):
    """What a round raises whose client misbehaves once; the next one has to work."""
    source, copy = nn.Linear(4, 4), nn.Linear(4, 4)
    with LoopbackLink() as link:
        async with worker_of(copy) as worker:
            client = Faulty(worker, method, fault, instead=instead)
            async with trainer_of(client, source, link) as trainer:
                error = None
                try:
                    await trainer.send_weights(budget=Budget(total=5, stall=1.5))
                except Exception as raised:
                    error = raised
                assert trainer.state in (State.INITIALIZED, State.FAILED)
                client.active = False
                await trainer.send_weights(budget=BUDGET)
                assert torch.equal(source.weight, copy.weight)
                return error


# -- clients that say less than "it is done"


@pytest.mark.fault("A-SILENT-2")
@pytest.mark.parametrize(
    "method",
    ["start_weight_update", "update_weights", "prepare_weight_update", "finish_weight_update"],
)
async def test_a_stray_cancellation_of_a_client_is_not_success(method):
    error = await faulty_round(method, stray)
    assert isinstance(error, RuntimeError | aiosync.OutcomeUnknown)
    assert "somebody else's task" in str(error)


@pytest.mark.fault("A-SILENT-2")
@pytest.mark.parametrize(
    "method",
    ["start_weight_update", "update_weights", "prepare_weight_update", "finish_weight_update"],
)
async def test_a_client_that_cancels_its_own_task_is_not_success(method):
    def cancel():
        asyncio.current_task().cancel("somebody else's task")
        return asyncio.sleep(0)

    error = await faulty_round(method, cancel)
    assert isinstance(error, RuntimeError | aiosync.OutcomeUnknown)
    assert "somebody else's task" in str(error)


async def test_a_cancelled_task_of_the_library_is_not_success():
    """As of a program that cancels all tasks of the loop but those it knows."""

    def cancel():
        for task in asyncio.all_tasks() - mine:
            task.cancel()
        return {}

    mine = asyncio.all_tasks()
    error = await faulty_round("finish_weight_update", cancel)
    assert isinstance(error, aiosync.AiosyncError)


async def test_a_client_that_swallows_cancellation_does_not_keep_the_round():
    async def stay():
        while not over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    over = []
    try:
        error = await faulty_round("prepare_weight_update", stay)
        assert isinstance(error, aiosync.PhaseTimeout)
    finally:
        over.append(True)
        await end_those_left_behind()


async def end_those_left_behind():
    for task in set(foreign._LEFT):
        task.cancel()
        await asyncio.wait([task])


async def test_a_client_has_to_hand_inits_answer_on():
    model = nn.Linear(2, 2)
    with LoopbackLink() as link:
        async with worker_of(model) as worker:
            client = Faulty(worker, "init_weight_transfer_engine", lambda: None, instead=False)
            async with trainer_of(client, model, link) as trainer:
                with pytest.raises(aiosync.ProtocolMismatch, match="has to return it"):
                    await trainer.send_weights(budget=BUDGET)
                client.active = False
                await trainer.send_weights(budget=BUDGET)


@pytest.mark.fault("A-SILENT-2")
@pytest.mark.parametrize("answer", [{"success": False, "message": "no memory"}, (False, "no")])
async def test_a_returned_denial_is_not_success(answer):
    error = await faulty_round("update_weights", lambda: answer, instead=False)
    assert isinstance(error, aiosync.RemoteError)
    assert "reports a failure: no" in str(error)


@pytest.mark.fault("A-SILENT-2")
async def test_finish_without_the_workers_word_is_not_success():
    error = await faulty_round("finish_weight_update", lambda: None)
    assert isinstance(error, aiosync.OutcomeUnknown)


async def test_finish_whose_answer_got_lost_in_the_client_is_asked_for():
    assert await faulty_round("finish_weight_update", lambda: None, instead=False) is None


class Cancelling:
    """An async source that lets a cancellation of its own escape, after `count` tensors."""

    def __init__(self, model, count):
        self.inner, self.count = aiosync.ModuleSource(model), count
        self.metadata = self.inner.metadata

    async def iter_full(self):
        for position, pair in enumerate(self.inner.iter_full()):
            if position == self.count:
                stray()
            yield pair
        if self.count is not None:
            stray()


class Staying(Cancelling):
    """An async source that swallows every cancellation, until it is `over`."""

    over = False

    async def iter_full(self):
        for position, pair in enumerate(self.inner.iter_full()):
            while position == self.count and not self.over:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
            yield pair


async def test_an_async_source_that_swallows_cancellation_does_not_keep_the_round():
    async with looped(source=lambda model: Staying(model, 2)) as pair:
        try:
            with pytest.raises(aiosync.PhaseTimeout):
                await pair.trainer.send_weights(budget=Budget(total=5, stall=1))
        finally:
            pair.trainer.source.over = True
            await end_those_left_behind()
        pair.trainer.source.count = None
        await pair.assert_next_round_works()


@pytest.mark.parametrize("count", [0, 2, 6])
async def test_a_stray_cancellation_of_an_async_source_is_the_error(count):
    async with looped(source=lambda model: Cancelling(model, count)) as pair:
        with pytest.raises(RuntimeError, match="somebody else's task") as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert caught.value.report.outcome == "failed"
        pair.trainer.source.count = None
        await pair.assert_next_round_works()


async def test_a_hook_that_raises_a_cancellation_does_not_stop_the_flip():
    async with looped() as pair:
        pair.trainer.on_transition(lambda _: stray())
        await pair.assert_next_round_works()


async def test_a_gate_that_raises_a_cancellation_rejects():
    async with looped() as pair:
        remove = pair.trainer.gate("start", lambda _: stray())
        with pytest.raises(aiosync.GateRejected, match="raised CancelledError"):
            await pair.trainer.send_weights(budget=BUDGET)
        remove()
        await pair.assert_next_round_works()


async def test_a_rank_alone_that_does_not_send_is_no_success():
    async with looped(rank=1, is_sender=False, initialized=False) as pair:
        with pytest.raises(aiosync.Validation, match="rank 1 sends nothing"):
            await pair.trainer.send_weights(budget=BUDGET)


# -- modules that change between rounds


class Heads(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


async def send(trainer):
    return await trainer.send_weights(budget=BUDGET)


@pytest.mark.fault("A-NAMES-1")
async def test_weights_untied_between_rounds_both_travel():
    source, copy = Heads(tied=True), Heads(tied=False)
    with LoopbackLink() as link:
        async with (
            worker_of(copy) as worker,
            trainer_of(DirectClient(worker), source, link) as trainer,
        ):
            await send(trainer)
            source.head.weight = nn.Parameter(torch.full((5, 3), 7.0))
            await send(trainer)
            assert torch.equal(copy.head.weight, source.head.weight)
            assert torch.equal(copy.embed.weight, source.embed.weight)


@pytest.mark.fault("A-HANG-3")
async def test_a_parameter_added_between_rounds_is_sent_or_refused():
    async with looped() as pair:
        await send(pair.trainer)
        pair.model.extra = nn.Parameter(torch.ones(3))
        with pytest.raises(aiosync.Coverage, match="extra"):
            await send(pair.trainer)
        pair.copies[0].extra = nn.Parameter(torch.zeros(3))
        await pair.assert_next_round_works()


async def test_a_dtype_changed_between_rounds_is_announced_anew():
    async with looped() as pair:
        await send(pair.trainer)
        pair.model.half()
        pair.copies[0].half()
        await pair.assert_next_round_works()


async def test_a_module_changed_under_a_session_is_told_and_the_next_round_sends_it():
    async with looped(source=lambda m: aiosync.ModuleSource(m, session=nullcontext)) as pair:
        await send(pair.trainer)
        pair.model.extra = nn.Parameter(torch.ones(3))
        with pytest.raises(aiosync.Validation, match="not as announced: extra"):
            await send(pair.trainer)
        pair.copies[0].extra = nn.Parameter(torch.zeros(3))
        await pair.assert_next_round_works()


async def test_a_metadata_list_that_grows_in_place_is_noticed():
    class Growing:
        def __init__(self):
            self.metadata = [aiosync.ParamMeta("a", torch.float32, (2,))]

        def iter_full(self):
            for meta in self.metadata:
                yield meta.name, torch.ones(meta.shape)

    source = Growing()
    copy = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with LoopbackLink() as link:
        async with (
            worker_of(copy) as worker,
            trainer_of(DirectClient(worker), source, link) as trainer,
        ):
            with pytest.raises(aiosync.Coverage, match="b"):
                await send(trainer)
            source.metadata.append(aiosync.ParamMeta("b", torch.float32, (2,)))
            await send(trainer)
            assert copy["b"].tolist() == [1, 1]


async def test_a_source_that_cannot_be_announced_still_gets_its_report():
    reads = []

    def session():
        reads.append(asyncio._get_running_loop())  # None: not on the event loop
        return nullcontext()

    empty = nn.Linear(2, 2, device="meta")
    async with looped(source=lambda _: aiosync.ModuleSource(empty, session=session)) as pair:
        with pytest.raises(aiosync.Validation, match="meta device") as caught:
            await send(pair.trainer)
        assert caught.value.report is pair.trainer.last_report is not None
        assert reads == [None]


# -- life cycle


async def test_initialize_while_the_engine_is_closed_leaves_nothing_open():
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold(_, method):
        if method == "init_transfer_engine":
            reached.set()
            await go.wait()

    async with looped(initialized=False, before=hold) as pair:
        opening = asyncio.ensure_future(pair.trainer.initialize())
        await asyncio.wait_for(reached.wait(), 5)
        await pair.trainer.aclose()
        go.set()
        with pytest.raises(aiosync.InvalidTransition):
            await opening
        assert pair.trainer.state is State.CLOSED
        assert pair.trainer.sender is None


async def test_no_round_begins_while_the_engine_shuts_down():
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold(_, method):
        if method == "shutdown":
            reached.set()
            await go.wait()

    async with looped(before=hold) as pair:
        leaving = asyncio.ensure_future(pair.trainer.shutdown())
        await asyncio.wait_for(reached.wait(), 5)
        with pytest.raises(aiosync.Busy):
            await send(pair.trainer)
        with pytest.raises(aiosync.Busy):
            await pair.trainer.shutdown()
        go.set()
        await leaving
        await pair.assert_next_round_works()


async def test_a_worker_closed_during_its_init_has_no_receiver_left():
    async with looped(initialized=False) as pair:
        opened, closing = await asyncio.gather(
            pair.trainer.initialize(), pair.worker.aclose(), return_exceptions=True
        )
        assert closing is None
        assert pair.worker.state is State.CLOSED
        assert pair.worker.receiver is None
        assert isinstance(opened, aiosync.AiosyncError | None)


async def test_a_worker_shut_down_by_somebody_else_is_initialised_again():
    async with looped() as pair:
        await send(pair.trainer)
        await pair.worker.shutdown()
        report = await pair.assert_next_round_works()
        assert report.recovered


async def test_closing_a_worker_twice_at_once():
    async with looped() as pair:
        await asyncio.gather(pair.worker.aclose(), pair.worker.aclose())
        assert pair.worker.state is State.CLOSED


def test_a_round_whose_loop_was_closed_does_not_block_the_engine():
    source, copy = nn.Linear(4, 4), nn.Linear(4, 4)
    with LoopbackLink() as link:
        worker = worker_of(copy)
        trainer = trainer_of(DirectClient(worker), source, link)

        async def begin():
            update = trainer.begin_update(budget=BUDGET)
            await asyncio.sleep(0)
            return update

        loop = asyncio.new_event_loop()
        dropped = loop.run_until_complete(begin())
        loop.close()

        async def go_on():
            change(source)
            await trainer.send_weights(budget=BUDGET)
            assert torch.equal(source.weight, copy.weight)
            await trainer.aclose()
            await worker.aclose()

        asyncio.run(go_on())
        dropped._fate.awaited = True


test_a_round_whose_loop_was_closed_does_not_block_the_engine.pytestmark = [
    pytest.mark.filterwarnings("ignore")  # the round's coroutine is collected unfinished
]


# -- what the worker is left with


async def test_a_request_that_never_ends_does_not_keep_the_worker_in_the_round():
    async with looped() as pair:
        async with pair.worker.generation.request():
            with pytest.raises(aiosync.PhaseTimeout) as caught:
                await pair.trainer.send_weights(version=1, budget=Budget(total=2.5, cleanup=2))
            assert caught.value.phase == "finish"
            assert pair.worker.state is State.INITIALIZED
            assert pair.worker.weights == "intact"
            async with asyncio.timeout(5), pair.worker.generation.request():
                pass  # new requests are let in again
        await pair.assert_next_round_works()


class Loader:
    def __init__(self, error):
        self.error = error

    def load_weights(self, pairs):
        for _ in pairs:
            if self.error is not None:
                raise self.error


@pytest.mark.fault("A-STATE-5")
@pytest.mark.parametrize("error", [KeyError("mlp.x"), SystemExit(3)])
async def test_a_loader_that_fails_in_commit_is_quoted_and_its_weights_are_torn(error):
    loader, source = Loader(error), nn.Linear(4, 4)
    with LoopbackLink() as link:
        async with (
            worker_of(loader) as worker,
            trainer_of(DirectClient(worker), source, link) as trainer,
        ):
            with pytest.raises(aiosync.AiosyncError) as caught:
                await send(trainer)
            assert type(error).__name__ in str(caught.value)
            assert caught.value.weights == worker.weights == "torn"
            assert caught.value.report.members[0].weights == "torn"
            loader.error = None
            await send(trainer)
            assert worker.weights == "intact"


# -- arguments


@pytest.mark.parametrize(
    "make",
    [
        lambda: aiosync.WeightTransferEngineFactory.create_engine("ipc"),
        lambda: aiosync.FleetClient("http://127.0.0.1:1"),
        lambda: aiosync.FleetClient(None),
        lambda: trainer_of(DirectClient(None), nn.Linear(1, 1), LoopbackLink(), rank="x"),
        lambda: trainer_of(DirectClient(None), nn.Linear(1, 1), LoopbackLink(), lineage=3),
        lambda: trainer_of(DirectClient(None), nn.Linear(1, 1), LoopbackLink(), hub=3),
        lambda: aiosync.Version("\ud800", "run", 1),
    ],
)
async def test_bad_arguments_are_refused_by_name(make):
    with pytest.raises(aiosync.Validation):
        make()


@pytest.mark.parametrize("option", [{"dtype": "float16"}, {"rename": 3}])
async def test_bad_source_options_are_refused_by_name(option):
    with pytest.raises(TypeError, match=next(iter(option))):
        aiosync.ModuleSource(nn.Linear(1, 1), **option)


@pytest.mark.parametrize("where", [{"host": 3}, {"path": 3}, {"advertise": 3, "port": 0}])
async def test_bad_places_to_serve_at_are_refused_by_name(where):
    engine = worker_of(nn.Linear(1, 1))
    with pytest.raises(aiosync.Validation, match=next(iter(where))):
        async with aiosync.serve(engine, **where):
            pass
    with pytest.raises(TypeError, match="cannot be served"):
        async with aiosync.serve(None):
            pass
    await engine.aclose()


# -- clients and sources that open or close badly


class Opening(Faulty):
    """`fault` happens when the connections are opened or closed."""

    def __init__(self, engine, *, enter=None, leave=None):
        super().__init__(engine, None, None)
        self.enter, self.leave = enter, leave

    async def __aenter__(self):
        if self.enter is not None:
            await self.enter()
        return self

    async def __aexit__(self, *exc):
        if self.leave is not None:
            await self.leave()


async def never():
    await asyncio.sleep(60)


async def broken():
    raise OSError("the pool is gone")


@pytest.mark.parametrize("leave", [never, broken])
async def test_a_client_that_cannot_be_closed_does_not_undo_the_round(leave):
    source, copy = nn.Linear(4, 4), nn.Linear(4, 4)
    with LoopbackLink() as link:
        async with worker_of(copy) as worker:
            client = Opening(worker)
            async with trainer_of(client, source, link) as trainer, asyncio.timeout(20):
                await send(trainer)
                client.leave = leave
                change(source)
                report = await send(trainer)
                assert report.outcome == "committed"
                assert torch.equal(source.weight, copy.weight)


async def test_a_client_that_never_opens_ends_the_round_in_its_budget():
    source, copy = nn.Linear(4, 4), nn.Linear(4, 4)
    with LoopbackLink() as link:
        async with worker_of(copy) as worker:
            client = Opening(worker)
            async with trainer_of(client, source, link) as trainer, asyncio.timeout(20):
                await send(trainer)
                client.enter = never
                with pytest.raises(aiosync.PhaseTimeout, match="was not open within") as caught:
                    await trainer.send_weights(budget=Budget(total=0.2))
                assert caught.value.report is not None
                client.enter = None
                await send(trainer)


async def test_what_a_source_raises_while_it_is_closed_does_not_hide_the_cause():
    class Sloppy:
        def __init__(self, model):
            self.inner = aiosync.ModuleSource(model)
            self.metadata = self.inner.metadata

        def iter_full(self):
            try:
                for name, tensor in self.inner.iter_full():
                    yield name, tensor[:0]
            finally:
                raise ZeroDivisionError("in its finally")

    async with looped(source=Sloppy) as pair:
        with pytest.raises(aiosync.Validation, match="announced with shape") as caught:
            await send(pair.trainer)
        assert any("in its finally" in note for note in caught.value.__notes__)


@pytest.mark.fault("A-HANG-4")
@pytest.mark.asyncio
async def test_a_loader_that_blocks_for_good_in_commit_tears_the_weights_in_time(monkeypatch):
    import threading

    from aiosync import worker_commit
    from aiosync.defaults import Defaults
    from transports.loopback import LoopbackLink

    stuck = threading.Event()

    class Model:
        def load_weights(self, pairs):
            for _ in pairs:
                stuck.wait(20)

    monkeypatch.setattr(worker_commit, "DEFAULTS", Defaults(commit_s=0.3, cleanup_s=0.2))
    engine = aiosync.WeightTransferEngineFactory.create_engine(
        aiosync.WeightTransferConfig("loopback"), model=Model()
    )
    with LoopbackLink() as link:
        async with engine:
            trainer = await aiosync.WeightTransferTrainerFactory.trainer_init(
                aiosync.LoopbackTrainerInitInfo(rank=0, link=link),
                client=DirectClient(engine),
                source=torch.nn.Linear(3, 2),
            )
            async with trainer:
                with pytest.raises(aiosync.PhaseTimeout, match="swap"):
                    await trainer.send_weights(version=1)
                assert engine.weights == "torn"
                assert engine.state == "failed"
            stuck.set()


async def test_any_budget_that_is_accepted_is_one_that_a_worker_accepts():
    longest = Budget(total=1e9, admit=1e9, pause=1e9, stall=1e9, finish=1e9, cleanup=1e9)
    async with looped() as pair:
        report = await pair.trainer.send_weights(budget=longest)
        assert report.outcome == "committed"


async def test_a_workers_step_that_swallows_cancellation_does_not_keep_it_from_closing():
    over = []

    class Staying(aiosync.LoopbackWeightTransferEngine):
        async def receive_weights(self, update_info):
            while not over:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)

    model = nn.Linear(2, 2)
    worker = Staying(aiosync.WeightTransferConfig("loopback"), None, None, model, name="w")
    try:
        with LoopbackLink() as link:
            async with worker, trainer_of(DirectClient(worker), model, link) as trainer:
                with pytest.raises(aiosync.PhaseTimeout):
                    await trainer.send_weights(budget=Budget(total=5, stall=1))
        assert worker.state is State.CLOSED
    finally:
        over.append(True)
        await end_those_left_behind()


async def test_a_gate_that_swallows_cancellation_is_late_like_any_other():
    over = []

    async def stay(_):
        while not over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async with looped() as pair:
        remove = pair.trainer.gate("start", stay, timeout=1)
        try:
            with pytest.raises(aiosync.GateRejected, match="stay before 'start' did not answer"):
                await pair.trainer.send_weights(budget=BUDGET)
        finally:
            over.append(True)
            await end_those_left_behind()
        remove()
        await pair.assert_next_round_works()
