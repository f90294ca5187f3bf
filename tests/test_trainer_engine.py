"""A trainer engine over in-process workers: handle, versions, life cycle, faults."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import time

import models
import pytest
from limits import SLACK
from looped import BUDGET, change, looped
from paced import Hold, Paced

import aiosync
from aiosync import (
    Budget,
    Busy,
    DigestMismatch,
    Fenced,
    GateRejected,
    InvalidTransition,
    OutcomeUnknown,
    PeerLost,
    PhaseTimeout,
    Refused,
    RemoteError,
    RoundCancelled,
    State,
    Validation,
    Version,
)
from transports.loopback import Fault, LoopbackLink

pytestmark = pytest.mark.asyncio

SHORT = Budget(total=10.0, stall=0.6, cleanup=1.0)  # of rounds that only the clock ends
STATES_AFTER = (State.INITIALIZED, State.FAILED)


class At:
    """A hook that holds one method of one member, or raises in it."""

    def __init__(self, method, *, member=None, error=None):
        self.method, self.member, self.error = method, member, error
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.active = True

    async def __call__(self, member, method):
        if not self.active or method != self.method or self.member not in (None, member):
            return
        self.reached.set()
        if self.error is not None:
            raise self.error
        await self.go.wait()


async def until(event, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not event.is_set():
            await asyncio.sleep(0.005)


def paced(hold):
    return lambda model: Paced(model, hold)


def heal(pair):
    pair.trainer.source.before = lambda _: None


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


# -- the main job


@pytest.mark.parametrize("sink", ["staged", "in_place"])
@pytest.mark.parametrize("verify", ["digest", "counts"])
async def test_rounds_arrive_bit_equal(sink, verify):
    async with looped(workers=2, sink=sink, verify=verify) as pair:
        for _ in range(3):
            await pair.assert_next_round_works()
        assert pair.path == ["initialize", *["start", "update", "finalize", "complete"] * 3]


@pytest.mark.parametrize("kind", ["odd", "tied"])
async def test_odd_tensors_arrive_bit_equal(kind):
    async with looped(kind=kind) as pair:
        report = await pair.trainer.send_weights()
        assert report.outcome == "committed"
        assert pair.is_equal()


async def test_report_of_a_round():
    async with looped(workers=2) as pair:
        report = await pair.trainer.send_weights(version=7)
        assert report is pair.trainer.last_report
        assert report.version == Version(7, pair.trainer.lineage, 7)
        assert (report.outcome, report.round, report.backend) == ("committed", 1, "loopback")
        assert report.nbytes == sum(p.nbytes for p in pair.model.parameters())
        assert set(report.seconds) == {"admit", "start", "update", "prepare", "finish", "total"}
        assert report.verified
        assert report.digest
        assert not report.recovered
        assert [(m.name, m.outcome, m.weights) for m in report.members] == [
            ("w0", "committed", "intact"),
            ("w1", "committed", "intact"),
        ]
        metrics = report.metrics("sync")
        assert all(isinstance(value, float) for value in metrics.values())
        assert metrics["sync/committed"] == 1.0
        assert metrics["sync/version_order"] == 7.0
        assert metrics["sync/members/committed"] == 2.0
        assert metrics["sync/seconds/total"] >= metrics["sync/seconds/update"]


async def test_report_of_a_round_that_never_began_claims_nothing_of_the_last_one():
    async with looped(workers=2) as pair:
        await pair.assert_next_round_works()
        pair.trainer.gate("start", lambda _: False)
        with pytest.raises(aiosync.GateRejected) as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        report = caught.value.report
        assert [member.outcome for member in report.members] == ["failed", "failed"]
        assert (report.nbytes, report.seconds["total"] > 0) == (0, True)
        assert all(member.weights == "intact" for member in report.members)


async def test_report_of_a_failed_round_is_on_its_error():
    async with looped(script={"receiver": [Fault.raises(2, OSError("disk full"))]}) as pair:
        with pytest.raises(RemoteError, match="disk full") as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        error = caught.value
        assert error.report is pair.trainer.last_report
        assert (error.replica, error.phase, error.round) == ("w0", "update", 1)
        assert error.weights == "intact"
        assert error.report.outcome == "failed"
        (member,) = error.report.members
        assert (member.outcome, member.phase, member.weights) == ("failed", "update", "intact")
        assert "disk full" in member.error
        assert error.report.metrics()["aiosync/committed"] == 0.0
        await pair.assert_next_round_works()


# -- the handle


async def test_several_tasks_await_one_handle():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        update = pair.trainer.begin_update(version=1)
        waiters = [asyncio.ensure_future(update.wait()) for _ in range(3)]
        await until(hold.reached)
        assert not update.done
        assert update.report is None
        hold.released.set()
        reports = await asyncio.gather(*waiters)
        assert all(report is reports[0] for report in reports)
        assert await update is reports[0]
        assert update.report is reports[0]
        assert (update.number, update.version.label) == (1, 1)
        assert "committed" in repr(update)


@pytest.mark.parametrize("how", ["wait_for", "timeout", "cancel"])
async def test_giving_up_one_await_does_not_end_the_round(how):
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        update = pair.trainer.begin_update(version=1)
        await until(hold.reached)
        if how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(update.wait(), 0.05)
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await update
        else:
            waiter = asyncio.ensure_future(update.wait())
            await settled()
            waiter.cancel()
            await asyncio.wait([waiter])
            assert waiter.cancelled()
        assert not update.done
        hold.released.set()
        assert (await update).outcome == "committed"
        assert pair.is_equal()


async def test_cancel_gives_every_waiter_round_cancelled():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        old = models.fingerprint(pair.copies[0])
        update = pair.trainer.begin_update(version=1)
        waiters = [asyncio.ensure_future(update.wait()) for _ in range(3)]
        await until(hold.reached)
        update.cancel()
        update.cancel()
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        for waiter in waiters:
            with pytest.raises(RoundCancelled) as caught:
                await waiter
        assert caught.value.report.outcome == "failed"
        assert update.report is caught.value.report
        assert models.fingerprint(pair.copies[0]) == old
        assert pair.trainer.state is State.INITIALIZED
        heal(pair)
        await pair.assert_next_round_works(1)
        update.cancel()
        assert pair.trainer.state is State.INITIALIZED


async def test_cancel_before_the_first_step():
    async with looped() as pair:
        update = pair.trainer.begin_update(version=1)
        update.cancel()
        with pytest.raises(RoundCancelled):
            await update
        assert pair.path == ["initialize"]
        await pair.assert_next_round_works(1)


@pytest.mark.parametrize("leaves", ["normally", "by an error"])
async def test_leaving_the_block_cancels_an_unfinished_round(leaves):
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        try:
            async with pair.trainer.begin_update(version=1) as update:
                await until(hold.reached)
                asyncio.get_running_loop().call_later(0.3, hold.released.set)
                if leaves == "by an error":
                    raise KeyError("mine")
        except KeyError:
            assert leaves == "by an error"
        assert update.done
        with pytest.raises(RoundCancelled):
            await update
        heal(pair)
        await pair.assert_next_round_works(1)


async def test_leaving_the_block_after_the_end_changes_nothing():
    async with looped() as pair:
        async with pair.trainer.begin_update(version=1) as update:
            report = await update
        assert report.outcome == "committed"
        assert pair.worker.version.label == 1


async def test_released_comes_before_the_end():
    hold = At("prepare_weight_update")
    async with looped(before=hold) as pair:
        update = pair.trainer.begin_update(version=1)
        assert not update.released.is_set()
        async with asyncio.timeout(5):
            await update.released
        assert not update.done
        sent = models.fingerprint(pair.model)
        change(pair.model)  # the step goes on
        hold.go.set()
        await update
        assert models.fingerprint(pair.copies[0]) == sent


async def test_released_also_comes_when_the_round_fails():
    async with looped(script={"sender": [Fault.raises(0, OSError("nic"))]}) as pair:
        update = pair.trainer.begin_update(version=1, budget=BUDGET)
        async with asyncio.timeout(5):
            await update.released
        with pytest.raises(OSError, match="nic"):
            await update


async def test_progress_is_iterated_to_the_end():
    async with looped(script={"sender": [Fault.delay(3, 0.2)]}) as pair:
        seen = [moment async for moment in pair.trainer.begin_update(version=1)]
        total = sum(p.nbytes for p in pair.model.parameters())
        assert seen[-1].nbytes == total
        assert seen[-1].total_bytes == total
        assert seen[-1].state == "initialized"
        assert [m.nbytes for m in seen] == sorted(m.nbytes for m in seen)
        assert len(set(seen)) == len(seen) > 1


async def test_leaving_the_progress_loop_cancels_nothing():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        update = pair.trainer.begin_update(version=1)
        async for moment in update:
            if moment.phase == "update":
                break
        hold.released.set()
        assert (await update).outcome == "committed"


@pytest.mark.parametrize("dropped", ["before the end", "after the end"])
async def test_dropped_handle_of_a_failed_round_logs_once(caplog, dropped):
    async with looped(script={"receiver": [Fault.raises(1, OSError("disk full"))]}) as pair:
        with caplog.at_level(logging.ERROR, "aiosync"):
            update = pair.trainer.begin_update(version=1, budget=BUDGET)
            if dropped == "before the end":
                del update
                gc.collect()
            async with asyncio.timeout(5):
                while pair.trainer.last_report is None:
                    await asyncio.sleep(0.01)
            await settled()
            if dropped == "after the end":
                assert caplog.records == []
                del update
                gc.collect()
        (record,) = (r for r in caplog.records if r.name.startswith("aiosync"))
        assert "disk full" in record.getMessage()


async def test_handle_that_somebody_awaited_logs_nothing(caplog):
    async with looped(script={"receiver": [Fault.raises(1, OSError("disk full"))]}) as pair:
        with caplog.at_level(logging.ERROR, "aiosync"):
            update = pair.trainer.begin_update(version=1, budget=BUDGET)
            with pytest.raises(RemoteError):
                await update
            del update
            gc.collect()
        assert caplog.records == []


async def test_a_member_stops_waiting_in_finish_before_the_trainer_does():
    async with looped() as pair:
        client = pair.trainer.links[0].client
        finish, limits = client.finish_weight_update, []

        async def spy(*args, header, **options):
            limits.append(header.deadline_s)
            return await finish(*args, header=header, **options)

        client.finish_weight_update = spy
        await pair.trainer.send_weights(budget=Budget(total=60, finish=20, cleanup=1))
        await pair.trainer.send_weights(budget=Budget(total=20, finish=60, cleanup=1))
        assert all(limit <= 19 for limit in limits)
        assert len(limits) == 2


# -- busy


@pytest.mark.fault("A-STATE-1")
async def test_busy_names_round_version_and_phase():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        update = pair.trainer.begin_update(version=5)
        await until(hold.reached)
        for call in (
            lambda: pair.trainer.send_weights(version=6),
            lambda: pair.trainer.send_weights(version=6, on_busy="raise"),
        ):
            with pytest.raises(Busy, match=r"round 1 \(version 5\) is under way in phase update"):
                await call()
        with pytest.raises(Busy, match="version 5"):
            pair.trainer.begin_update(version=6)
        with pytest.raises(Busy):
            await pair.trainer.shutdown()
        with pytest.raises(InvalidTransition):
            await pair.trainer.initialize()
        hold.released.set()
        assert (await update).version.label == 5


async def test_busy_does_not_number_a_round_that_has_no_number():
    async with looped() as pair:
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def held(_):
            reached.set()
            await go_on.wait()

        remove = pair.trainer.gate("start", held)
        update = pair.trainer.begin_update(version=5)
        await reached.wait()
        with pytest.raises(
            Busy, match=r"^a round that has no number yet \(version 5\) is .* phase admit"
        ):
            await pair.trainer.send_weights()
        go_on.set()
        await update
        remove()


@pytest.mark.fault("A-STATE-1")
async def test_on_busy_wait_runs_one_after_the_other():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        first = pair.trainer.begin_update(version=1)
        await until(hold.reached)
        rest = [
            asyncio.ensure_future(pair.trainer.send_weights(version=n, on_busy="wait"))
            for n in (2, 3)
        ]
        await settled()
        assert not any(task.done() for task in rest)
        hold.released.set()
        assert (await first).version.label == 1
        assert [(await task).version.label for task in rest] == [2, 3]
        assert pair.worker.version.label == 3


@pytest.mark.fault("A-STATE-1")
async def test_on_busy_supersede_ends_the_older_round():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        first = pair.trainer.begin_update(version=1)
        await until(hold.reached)
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        report = await pair.trainer.send_weights(version=2, on_busy="supersede")
        with pytest.raises(RoundCancelled):
            await first
        assert report.version.label == 2
        assert pair.is_equal()


async def test_waiting_for_the_turn_can_be_cancelled():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        first = pair.trainer.begin_update(version=1)
        await until(hold.reached)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.trainer.send_weights(version=2, on_busy="wait"), 0.05)
        hold.released.set()
        assert (await first).outcome == "committed"
        await pair.assert_next_round_works(3)


async def test_unknown_on_busy_is_refused():
    async with looped() as pair:
        with pytest.raises(Validation, match="raise, wait or supersede"):
            await pair.trainer.send_weights(on_busy="queue")
        await pair.assert_next_round_works()


# -- versions


@pytest.mark.fault("A-VERSION-2")
@pytest.mark.parametrize("bad", [None, -1, 2**63, True, "", 1.5, b"58", ["1"]])
async def test_what_is_no_version_is_refused_before_anything_is_called(bad):
    async with looped() as pair:
        before = list(pair.calls)
        with pytest.raises(Validation, match="version"):
            await pair.trainer.send_weights(version=bad)
        with pytest.raises(Validation, match="version"):
            pair.trainer.begin_update(version=bad)
        assert pair.calls == before
        assert pair.path == ["initialize"]
        await pair.assert_next_round_works(1)


async def test_versions_follow_each_other():
    async with looped() as pair:
        trainer = pair.trainer
        assert trainer.version is None
        expected = [(None, 1, 1), (5, 5, 5), (None, 6, 6), ("58", "58", 7), (None, 8, 8)]
        expected += [(2**63 - 1, 2**63 - 1, 2**63 - 1)]
        for version, label, order in expected:
            options = {} if version is None else {"version": version}
            report = await trainer.send_weights(**options)
            assert report.version == Version(label, trainer.lineage, order)
            assert trainer.version == pair.worker.version == report.version
        with pytest.raises(Validation, match=r"2\*\*63"):
            await trainer.send_weights()


@pytest.mark.fault("A-VERSION-2")
@pytest.mark.parametrize("version", [5, 4, 0])
async def test_going_back_needs_rollback(version):
    async with looped() as pair:
        await pair.trainer.send_weights(version=5)
        with pytest.raises(Refused, match="version") as caught:
            await pair.trainer.send_weights(version=version)
        assert caught.value.weights == "intact"
        assert "rollback" in caught.value.next_step
        assert pair.worker.version.label == 5
        assert pair.trainer.version.label == 5
        assert pair.trainer.state is State.INITIALIZED
        report = await pair.trainer.send_weights(version=version, rollback=True)
        assert report.outcome == "committed"
        assert pair.worker.version.label == version


@pytest.mark.fault("A-VERSION-2")
async def test_new_lineage_may_start_anywhere_and_goes_on_by_itself():
    async with looped(lineage="old run") as pair:
        await pair.trainer.send_weights(version=5)
        await pair.trainer.send_weights(version=Version(1, "new run", 1))
        assert pair.worker.version == Version(1, "new run", 1)
        report = await pair.trainer.send_weights()
        assert report.outcome == "committed"


async def test_wait_version():
    async with looped() as pair:
        waiters = [asyncio.ensure_future(pair.trainer.wait_version(n)) for n in (1, 2, 3)]
        await pair.trainer.send_weights()
        assert (await waiters[0]).order == 1
        await pair.trainer.send_weights()
        assert (await waiters[1]).order == 2
        assert (await pair.trainer.wait_version(1)).order == 2
        await settled()
        assert not waiters[2].done()
        await pair.trainer.aclose()
        with pytest.raises(InvalidTransition, match="closed"):
            await waiters[2]


# -- budgets


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": "5"},
        {"timeout": True},
        {"budget": 5},
        {"timeout": 5, "budget": Budget(total=5)},
    ],
)
async def test_bad_budgets_are_refused_before_anything_is_called(options):
    async with looped() as pair:
        before = list(pair.calls)
        with pytest.raises(Validation):
            await pair.trainer.send_weights(**options)
        with pytest.raises(Validation):
            pair.trainer.begin_update(**options)
        assert pair.calls == before
        await pair.assert_next_round_works()


@pytest.mark.fault("A-HTTP-3")
@pytest.mark.parametrize(
    ("method", "budget", "phase"),
    [
        ("start_weight_update", Budget(admit=0.3), "start"),
        ("prepare_weight_update", Budget(finish=0.3), "prepare"),
        ("update_weights", Budget(stall=0.3, cleanup=1.0), "update"),
        ("update_weights", Budget(total=0.3), "update"),
    ],
)
async def test_each_limit_is_its_own_error_with_phase(method, budget, phase):
    hold = At(method)
    async with looped(before=hold) as pair:
        began = time.monotonic()
        with pytest.raises(PhaseTimeout) as caught:
            await pair.trainer.send_weights(version=1, budget=budget)
        assert time.monotonic() - began < 3 + SLACK
        # The data plane has names of its own for the parts of an update.
        assert caught.value.phase in ((phase, "open") if phase == "update" else (phase,))
        assert caught.value.report.members[0].phase == phase
        assert isinstance(caught.value, TimeoutError)
        assert pair.trainer.state in STATES_AFTER
        hold.active = False
        await pair.assert_next_round_works(1)


# -- gates


async def test_gate_on_start_vetoes_and_nothing_moves():
    async with looped() as pair:
        before = list(pair.calls)
        remove = pair.trainer.gate("start", lambda context: context.version != "2")
        with pytest.raises(GateRejected) as caught:
            await pair.trainer.send_weights(version=2)
        assert caught.value.report.outcome == "failed"
        assert pair.calls == before
        assert pair.path == ["initialize"]
        await pair.assert_next_round_works(1)
        remove()
        await pair.assert_next_round_works(2)


async def test_gate_on_complete_vetoes_and_the_round_is_aborted():
    async with looped() as pair:
        old = models.fingerprint(pair.copies[0])
        remove = pair.trainer.gate("complete", lambda _: False)
        with pytest.raises(GateRejected):
            await pair.trainer.send_weights(version=1)
        assert ("w0", "finish_weight_update") not in pair.calls
        assert models.fingerprint(pair.copies[0]) == old
        assert pair.trainer.state is State.INITIALIZED
        assert pair.trainer.version is None
        remove()
        await pair.assert_next_round_works(1)


async def test_gate_on_initialize_vetoes_and_no_worker_is_asked():
    async with looped(initialized=False) as pair:
        remove = pair.trainer.gate("initialize", lambda _: False)
        with pytest.raises(GateRejected):
            await pair.trainer.initialize()
        assert pair.trainer.state is State.IDLE
        assert pair.calls == []
        remove()
        await pair.trainer.initialize()
        await pair.assert_next_round_works()


async def test_gate_that_waits_holds_the_round_and_can_be_cancelled():
    async with looped() as pair:
        go = asyncio.Event()
        remove = pair.trainer.gate("start", lambda _: go.wait())
        update = pair.trainer.begin_update(version=1)
        await settled()
        assert pair.path == ["initialize"]
        update.cancel()
        with pytest.raises(RoundCancelled):
            await update
        assert pair.trainer.state is State.INITIALIZED
        remove()
        await pair.assert_next_round_works(1)


async def test_gate_on_the_worker_vetoes_start_for_the_trainer():
    async with looped() as pair:
        remove = pair.worker.gate("start", lambda _: False)
        with pytest.raises(GateRejected) as caught:
            await pair.trainer.send_weights(version=1)
        assert isinstance(caught.value, RemoteError)
        assert caught.value.replica == "w0"
        remove()
        await pair.assert_next_round_works(1)


# -- life cycle


async def test_legal_sequences_and_idempotence():
    async with looped(initialized=False) as pair:
        trainer, worker = pair.trainer, pair.worker
        await trainer.shutdown()
        assert trainer.state is State.IDLE
        await trainer.initialize()
        with pytest.raises(InvalidTransition, match="initialize"):
            await trainer.initialize()
        with pytest.raises(InvalidTransition, match="reset"):
            await trainer.reset()
        await pair.assert_next_round_works()
        for _ in range(2):
            await trainer.shutdown()
            assert trainer.state is State.IDLE
        assert worker.state is State.IDLE
        await trainer.initialize()
        await pair.assert_next_round_works()
        for _ in range(2):
            await trainer.aclose()
            assert trainer.state is State.CLOSED
        assert worker.state is State.IDLE
        await trainer.shutdown()
        for call in (trainer.initialize, trainer.reset, trainer.send_weights):
            with pytest.raises(InvalidTransition) as caught:
                await call()
            assert caught.value.detail == {"state": "closed", "allowed": []}
        with pytest.raises(InvalidTransition) as caught:
            trainer.begin_update()
        assert caught.value.next_step.endswith("(its block was left): connect again")


async def test_first_round_initialises_by_itself_and_is_no_recovery():
    async with looped(initialized=False) as pair:
        report = await pair.assert_next_round_works()
        assert not report.recovered


async def test_round_after_shutdown_initialises_again_and_says_so():
    async with looped() as pair:
        await pair.assert_next_round_works()
        await pair.trainer.shutdown()
        report = await pair.assert_next_round_works()
        assert report.recovered
        assert "initialised again" in report.notes[0]


def unconfirmed():
    """Members fail, and their abort cannot be confirmed."""
    return At("abort_weight_update", error=PeerLost("connection reset"))


async def test_recover_auto_resets_and_initialises_once():
    lost = unconfirmed()
    script = {"receiver": [Fault.raises(1, OSError("disk full"))]}
    async with looped(script=script, before=lost) as pair:
        with pytest.raises(RemoteError, match="disk full"):
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert pair.trainer.state is State.FAILED
        lost.active = False
        report = await pair.assert_next_round_works(1)
        assert report.recovered
        assert pair.path[-6:-4] == ["reset", "initialize"]


async def test_recover_manual_leaves_the_choice_to_the_caller():
    lost = unconfirmed()
    script = {"receiver": [Fault.raises(1, OSError("disk full"))]}
    async with looped(script=script, before=lost, recover="manual") as pair:
        with pytest.raises(RemoteError, match="disk full"):
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        lost.active = False
        for _ in range(2):
            with pytest.raises(InvalidTransition) as caught:
                await pair.trainer.send_weights(version=1)
            assert caught.value.detail["state"] == "failed"
            assert "reset" in caught.value.detail["allowed"]
        await pair.trainer.reset()
        assert pair.trainer.state is State.IDLE
        await pair.trainer.initialize()
        report = await pair.assert_next_round_works(1)
        assert not report.recovered


@pytest.mark.parametrize("seconds", [0, -1, "5", True, float("nan"), float("inf")])
async def test_seconds_that_cannot_be_waited_for_are_refused(seconds):
    async with looped(initialized=False) as pair:
        with pytest.raises(Validation, match="timeout"):
            await pair.trainer.initialize(timeout=seconds)
        assert pair.trainer.state is State.IDLE
        assert pair.calls == []
        with pytest.raises(Validation, match="lease_s"):
            aiosync.WeightTransferConfig("loopback", lease_s=seconds)
        with LoopbackLink() as link, pytest.raises(Validation, match="lease_s"):
            aiosync.LoopbackTrainerWeightTransferEngine(
                client=pair.trainer.links[0].client, source=pair.model, link=link, lease_s=seconds
            )


async def test_recover_must_be_auto_or_manual():
    with pytest.raises(Validation, match="auto"):
        async with looped(recover="never"):
            pass


async def test_initialize_resets_a_failed_engine():
    lost = unconfirmed()
    script = {"receiver": [Fault.raises(1, OSError("disk full"))]}
    async with looped(script=script, before=lost) as pair:
        with pytest.raises(RemoteError):
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        lost.active = False
        await pair.trainer.initialize()
        assert pair.path[-2:] == ["reset", "initialize"]
        await pair.assert_next_round_works(1)


@pytest.mark.parametrize("how", ["error", "timeout", "cancel"])
async def test_init_that_fails_leaves_a_failed_engine(how):
    hold = At(
        "init_transfer_engine",
        member="w1",
        error=PeerLost("connection reset") if how == "error" else None,
    )
    async with looped(workers=2, before=hold, initialized=False) as pair:
        if how == "error":
            with pytest.raises(PeerLost) as caught:
                await pair.trainer.initialize()
            assert (caught.value.replica, caught.value.phase) == ("w1", "init")
        elif how == "timeout":
            with pytest.raises(PhaseTimeout, match="init took longer") as caught:
                await pair.trainer.initialize(timeout=0.2)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pair.trainer.initialize(), 0.2)
        assert pair.trainer.state is State.FAILED
        hold.active = False
        await pair.assert_next_round_works()


async def test_second_initialize_at_the_same_time_is_refused():
    hold = At("init_transfer_engine")
    async with looped(before=hold, initialized=False) as pair:
        first = asyncio.ensure_future(pair.trainer.initialize())
        await hold.reached.wait()
        with pytest.raises(Busy, match="under way"):
            await pair.trainer.initialize()
        with pytest.raises(Busy, match="under way"):
            await pair.trainer.send_weights()
        hold.go.set()
        await first
        await pair.assert_next_round_works()


async def test_aclose_during_initialize_leaves_nothing_open():
    hold = At("init_transfer_engine")
    async with looped(before=hold, initialized=False) as pair:
        first = asyncio.ensure_future(pair.trainer.initialize())
        await hold.reached.wait()
        await pair.trainer.aclose()
        hold.go.set()
        with pytest.raises(InvalidTransition):
            await first
        assert pair.trainer.state is State.CLOSED
        assert pair.trainer.sender is None


@pytest.mark.fault("A-STATE-1")
async def test_aclose_during_a_round_cancels_it_first():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        old = models.fingerprint(pair.copies[0])
        sending = asyncio.ensure_future(pair.trainer.send_weights(version=1))
        await until(hold.reached)
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        async with asyncio.timeout(5):
            await pair.trainer.aclose()
        with pytest.raises(RoundCancelled):
            await sending
        assert pair.trainer.state is State.CLOSED
        assert pair.worker.state in (State.IDLE, State.INITIALIZED)
        assert models.fingerprint(pair.copies[0]) == old
        assert pair.path[-1] == "close"
        assert pair.illegal == []


async def test_aclose_of_a_failed_engine():
    lost = unconfirmed()
    script = {"receiver": [Fault.raises(1, OSError("disk full"))]}
    async with looped(script=script, before=lost) as pair:
        with pytest.raises(RemoteError):
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        await pair.trainer.aclose()
        assert pair.path[-2:] == ["fail", "close"]


async def test_hub_given_to_init_sees_the_init():
    seen = []
    hub = aiosync.TransitionHub()
    hub.on_transition(lambda t: seen.append((t.role, t.trigger, t.source, t.dest)))
    async with looped(initialized=False) as pair:
        with LoopbackLink() as link:
            trainer = await aiosync.WeightTransferTrainerFactory.trainer_init(
                init_info=aiosync.LoopbackTrainerInitInfo(rank=0, link=link),
                client=pair.trainer.links[0].client,
                source=pair.model,
                hub=hub,
            )
            async with trainer:
                await trainer.send_weights()
                assert pair.is_equal()
    assert seen == [
        ("trainer", "initialize", "idle", "initialized"),
        ("trainer", "start", "initialized", "updating"),
        ("trainer", "update", "updating", "updating"),
        ("trainer", "finalize", "updating", "finalizing"),
        ("trainer", "complete", "finalizing", "initialized"),
        ("trainer", "close", "initialized", "closed"),
    ]


async def test_init_that_fails_is_seen_by_the_hub_and_leaves_nothing_open():
    seen = []
    hub = aiosync.TransitionHub()
    hub.on_transition(lambda t: seen.append(t.trigger))
    hold = At("init_transfer_engine", error=PeerLost("connection reset"))
    async with looped(before=hold, initialized=False) as pair:
        with LoopbackLink() as link, pytest.raises(PeerLost):
            await aiosync.WeightTransferTrainerFactory.trainer_init(
                init_info=aiosync.LoopbackTrainerInitInfo(rank=0, link=link),
                client=pair.trainer.links[0].client,
                source=pair.model,
                hub=hub,
            )
    assert seen == ["fail", "close"]


async def test_transitions_carry_the_facts_of_the_round():
    async with looped() as pair:
        events = []
        pair.trainer.on_transition(events.append)
        await pair.trainer.send_weights(version=3)
        nbytes = sum(p.nbytes for p in pair.model.parameters())
        assert [(e.trigger, e.round, e.version) for e in events] == [
            (trigger, 1, "3") for trigger in ("start", "update", "finalize", "complete")
        ]
        assert [e.nbytes for e in events] == [0, nbytes, nbytes, nbytes]
        assert events[-1].weights == "intact"


# -- cancelled, in every phase


@pytest.mark.fault("A-CANCEL-1")
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize(
    "method",
    ["start_weight_update", "update_weights", "prepare_weight_update", "finish_weight_update"],
)
async def test_cancelled_while_a_call_is_out(method, side):
    hold = At(method)
    async with looped(workers=2, **{side: hold}) as pair:
        sending = asyncio.ensure_future(pair.trainer.send_weights(version=1, budget=BUDGET))
        await until(hold.reached)
        began = time.monotonic()
        sending.cancel()
        await asyncio.wait([sending], timeout=10)
        assert time.monotonic() - began < BUDGET.cleanup + SLACK
        assert sending.cancelled()
        assert pair.trainer.state in STATES_AFTER
        report = pair.trainer.last_report
        if method == "finish_weight_update":  # the answer to the abort settles it
            settled = "failed" if side == "before" else "committed"
            assert report.outcome == settled
            assert {m.outcome for m in report.members} == {settled}
            if side == "after":
                assert pair.trainer.version.label == 1
        else:
            assert report.outcome == "failed"
            assert pair.trainer.state is State.INITIALIZED
        hold.active = False
        hold.go.set()
        await pair.assert_next_round_works()


async def test_answer_to_finish_that_comes_within_the_grace_commits():
    hold = At("finish_weight_update")
    async with looped(after=hold) as pair:
        sending = asyncio.ensure_future(pair.trainer.send_weights(version=1, budget=BUDGET))
        await until(hold.reached)
        sending.cancel()
        await settled()
        hold.go.set()
        await asyncio.wait([sending], timeout=10)
        assert pair.trainer.last_report.outcome == "committed"
        assert pair.trainer.version.label == 1
        assert pair.trainer.state is State.INITIALIZED
        await pair.assert_next_round_works(2)


@pytest.mark.fault("A-STATE-2")
@pytest.mark.parametrize("delivered", [True, False])
async def test_lost_answer_to_finish(delivered):
    lost = At("finish_weight_update", error=PeerLost("connection reset"))
    deaf = At("weight_update_status", error=PeerLost("connection reset"))
    mute = At("abort_weight_update", error=PeerLost("connection reset"))

    async def before(member, method):
        await deaf(member, method)
        await mute(member, method)
        if not delivered:
            await lost(member, method)

    async with looped(before=before, after=lost if delivered else None) as pair:
        with pytest.raises(OutcomeUnknown) as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert caught.value.report.outcome == "unknown"
        assert caught.value.weights == "unknown"
        assert pair.trainer.state is State.FAILED
        lost.active = deaf.active = mute.active = False
        # In the same process, at once: not after the worker's lease.
        await pair.assert_next_round_works()


async def test_commit_that_takes_longer_than_the_lease_is_kept_alive():
    async def slow(_):
        await asyncio.sleep(0.8)
        return True

    async with looped(lease_s=0.3) as pair:
        for side in (pair.worker, pair.trainer):
            remove = side.gate("complete", slow)
            await pair.assert_next_round_works()
            remove()


# -- faults of the data plane

CHUNKS = [0, "middle", "last"]


def place(pair_chunks, where):
    return {"middle": pair_chunks // 2, "last": pair_chunks - 1}.get(where, where)


async def chunks_of_a_round():
    async with looped(initialized=False) as pair:
        return pair.chunks()


async def check_failed_round(script, expected, match, budget=BUDGET, **options):
    """One round that fails, then one that works; returns the error."""
    async with looped(script=script, **options) as pair:
        old = [models.fingerprint(copy) for copy in pair.copies]
        began = time.monotonic()
        with pytest.raises(expected) as caught:
            await pair.trainer.send_weights(version=1, budget=budget)
        assert match in str(caught.value)
        assert time.monotonic() - began < 3 + SLACK
        assert caught.value.report.outcome == "failed"
        assert pair.trainer.state in STATES_AFTER
        assert pair.illegal == []
        assert [models.fingerprint(copy) for copy in pair.copies] == old
        assert all(worker.weights == "intact" for worker in pair.workers)
        await pair.assert_next_round_works(1)
        return caught.value


@pytest.mark.parametrize("where", CHUNKS)
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_side_raises(side, where):
    chunk = place(await chunks_of_a_round(), where)
    script = {side: [Fault.raises(chunk, OSError("cable cut"))]}
    kind = OSError if side == "sender" else RemoteError
    error = await check_failed_round(script, kind, "cable cut")
    if side == "receiver":
        assert (error.replica, error.phase) == ("w0", "update")


@pytest.mark.fault("A-SILENT-1")
@pytest.mark.parametrize("where", CHUNKS)
@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("kind", ["drop", "corrupt"])
async def test_bytes_that_differ_are_found_by_chunk(kind, side, where):
    chunk = place(await chunks_of_a_round(), where)
    fault = getattr(Fault, kind)(chunk)
    error = await check_failed_round({side: [fault]}, DigestMismatch, f"chunk {chunk}")
    assert isinstance(error, RemoteError)
    assert error.replica == "w0"


@pytest.mark.fault("A-HANG-4")
@pytest.mark.parametrize("where", CHUNKS)
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_side_that_hangs_is_aborted_after_the_stall(side, where):
    chunk = place(await chunks_of_a_round(), where)
    script = {side: [Fault.hang_until_aborted(chunk)]}
    error = await check_failed_round(script, PhaseTimeout, "", budget=SHORT)
    assert isinstance(error, TimeoutError)
    assert error.phase is not None


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_side_that_hangs_for_ever_poisons_its_lane_only(side):
    script = {side: [Fault.hang_for_ever(2)]}
    error = await check_failed_round(script, PhaseTimeout, "", budget=SHORT)
    assert error.report.outcome == "failed"


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_delay_is_no_failure(side):
    async with looped(script={side: [Fault.delay(n, 0.05) for n in (0, 2, 4)]}) as pair:
        await pair.assert_next_round_works()


@pytest.mark.fault("A-STATE-5")
async def test_in_place_sink_torn_by_a_fault_is_mended_by_the_next_round():
    script = {"receiver": [Fault.raises(3, OSError("cable cut"))]}
    async with looped(script=script, sink="in_place") as pair:
        with pytest.raises(RemoteError, match="cable cut") as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert pair.worker.weights == "torn"
        assert caught.value.weights == "torn"
        assert caught.value.report.members[0].weights == "torn"
        assert pair.trainer.state is State.FAILED
        report = await pair.assert_next_round_works(1)
        assert report.recovered


# -- sources and owners


class AsyncSource(aiosync.WeightSource):
    """Yields on the loop; can be held or broken at a tensor."""

    def __init__(self, module, at=None):
        self.module, self.at = module, at
        self.reached, self.closed = asyncio.Event(), 0

    @functools.cached_property
    def metadata(self):
        return [
            aiosync.ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in self.module.named_parameters()
        ]

    async def iter_full(self):
        try:
            for index, pair in enumerate(self.module.named_parameters()):
                if index == self.at:
                    self.reached.set()
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                yield pair
        finally:
            self.closed += 1


@pytest.mark.parametrize("at", [0, 3])
async def test_async_source(at):
    async with looped(source=AsyncSource) as pair:
        await pair.assert_next_round_works()
        source = pair.trainer.source
        source.at = at
        update = pair.trainer.begin_update(budget=BUDGET)
        await until(source.reached)
        update.cancel()
        with pytest.raises(RoundCancelled):
            await update
        assert source.closed == 2
        source.at = None
        await pair.assert_next_round_works()


async def test_trainer_that_was_taken_over_is_fenced():
    async with looped() as pair:
        await pair.assert_next_round_works()
        with LoopbackLink() as link:
            second = aiosync.LoopbackTrainerWeightTransferEngine(
                client=pair.trainer.links[0].client, source=pair.model, link=link, name="second"
            )
            async with second:
                await second.send_weights(version=1)
                with pytest.raises(Fenced, match="is not the owner") as caught:
                    await pair.trainer.send_weights(budget=BUDGET)
                assert caught.value.detail["owner"] == second.owner
                assert pair.worker.state is State.INITIALIZED
                assert (await second.send_weights()).outcome == "committed"


@pytest.mark.fault("A-STATE-1")
async def test_second_trainer_during_a_round_is_refused_before_anything_moves():
    hold = Hold(2)
    async with looped(source=paced(hold)) as pair:
        update = pair.trainer.begin_update(version=1)
        await until(hold.reached)
        with LoopbackLink() as link:
            second = aiosync.LoopbackTrainerWeightTransferEngine(
                client=pair.trainer.links[0].client, source=pair.model, link=link, name="second"
            )
            async with second:
                with pytest.raises(Busy) as caught:
                    await second.send_weights(version=1)
                assert caught.value.detail["owner"] == pair.trainer.owner
        hold.released.set()
        assert (await update).outcome == "committed"
        assert pair.is_equal()


# -- fleets


@pytest.mark.fault("A-HANG-4")
async def test_fleet_with_one_that_fails():
    script = {"receiver:1": [Fault.raises(3, OSError("disk full"))]}
    async with looped(workers=3, script=script) as pair:
        await_first = models.fingerprint(pair.copies[0])
        with pytest.raises(RemoteError, match="disk full") as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert caught.value.replica == "w1"
        report = caught.value.report
        assert [m.outcome for m in report.members] == ["failed"] * 3
        assert "disk full" in report.members[1].error
        assert models.fingerprint(pair.copies[0]) == await_first
        assert all(worker.version is None for worker in pair.workers)
        await pair.assert_next_round_works(1)


async def test_finish_that_is_fenced_is_asked_for():
    """Repeated on the way, it may have been carried out before somebody else took the worker."""

    async def after(member, called):
        if called == "finish_weight_update":
            await pair.worker.init_transfer_engine(
                pair.trainer.get_worker_init_payload() | {"reader": 0},
                header=aiosync.RoundHeader(owner="somebody"),
            )
            raise aiosync.Fenced("finish: somebody else is the owner")

    async with looped(after=after) as pair:
        report = await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert report.outcome == "committed"
        assert pair.worker.version == report.version
        assert pair.is_equal()


@pytest.mark.fault("A-HANG-4")
@pytest.mark.parametrize("phase", ["start", "update", "prepare", "finish"])
async def test_error_lists_every_member_that_failed(phase):
    method = "update_weights" if phase == "update" else f"{phase}_weight_update"
    failing = {"w0", "w2"}
    active = True

    async def before(member, called):
        if active and called == method and member in failing:
            raise aiosync.RemoteError(f"{member} has no memory", replica=member)

    async with looped(workers=3, before=before) as pair:
        with pytest.raises(RemoteError, match="has no memory") as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        report = caught.value.report
        failed = {m.name: m for m in report.members if m.error and "no memory" in m.error}
        assert set(failed) == failing
        text = str(caught.value) + "".join(caught.value.__notes__)
        assert all(f"{name} has no memory" in text for name in failing)
        if phase == "finish":
            assert report.members[1].outcome == "committed"
            assert report.outcome == "unknown"
        else:
            assert pair.workers[1].version is None
        active = False
        await pair.assert_next_round_works()


async def test_member_that_vetoes_the_commit_is_mended_by_the_same_version():
    async with looped(workers=3) as pair:
        remove = pair.workers[1].gate("complete", lambda _: False)
        with pytest.raises(GateRejected) as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        report = caught.value.report
        assert [m.outcome for m in report.members] == ["committed", "failed", "committed"]
        assert [worker.version for worker in pair.workers][1] is None
        remove()
        await pair.assert_next_round_works(1)
        assert [worker.version.label for worker in pair.workers] == [1, 1, 1]


async def test_wrong_number_of_readers_is_refused_at_init():
    async with looped(workers=2, initialized=False) as pair:
        with LoopbackLink() as link:
            pair.trainer.link = link
            with pytest.raises(Validation, match=r"1 reader\(s\) for 2 worker"):
                await pair.trainer.initialize()
