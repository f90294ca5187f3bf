"""A worker's generation: who holds it, when it goes on, and what a round does to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from by_hand import ByHand, WithoutSink, by_hand, header, owned, tensors, values, whole_round

import aiosync
from aiosync import Busy, Fenced, Paused, PhaseTimeout, Refused, RoundHeader, Torn, Validation
from aiosync.worker_pausing import patience

pytestmark = pytest.mark.asyncio
OPERATOR = RoundHeader(owner="operator")


async def request_is_refused(engine, match):
    with pytest.raises(Paused, match=match):
        async with engine.generation.request(timeout=0.01):
            pytest.fail("entered")


async def test_what_one_party_paused_another_does_not_resume():
    async with by_hand() as engine:
        await owned(engine)
        trainer = header(engine, 0)
        await engine.pause_generation(mode="keep", header=trainer)
        await engine.pause_generation(header=OPERATOR)
        await engine.pause_generation(header=OPERATOR)  # the same call again is one hold
        assert [hold.owner for hold in engine.generation.holds] == ["trainer", "operator"]
        standing = await engine.resume_generation(header=trainer)
        assert (standing["is_paused"], standing["held_by"]) == (True, ["operator"])
        await engine.resume_generation()  # a client without a name never paused
        assert await engine.is_paused()
        assert engine.peer_state().detail["held_by"] == ["operator"]
        standing = await engine.resume_generation(header=OPERATOR)
        assert (standing["is_paused"], standing["held_by"]) == (False, [])
        assert standing["seconds_paused"] > 0
        async with engine.generation.request():
            pass


async def test_a_pause_that_cannot_be_had_changes_nothing():
    async with by_hand() as engine:
        await engine.pause_generation(mode="keep", header=OPERATOR)
        before = engine.generation.holds
        async with asyncio.TaskGroup() as group:
            entered = asyncio.Event()

            async def generate():
                async with engine.generation.request() as request:
                    entered.set()
                    assert await request.wait_aborted()

            await engine.resume_generation(header=OPERATOR)
            group.create_task(generate())
            await entered.wait()
            with pytest.raises(PhaseTimeout):
                await engine.pause_generation(mode="wait", header=OPERATOR, timeout=0)
            assert engine.generation.holds == ()
            assert engine.generation.state == "running"
            assert await engine.abort_requests() == 1
        assert before
        with pytest.raises(Validation, match="mode"):
            await engine.pause_generation(mode="stop")
        assert engine.generation.state == "running"


async def test_a_fenced_trainer_neither_pauses_nor_resumes():
    async with by_hand() as engine:
        await owned(engine)
        old = header(engine, 1)
        await engine.pause_generation(mode="keep", header=old)
        await owned(engine)  # the same trainer, restarted
        with pytest.raises(Fenced, match=f"epoch {old.epoch} of trainer is over"):
            await engine.resume_generation(header=old)
        with pytest.raises(Fenced):
            await engine.pause_generation(header=old)
        await engine.resume_generation(header=header(engine, 1))
        assert not await engine.is_paused()


async def test_a_silent_trainers_hold_ends_with_its_lease_and_a_plain_clients_does_not():
    async with by_hand() as engine:
        await owned(engine)
        short = header(engine, 0, lease_s=1.0)
        await engine.pause_generation(mode="keep")
        await engine.pause_generation(mode="keep", header=short)
        for _ in range(8):  # twice the lease
            await asyncio.sleep(0.25)
            engine.touch(short)
        assert len(engine.generation.holds) == 2
        async with asyncio.timeout(20):
            while len(engine.generation.holds) == 2:
                await asyncio.sleep(0.02)
        assert await engine.is_paused()
        await engine.resume_generation()
        assert not await engine.is_paused()


async def test_a_hold_outlives_its_lease_while_its_round_is_open():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1, lease_s=1.0)
        await engine.pause_generation(mode="keep", header=this)
        await engine.start_weight_update(header=this)
        for _ in range(8):
            await asyncio.sleep(0.25)
            engine.cycle.session.touch()
        assert [hold.owner for hold in engine.generation.holds] == ["trainer"]
        await engine.abort_weight_update(header=this)
        await engine.resume_generation(header=this)


@pytest.mark.parametrize("cls", [ByHand, WithoutSink])
@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_generation_stands_still_before_the_first_write_and_goes_on_after_commit(cls, sink):
    early = sink == "in_place" or cls is WithoutSink
    async with by_hand(cls, sink=sink) as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        assert engine.generation.state == "running"
        await engine.update_weights({"value": 1.0}, header=this)
        assert engine.generation.state == ("paused" if early else "running")
        if early:  # queued, not refused: the round is under way
            asking = asyncio.create_task(version_of_a_request(engine))
            await asyncio.sleep(0)
            assert not asking.done()
        await engine.prepare_weight_update(header=this)
        await engine.finish_weight_update("1", header=this)
        assert engine.generation.state == "running"
        assert (await version_of_a_request(engine)).label == 1
        if early:
            assert (await asking).label == 1


async def version_of_a_request(engine):
    async with engine.generation.request() as request:
        return request.version


@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_torn_weights_stay_paused_until_a_complete_round(sink):
    async with by_hand(sink=sink) as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.pause_generation(mode="keep", header=this)
        await engine.start_weight_update(header=this)
        with pytest.raises(OSError, match="tensor 3"):
            await engine.update_weights({"value": 1.0, "fail_at": 3, "batch": 2}, header=this)
        if sink == "staged":
            assert not (await engine.resume_generation(header=this))["is_paused"]
            return
        assert engine.weights == "torn"
        with pytest.raises(Torn, match="stays paused: the weights are torn") as caught:
            await engine.resume_generation(header=this)
        assert caught.value.weights == "torn"
        assert [hold.owner for hold in engine.generation.holds] == ["weights"]
        await request_is_refused(engine, "the weights are torn")
        await owned(engine)
        await whole_round(engine, 1, 2)
        assert engine.generation.state == "running"
        assert values(engine.model) == {2.0}


async def test_requests_that_run_into_torn_weights_are_ended():
    async with by_hand(sink="in_place") as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        parked = asyncio.Event()

        async def generate():
            async with engine.generation.request() as request:
                while True:
                    parked.set()
                    await request.checkpoint()
                    await asyncio.sleep(0.001)
            return request.abort_reason

        generating = asyncio.create_task(generate())
        await parked.wait()
        await engine.start_weight_update(header=this)
        with pytest.raises(OSError, match="tensor 3"):
            await engine.update_weights({"value": 1.0, "fail_at": 3, "batch": 2}, header=this)
        assert "torn" in await generating


async def test_a_round_that_cannot_have_generation_still_writes_nothing(monkeypatch):
    short = aiosync.defaults.Defaults(pause_s=0.05)
    monkeypatch.setattr("aiosync.worker_pausing.DEFAULTS", short)
    async with by_hand(sink="in_place") as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        async with engine.generation.request():
            await engine.start_weight_update(header=this)
            with pytest.raises(PhaseTimeout, match="still running"):
                await engine.update_weights({"value": 1.0}, header=this)
        assert (values(engine.model), engine.weights) == ({0.0}, "intact")
        assert engine.generation.state == "running"
        await whole_round(engine, 2, 2)


async def test_an_update_waits_for_requests_no_longer_than_the_trainer_for_the_update():
    async with by_hand(sink="in_place") as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        async with engine.generation.request(id="chat-7"):
            await engine.start_weight_update(header=this)
            late = msgspec.structs.replace(this, deadline_s=0.01)
            with pytest.raises(PhaseTimeout, match=r"after 0\.01 s: chat-7") as caught:
                await engine.update_weights({"value": 1.0}, header=late)
            assert "checkpoint()" in caught.value.next_step
        assert (values(engine.model), engine.weights) == ({0.0}, "intact")
        await whole_round(engine, 2, 2)


@pytest.mark.parametrize(
    ("stall", "deadline", "seconds"),
    [(None, None, 60), (30.0, None, 29), (30.0, 2.0, 1.8), (2.0, 3600.0, 1.8), (900.0, None, 60)],
)
async def test_how_long_an_update_may_wait(stall, deadline, seconds):
    info = SimpleNamespace() if stall is None else SimpleNamespace(stall_s=stall)
    sent = None if deadline is None else RoundHeader(owner="t", deadline_s=deadline)
    assert patience(info, sent) == pytest.approx(seconds)


async def test_a_cache_that_cannot_be_emptied_costs_the_round_and_not_the_weights():
    async with by_hand() as engine:
        await owned(engine)
        engine.generation.tie_cache("flush", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await whole_round(engine, 1, 1)
        assert (values(engine.model), engine.weights, engine.version) == ({0.0}, "intact", None)
        flushed = []
        engine.generation.tie_cache("flush", flushed.append)
        await owned(engine)
        await whole_round(engine, 1, 1)
        assert flushed == [engine.generation.weights.weights_id]


async def test_weights_ids_never_repeat():
    async with by_hand() as engine:
        await engine.init_transfer_engine({})
        seen = [engine.generation.weights.weights_id]
        for label in (None, None, "a", "a"):
            await engine.start_weight_update()
            await engine.update_weights({"value": 1.0})
            await engine.finish_weight_update(label)
            seen.append(engine.generation.weights.weights_id)
        await owned(engine)
        for number in (1, 2):  # the same version again: other bytes for all that anybody knows
            this = header(engine, number, 7, rollback=True)
            await engine.start_weight_update(header=this)
            await engine.update_weights({"value": 1.0}, header=this)
            await engine.finish_weight_update("7", header=this)
            seen.append(engine.generation.weights.weights_id)
        assert len(set(seen)) == len(seen)


async def test_each_span_is_what_a_reference_of_its_version_computes():
    """A generation over three versions; every token is recomputed on a copy of its version."""
    async with by_hand() as engine:
        await owned(engine)
        references = {"default": {name: t.clone() for name, t in engine.model.items()}}
        tokens = []

        def step(model, at):
            return float((model[f"t{at % len(model):02}"] * (at + 1)).sum().sin())

        async def generate():
            async with engine.generation.request() as request:
                for at in range(30):
                    await request.checkpoint()
                    tokens.append(step(engine.model, at))
                    request.produced()
                    await asyncio.sleep(0.002)
                return request.spans

        generating = asyncio.create_task(generate())
        for order in (1, 2):
            while len(tokens) < 8 * order:
                await asyncio.sleep(0.001)
            await whole_round(engine, order, order)
            references[str(order)] = {name: t.clone() for name, t in engine.model.items()}
        spans = await generating
        assert [span.version for span in spans] == ["default", "1", "2"]
        assert [spans[0].start, *(span.end for span in spans)] == [
            0, spans[1].start, spans[2].start, 30,
        ]  # fmt: skip
        assert len({span.weights_id for span in spans}) == 3
        for span in spans:
            again = [step(references[span.version], at) for at in range(span.start, span.end)]
            assert again == tokens[span.start : span.end]


# -- labels and checks -----------------------------------------------------------------------------


async def test_the_label_of_what_serves_can_be_changed_between_rounds():
    async with by_hand() as engine:
        await engine.init_transfer_engine({})
        await engine.update_weight_version("base")
        assert (engine.version.label, engine.version.order) == ("base", 1)
        await engine.start_weight_update()
        with pytest.raises(Busy):
            await engine.update_weight_version("x")
        await engine.update_weights({"value": 1.0})
        await engine.finish_weight_update()  # as vLLM's Ray client: the label comes afterwards
        await engine.update_weight_version("one")
        assert (engine.version.label, engine.version.order) == ("one", 2)
        await engine.update_weight_version("uno")
        assert (engine.version.label, engine.version.order) == ("uno", 2)
        assert (await version_of_a_request(engine)).label == "uno"
        with pytest.raises(Validation):
            await engine.update_weight_version(3)
        await owned(engine)
        with pytest.raises(Fenced):
            await engine.update_weight_version("y")
        await engine.update_weight_version("y", header=header(engine, 0))


async def test_the_checker_hashes_compares_and_resets():
    async with by_hand() as engine:
        await engine.init_transfer_engine({})
        first = (await engine.weight_checker("checksum"))["checksums"]
        assert len(first) == len(engine.model)
        assert {len(value) for value in first.values()} == {64}
        assert "dp0:pp0:pcp0:tp0:t00" in first
        engine.model["t01"][3] = 1.0
        found = await engine.weight_checker("compare", first)
        assert found == {"match": False, "mismatches": ["dp0:pp0:pcp0:tp0:t01"]}
        missing = {key: value for key, value in first.items() if not key.endswith("t02")}
        assert (
            "dp0:pp0:pcp0:tp0:t02"
            in (await engine.weight_checker("compare", missing))["mismatches"]
        )
        engine.model["t01"][3] = 0.0
        assert await engine.weight_checker("compare", first) == {"match": True, "mismatches": []}
        for action, baseline in (("compare", None), ("burn", {})):
            with pytest.raises(Validation):
                await engine.weight_checker(action, baseline)
        engine.model["t00"].fill_(5.0)
        assert await engine.weight_checker("reset") == {"status": "reset"}
        assert values(engine.model) == {0.0}
        assert engine.weights == "unknown"
        await request_is_refused(engine, "the weights are unknown")
        await engine.start_weight_update()
        with pytest.raises(Busy):
            await engine.weight_checker("checksum")
        await engine.update_weights({"value": 1.0})
        await engine.finish_weight_update("1")
        assert await version_of_a_request(engine)


# -- targets ---------------------------------------------------------------------------------------


async def test_a_round_of_the_draft_leaves_the_model_alone_and_has_its_own_version():
    async with by_hand() as engine:
        draft = tensors(9.0)
        engine.set_draft_model(draft, "config")
        await owned(engine)
        await whole_round(engine, 1, 5)
        this = header(engine, 2, 3)  # older than the model's: it is another target
        await engine.start_draft_weight_update(header=this)
        assert (engine.model is draft, engine.model_config) == (True, "config")
        assert engine.peer_state().detail["target"] == "draft"
        await engine.update_weights({"value": 2.0}, header=this)
        await engine.finish_weight_update("3", header=this)
        assert engine.model is not draft
        assert (values(engine.model), values(draft)) == ({5.0}, {2.0})
        assert engine.version.label == 5
        assert engine.peer_state().versions["draft"].label == 3
        assert "draft" in engine.peer_state().features
        again = header(engine, 3, 3, target=aiosync.Draft())
        with pytest.raises(Refused, match="repeats version"):
            await engine.start_weight_update(header=again)
        assert engine.model is not draft
        await whole_round(engine, 3, 6)
        assert values(engine.model) == {6.0}


@pytest.mark.parametrize("end", ["abort", "error", "cancel", "lease", "close", "gate"])
async def test_the_target_is_restored_on_every_path(end):
    async with by_hand() as engine:
        engine.set_draft_model(tensors())
        own = engine.model
        await owned(engine)
        this = header(engine, 1, 1, lease_s=0.2 if end == "lease" else 30.0)
        if end == "gate":
            remove = engine.gate("complete", lambda _: False)
        await engine.start_draft_weight_update(header=this)
        assert engine.model is not own
        if end == "abort":
            await engine.abort_weight_update(header=this)
        elif end == "error":
            engine.errors["update"] = OSError("disk gone")
            with pytest.raises(OSError, match="disk gone"):
                await engine.update_weights({"value": 1.0}, header=this)
        elif end == "cancel":
            engine.hold("update")
            task = asyncio.create_task(engine.update_weights({"value": 1.0}, header=this))
            await engine.reached["update"].wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.abort_weight_update(header=this)
            del engine.reached["update"]
        elif end == "lease":
            async with asyncio.timeout(10):
                await engine.wait_for("initialized")
        elif end == "gate":
            await engine.update_weights({"value": 1.0}, header=this)
            with pytest.raises(aiosync.GateRejected):
                await engine.finish_weight_update("1", header=this)
            remove()
        else:
            await engine.aclose()
        assert engine.model is own
        assert engine.peer_state().detail["target"] == "model"
        if end != "close":
            await owned(engine)
            await whole_round(engine, 1, 2)
            assert values(own) == {2.0}


async def test_a_draft_round_that_is_refused_at_start_points_nowhere_else():
    async with by_hand() as engine:
        await owned(engine)
        with pytest.raises(Refused, match="no draft model"):
            await engine.start_draft_weight_update(header=header(engine, 1, 1))
        with pytest.raises(Refused, match="takes no adapters"):
            lora = aiosync.Adapter("lora", {"rank": 8})
            await engine.start_weight_update(header=header(engine, 1, 1, target=lora))
        engine.set_draft_model(tensors())
        remove = engine.gate("start", lambda _: False)
        with pytest.raises(aiosync.GateRejected):
            await engine.start_draft_weight_update(header=header(engine, 1, 1))
        remove()
        await whole_round(engine, 1, 1)
        with pytest.raises(Fenced):  # an old number: judged after the target was set
            await engine.start_draft_weight_update(header=header(engine, 1, 2))
        assert engine.peer_state().detail["target"] == "model"
        assert engine.state == "initialized"

        class NoDraft(ByHand):
            supports_draft_weight_update = False

    async with by_hand(NoDraft) as engine:
        engine.set_draft_model(tensors())
        await owned(engine)
        with pytest.raises(Refused, match="does not update draft models"):
            await engine.start_draft_weight_update(header=header(engine, 1, 1))
        assert "draft" not in engine.peer_state().features


async def test_a_torn_draft_is_mended_by_a_round_of_the_draft_only():
    async with by_hand(sink="in_place") as engine:
        engine.set_draft_model(tensors())
        await owned(engine)
        draft = header(engine, 1, 1)
        await engine.start_draft_weight_update(header=draft)
        with pytest.raises(OSError, match="tensor 3"):
            await engine.update_weights({"value": 1.0, "fail_at": 3, "batch": 2}, header=draft)
        assert engine.weights == "torn"
        await owned(engine)
        await whole_round(engine, 1, 2)
        assert engine.weights == "torn"
        this = header(engine, 2, 3)
        await engine.start_draft_weight_update(header=this)
        await engine.update_weights({"value": 3.0}, header=this)
        await engine.finish_weight_update("3", header=this)
        assert (engine.weights, engine.generation.state) == ("intact", "running")


async def test_an_engine_may_route_adapters_itself():
    adapters = {}

    class WithAdapters(ByHand):
        supports_adapters = True

        def resolve_target(self, target):
            if isinstance(target, aiosync.Adapter):
                return adapters.setdefault(target.name, tensors()), target.config
            return super().resolve_target(target)

    async with by_hand(WithAdapters) as engine:
        await owned(engine)
        for number, name in enumerate(("a", "b"), 1):
            target = aiosync.Adapter(name, {"rank": 8})
            this = header(engine, number, 1, target=target)
            await engine.start_weight_update(header=this)
            assert engine.model_config == {"rank": 8}
            await engine.update_weights({"value": float(number)}, header=this)
            await engine.finish_weight_update("1", header=this)
        assert [values(adapters[name]) for name in "ab"] == [{1.0}, {2.0}]
        assert values(engine.model) == {0.0}
        assert set(engine.peer_state().versions) == {"adapter:a", "adapter:b"}
        assert engine.version is None
