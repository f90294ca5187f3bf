"""Sessions: rounds whose tensors the caller pushes."""

from __future__ import annotations

import asyncio

import models
import pytest
import torch
from looped import BUDGET, change, looped
from ranked import ranks_over

import aiosync
from aiosync import (
    Busy,
    IPCTrainerInitInfo,
    ParamMeta,
    RemoteError,
    RoundCancelled,
    State,
    Validation,
    WeightTransferConfig,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from aiosync.testing import DirectClient
from transports.loopback import Fault

pytestmark = pytest.mark.asyncio


def pairs(model):
    return [(name, p.detach()) for name, p in model.named_parameters()]


async def push(pair, **options):
    """A whole round of what the model holds now."""
    async with pair.trainer.session(budget=BUDGET, **options) as session:
        for name, tensor in pairs(pair.model):
            await session.send(name, tensor)
    return session


@pytest.mark.fault("A-LIFETIME-1")
async def test_tensors_may_change_once_send_has_returned():
    async with looped(workers=2, kind="odd") as pair:
        async with pair.trainer.session(7, budget=BUDGET) as session:
            for name, tensor in pairs(pair.model):
                buffer = tensor.clone()
                await session.send(name, buffer)
                buffer.zero_()  # also the last one: it has been copied out
            assert isinstance(session, aiosync.PushSession)
            assert session.report is None
            assert pair.trainer.version is None
        report = session.report
        assert report is pair.trainer.last_report
        assert (report.outcome, report.version.label, report.round) == ("committed", 7, 1)
        assert session.version == report.version == pair.worker.version
        assert pair.is_equal(0)
        assert pair.is_equal(1)
        assert pair.illegal == []


async def test_sessions_and_the_engines_own_source_take_turns():
    async with looped() as pair:
        plans = []
        for _ in range(2):
            await pair.assert_next_round_works()
            change(pair.model)
            session = await push(pair)
            assert pair.is_equal()
            plans.append(session.update._round.plan)
            change(pair.model)
            await push_backwards(pair)
            assert pair.is_equal()
        await pair.assert_next_round_works()
        assert plans[0].digest == plans[1].digest


async def push_backwards(pair):
    """The whole model under other metadata than the engine's source has."""
    backwards = pairs(pair.model)[::-1]
    metadata = [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in backwards]
    async with pair.trainer.session(metadata=metadata, budget=BUDGET) as session:
        for name, tensor in backwards:
            await session.send(name, tensor)


async def test_what_the_worker_refuses_is_raised_by_the_session():
    async with looped() as pair:
        name, tensor = pairs(pair.model)[0]
        metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape))]
        with pytest.raises(RemoteError, match=r"does not cover the model.*0\.bias"):
            async with pair.trainer.session(metadata=metadata, budget=BUDGET) as session:
                await session.send(name, tensor)
        await pair.assert_next_round_works()


async def test_an_engine_without_a_source_of_its_own_needs_metadata():
    async with looped() as pair:
        pair.trainer.source_side.pushed.source._like = None
        with pytest.raises(Validation, match="metadata="):
            async with pair.trainer.session(budget=BUDGET):
                raise AssertionError("not entered")
        assert pair.trainer.admission.current is None
        metadata = [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in pairs(pair.model)]
        await push(pair, metadata=metadata)
        assert pair.is_equal()


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (lambda p: [p[1]], "position 0: expected 0.weight, got 0.bias"),
        (lambda p: [p[0], p[0]], "0.weight came twice"),
        (lambda p: [("x", p[0][1])], "got x, which is not announced"),
        (lambda p: [(p[0][0], p[0][1].half())], "announced as float32, yielded as float16"),
        (lambda p: [(p[0][0], p[0][1].t())], "announced with shape"),
        (lambda p: [(p[0][0], None)], "expected a tensor, got None"),
        (lambda p: [*p, p[0]], "0.weight came twice"),
        (lambda p: [*p, ("x", p[0][1])], "is extra"),
    ],
)
@pytest.mark.parametrize("caught_inside", [False, True])
async def test_what_was_not_announced_fails_the_send_and_the_round(lie, text, caught_inside):
    async with looped() as pair:
        with pytest.raises(Validation, match=text) as caught:
            async with pair.trainer.session(budget=BUDGET) as session:
                for name, tensor in lie(pairs(pair.model)):
                    try:
                        await session.send(name, tensor)
                    except Validation:
                        if not caught_inside:
                            raise
        assert caught.value.report is session.report
        assert session.report.outcome == "failed"
        assert pair.worker.state is State.INITIALIZED
        await pair.assert_next_round_works()


async def test_leaving_too_early_names_what_is_missing():
    async with looped() as pair:
        with pytest.raises(Validation, match=r"after 1 of 6 tensors: 0\.bias is missing"):
            async with pair.trainer.session(budget=BUDGET) as session:
                await session.send(*pairs(pair.model)[0])
        assert session.report.outcome == "failed"
        await pair.assert_next_round_works()


@pytest.mark.parametrize("at", [0, 3, 6])
async def test_an_exception_inside_cancels_the_round_and_comes_through(at):
    async with looped(workers=2) as pair:
        old = models.fingerprint(pair.copies[0])
        error = KeyError("mine")
        with pytest.raises(KeyError) as caught:
            async with pair.trainer.session(budget=BUDGET) as session:
                for name, tensor in pairs(pair.model)[:at]:
                    await session.send(name, tensor)
                raise error
        assert caught.value is error
        assert session.update.done
        assert session.report is None or session.report.outcome == "failed"
        assert models.fingerprint(pair.copies[0]) == old
        await pair.assert_next_round_works()


@pytest.mark.parametrize("at", [0, 3, 6])
async def test_a_task_that_is_cancelled_inside_cancels_the_round(at):
    async with looped() as pair:
        there = asyncio.Event()

        async def body():
            async with pair.trainer.session(budget=BUDGET) as session:
                for name, tensor in pairs(pair.model)[:at]:
                    await session.send(name, tensor)
                there.set()
                await asyncio.Event().wait()
                return session

        task = asyncio.ensure_future(body())
        async with asyncio.timeout(20):
            await there.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.trainer.admission.current is None
        await pair.assert_next_round_works()


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 60])
async def test_cancelling_a_send_or_the_exit_cancels_the_round(turns):
    async with looped() as pair:
        task = asyncio.ensure_future(push(pair))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            session = await task
        except asyncio.CancelledError:
            assert pair.trainer.admission.current is None
        else:
            assert session.report.outcome == "committed"
        await pair.assert_next_round_works()


@pytest.mark.parametrize("when", ["start", "stream", "finish"])
async def test_send_raises_what_ended_the_round(when):
    script = {"receiver": [Fault.raises(0, OSError("disk full"))]} if when == "stream" else None

    async def before(_, method):
        if method == f"{when}_weight_update" and not pair.model.training:
            raise OSError("no room")

    async with looped(script=script, before=before) as pair:
        pair.model.eval()
        with pytest.raises(Exception, match=r"no room|disk full") as caught:
            session = pair.trainer.session(budget=BUDGET)
            async with session:
                for _ in range(2 if when == "stream" else 1):
                    for name, tensor in pairs(pair.model):
                        await session.send(name, tensor)
                if when != "finish":
                    raise AssertionError("a send should have raised")
        assert caught.value is not None
        assert session.report.outcome in ("failed", "unknown")
        pair.model.train()
        if when != "finish":
            await pair.assert_next_round_works()


async def test_a_round_cancelled_by_its_handle_ends_the_send():
    async with looped() as pair:
        with pytest.raises(RoundCancelled):
            async with pair.trainer.session(budget=BUDGET) as session:
                await session.send(*pairs(pair.model)[0])
                session.update.cancel()
                for name, tensor in pairs(pair.model)[1:]:
                    await session.send(name, tensor)
        await pair.assert_next_round_works()


async def test_one_send_at_a_time_and_one_round_at_a_time():
    async with looped() as pair:
        async with pair.trainer.session(budget=BUDGET) as session:
            with pytest.raises(Busy, match="under way"):
                await pair.trainer.send_weights()
            with pytest.raises(Busy, match="under way"):
                async with pair.trainer.session():
                    pass
            first, *rest = pairs(pair.model)
            one = asyncio.ensure_future(session.send(*first))
            await asyncio.sleep(0)
            with pytest.raises(Busy, match=r"a send of 0\.weight"):
                await session.send(*rest[0])
            await one
            for name, tensor in rest:
                await session.send(name, tensor)
        assert pair.is_equal()
        with pytest.raises(Validation, match="over"):
            await session.send(*first)
        with pytest.raises(Validation, match="once"):
            async with session:
                pass
        with pytest.raises(Validation, match="entered"):
            _ = pair.trainer.session().report


async def test_a_refused_version_is_told_on_entering():
    async with looped() as pair:
        await push(pair, version=5)
        with pytest.raises(aiosync.AiosyncError, match="5"):
            async with pair.trainer.session(5, budget=BUDGET) as session:
                for name, tensor in pairs(pair.model):
                    await session.send(name, tensor)
        await pair.assert_next_round_works()


@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"source": torch.nn.Linear(1, 1)}, "takes no source="),
        ({"metadata": 7}, "'int' object is not iterable"),
        ({"rollback": "yes"}, "rollback must be True or False"),
    ],
)
async def test_a_session_that_is_wrong_on_one_rank_fails_on_all(me, wrong, text):
    async with ranks_over(1) as (it, engines):

        async def push_all(engine, **options):
            async with engine.session(budget=BUDGET, **options) as session:
                for name, tensor in pairs(it.model):
                    await session.send(name, tensor)
            return session.report.outcome

        calls = [push_all(e, **(wrong if at == me else {})) for at, e in enumerate(engines)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        for at, error in enumerate(errors):
            assert text in str(error)
            assert isinstance(error, aiosync.RemoteError) == (at != me)
        assert [engine.state for engine in engines] == [State.INITIALIZED] * 2
        assert it.holders() == set()
        assert await asyncio.gather(*map(push_all, engines)) == ["committed"] * 2
        assert it.holders() == {"w0"}


async def test_engines_that_write_send_weights_have_no_sessions():
    class Own(aiosync.LoopbackTrainerWeightTransferEngine):
        async def send_weights(self):
            return None

    async with looped() as pair:
        async with Own(
            client=pair.trainer.links[0].client, source=pair.model, link=pair.link
        ) as engine:
            with pytest.raises(Validation, match="Own overrides send_weights"):
                engine.session()


async def test_pushed_tensors_win_over_memory_that_workers_read_in_place(free_shm):
    model, copy = models.make("small", 1), models.make("small", 2)
    shared = await asyncio.to_thread(aiosync.share_tensors, model)
    config = WeightTransferConfig("ipc")
    worker = WeightTransferEngineFactory.create_engine(
        config=config, vllm_config=None, device=torch.device("cpu"), model=copy
    )
    async with worker:
        info = IPCTrainerInitInfo(rank=0, packed=True, shared=[shared])
        async with await WeightTransferTrainerFactory.trainer_init(
            init_info=info, client=DirectClient(worker), source=model
        ) as engine:
            await engine.send_weights(budget=BUDGET)
            assert models.fingerprint(copy) == models.fingerprint(model)
            async with engine.session(budget=BUDGET) as session:
                for name, tensor in pairs(model):
                    await session.send(name, tensor + 1)
            change(model)
            assert models.fingerprint(copy) == models.fingerprint(model)
