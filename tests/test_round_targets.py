"""Rounds of drafts and adapters: what they update, and whose version they carry."""

from __future__ import annotations

import models
import pytest
import torch
from looped import BUDGET, looped
from models import fingerprint
from processes import replica

import aiosync
from aiosync import Adapter, Draft, Model, PeerLost, Refused, State, Validation

pytestmark = pytest.mark.asyncio


def shifted(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return fingerprint(model)


@pytest.mark.parametrize("backend", ["ipc", "gloo"])
async def test_a_draft_of_a_worker_process_is_updated_and_the_model_is_not(backend):
    trained = models.make("small", 1)
    async with replica(seed=2, draft=3, backend=backend, tcp=True) as worker:
        before = await worker.facts()
        async with aiosync.connect(trained, workers=[worker.url], backend=backend) as sync:
            report = await sync.send_weights(version=5, target=Draft(), pause=aiosync.Pause())
            assert (report.outcome, report.target) == ("committed", "draft")
            facts = await worker.facts()
            assert facts["draft"] == fingerprint(trained)
            assert facts["prints"] == before["prints"]
            assert (facts["version"], facts["versions"]) == (None, {"draft": 5})
            assert (sync.version, sync.held(Draft()).label) == (None, 5)
            # The model has a version of its own, and rounds point at it again.
            prints = shifted(trained)
            assert (await sync.send_weights()).version.label == 1
            facts = await worker.facts()
            assert facts["prints"] == prints != facts["draft"]
            with pytest.raises(Refused, match="repeats"):
                await sync.send_weights(version=5, target=Draft())
            assert (await sync.send_weights(target=Draft())).version.label == 6
            assert (await worker.facts())["versions"] == {"draft": 6}
            assert sync.version.label == 1


async def with_draft(pair):
    for worker in pair.workers:
        worker.set_draft_model(models.make("small", 9))
    await pair.trainer.shutdown()
    await pair.trainer.initialize()
    return [worker.draft_model for worker in pair.workers]


async def test_a_ticket_carries_its_target():
    async with looped() as pair:
        (draft,) = await with_draft(pair)
        first = pair.trainer.make_ticket(target=Draft())
        model = pair.trainer.make_ticket()
        second = pair.trainer.make_ticket(target=Draft())
        orders = [ticket.version.order for ticket in (first, model, second)]
        assert orders == [1, 1, 2]
        assert aiosync.RoundTicket.decode(first.encode()) == first
        with pytest.raises(Validation, match=r"ticket\.target is draft"):
            await pair.trainer.send_weights(ticket=first, target=Model())
        report = await pair.trainer.send_weights(ticket=first.encode())
        assert (report.target, report.round) == ("draft", 1)
        assert fingerprint(draft) == fingerprint(pair.model)
        assert not pair.is_equal()
        await pair.trainer.send_weights(ticket=model)
        assert pair.is_equal()
        assert pair.worker.target_versions["draft"].order == 1


@pytest.mark.parametrize("delivered", [True, False])
async def test_a_lost_answer_is_settled_by_the_version_of_the_target(delivered):
    lost = [PeerLost("reset")]

    async def lose(member, method):
        if method == "finish_weight_update" and armed and lost:
            raise lost.pop()

    armed = False
    async with looped(**{"after" if delivered else "before": lose}) as pair:
        (draft,) = await with_draft(pair)
        await pair.trainer.send_weights(version=7)  # the model's order is another
        armed = True
        shifted(pair.model)
        report = await pair.trainer.send_weights(version=2, target=Draft(), budget=BUDGET)
        assert report.outcome == "committed"
        assert lost == []
        assert fingerprint(draft) == fingerprint(pair.model)
        assert pair.trainer.held(Draft()).label == 2
        assert pair.trainer.version.label == 7


@pytest.mark.parametrize("method", ["update_weights", "prepare_weight_update"])
async def test_a_draft_round_that_fails_leaves_the_model_the_target(method):
    failing = []

    async def fail(member, called):
        if called == method and failing:
            raise failing.pop()

    async with looped(before=fail) as pair:
        (draft,) = await with_draft(pair)
        before = fingerprint(draft)
        failing.append(RuntimeError("boom"))
        with pytest.raises(RuntimeError, match="boom"):
            await pair.trainer.send_weights(version=1, target=Draft(), budget=BUDGET)
        assert pair.worker.model is pair.copies[0]
        assert fingerprint(draft) == before
        assert (pair.trainer.held(Draft()), pair.worker.target_versions) == (None, {})
        await pair.assert_next_round_works()


async def test_an_adapter_by_its_name():
    async with looped() as pair:
        loaded = {}

        def resolve(target):
            if isinstance(target, Adapter):
                model = loaded.setdefault(target.name, models.make("small", 5))
                return model, target.config
            return pair.copies[0], None

        pair.worker.supports_adapters = True
        pair.worker.resolve_target = resolve
        await pair.trainer.shutdown()
        await pair.trainer.initialize()
        one, two = Adapter("one", {"rank": 4}), Adapter("two")
        await pair.trainer.send_weights(target=one)
        await pair.trainer.send_weights(target=one)
        await pair.trainer.send_weights(target=two)
        assert {k: v.order for k, v in pair.worker.target_versions.items()} == {
            "adapter:one": 2,
            "adapter:two": 1,
        }
        assert fingerprint(loaded["one"]) == fingerprint(pair.model)
        assert not pair.is_equal()


@pytest.mark.parametrize("target", [Draft(), Adapter("x")])
async def test_a_member_that_cannot_is_refused_before_anything_moves(target):
    async with looped() as pair:
        before = list(pair.calls)
        with pytest.raises(Refused, match=f"w0 cannot update {target.key}") as caught:
            await pair.trainer.send_weights(target=target)
        assert caught.value.replica == "w0"
        assert pair.calls == before
        assert pair.trainer.state is State.INITIALIZED
        with pytest.raises(Validation, match="target must be a Model"):
            await pair.trainer.send_weights(target="draft")
