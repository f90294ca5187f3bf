"""Rounds that bring a source of their own: a draft's, an adapter's, another model's."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager

import models
import pytest
import torch
from looped import looped
from models import fingerprint

import aiosync
from aiosync import Draft, IteratorSource, ModuleSource, State, Validation
from transports.lane import Lane

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def with_draft(kind="odd", **options):
    """A pair whose draft has other tensors than its model, and the trained draft."""
    async with looped(**options) as pair:
        pair.worker.set_draft_model(models.make(kind, 9))
        await pair.trainer.shutdown()
        await pair.trainer.initialize()
        yield pair, models.make(kind, 4)


@pytest.mark.parametrize("background", [False, True])
async def test_a_draft_with_other_tensors_comes_from_its_own_source(background):
    async with with_draft() as (pair, trained):
        before = fingerprint(pair.copies[0])
        options = {"target": Draft(), "source": trained}
        if background:
            report = await pair.trainer.begin_update(version=3, **options)
        else:
            report = await pair.trainer.send_weights(version=3, **options)
        assert (report.outcome, report.target) == ("committed", "draft")
        assert fingerprint(pair.worker.draft_model) == fingerprint(trained)
        assert fingerprint(pair.copies[0]) == before
        # The engine's own source is as it was, and the draft's is kept.
        await pair.assert_next_round_works(1)
        with torch.no_grad():
            trained.big.add_(1)
        side = pair.trainer.source_side.of(settings(**options))
        feed, plan = side._feed, side._plan
        await pair.trainer.send_weights(**options)
        assert fingerprint(pair.worker.draft_model) == fingerprint(trained)
        assert pair.trainer.source_side.of(settings(**options)) is side
        assert (side._feed, side._plan) == (feed, plan)
        assert pair.trainer.held(Draft()).order == 4


def settings(**options):
    return aiosync.round_options.RoundSettings.of("send_weights", 1, options)


async def test_the_model_itself_may_come_from_elsewhere_for_a_round():
    async with looped() as pair:
        other = models.make("small", 8)
        await pair.trainer.send_weights(version=1, source=other)
        assert fingerprint(pair.copies[0]) == fingerprint(other) != fingerprint(pair.model)
        await pair.assert_next_round_works(2)


async def test_one_shot_iterators_and_other_lanes_are_sources_as_well():
    async with with_draft("small") as (pair, trained), Lane("own") as lane:
        names = list(dict(trained.named_parameters()))
        tensors = list(trained.parameters())
        once = IteratorSource(names, [t.dtype for t in tensors], [tuple(t.shape) for t in tensors])
        for order in (1, 2):
            once.set(zip(names, [t.detach() + order for t in tensors], strict=True))
            await pair.trainer.send_weights(target=Draft(), source=once)
            held = dict(pair.worker.draft_model.named_parameters())
            assert torch.equal(held[names[0]], tensors[0] + order)
        seen = []

        class Watched(ModuleSource):
            def iter_full(self):
                seen.append(threading.current_thread().name)
                yield from super().iter_full()

        await pair.trainer.send_weights(target=Draft(), source=Watched(trained, run_in=lane))
        assert seen
        assert set(seen) == {await lane.run(lambda: threading.current_thread().name)}
        assert fingerprint(pair.worker.draft_model) == fingerprint(trained)


@pytest.mark.parametrize("given", [object(), {"a": torch.zeros(2)}, "draft"])
async def test_what_is_no_source_is_refused_by_name(given):
    async with looped() as pair:
        before = list(pair.calls)
        for send in (pair.trainer.send_weights, pair.trainer.begin_update):
            with pytest.raises(Validation, match=r"source: \w+ is no source"):
                await send(source=given)
        assert pair.calls == before
        assert pair.trainer.state is State.INITIALIZED
        await pair.assert_next_round_works()


async def test_a_session_takes_no_source():
    async with looped() as pair:
        with pytest.raises(Validation, match="metadata="):
            pair.trainer.session(version=1, source=pair.model)
        await pair.assert_next_round_works()


async def test_sources_are_let_go_after_a_while_and_at_the_end():
    async with looped() as pair:
        side = pair.trainer.source_side
        for number in range(12):
            side.of(settings(target=aiosync.Adapter(f"a{number}"), source=pair.model))
        assert [*side._given] == [f"adapter:a{number}" for number in range(4, 12)]
        again = settings(target=aiosync.Adapter("a4"), source=pair.model)
        known = side.of(again)
        side.of(settings(source=pair.model))
        assert side.of(again) is known
        await pair.trainer.aclose()
        assert side._given == {}


# -- engines that write their own send_weights -----------------------------------------------------


class Passing(aiosync.LoopbackTrainerWeightTransferEngine):
    backend_name = "loopback"

    async def send_weights(self, *, version, source=None):
        return await super().send_weights(version=version)


class Deaf(aiosync.LoopbackTrainerWeightTransferEngine):
    backend_name = "loopback"

    async def send_weights(self, *, version):
        return await super().send_weights(version=version)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("cls", [Passing, Deaf])
async def test_an_override_that_takes_no_source_is_not_given_one(cls, background, monkeypatch):
    monkeypatch.setattr(aiosync, "LoopbackTrainerWeightTransferEngine", cls)
    async with looped() as pair:
        other = models.make("small", 8)
        trainer = pair.trainer
        send = trainer.begin_update if background else trainer.send_weights
        if cls is Deaf:
            with pytest.raises(Validation, match="send_weights of Deaf takes no source="):
                await send(version=1, source=other)
            assert pair.worker.version is None
        else:
            await send(version=1, source=other)
            assert fingerprint(pair.copies[0]) == fingerprint(other)
        await pair.trainer.send_weights(version=2)
        assert pair.is_equal()
