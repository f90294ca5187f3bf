"""Round tickets: as data, and as what a round runs under."""

from __future__ import annotations

import asyncio
import base64
import json
import time

import msgspec
import pytest
from looped import BUDGET, change, looped
from paced import Hold, Paced

import aiosync
from aiosync import (
    Budget,
    InvalidTransition,
    PhaseTimeout,
    RoundCancelled,
    RoundTicket,
    State,
    Validation,
    Version,
)
from transports.loopback import Fault


def ticket(**fields):
    return RoundTicket(
        **{
            "id": "t1",
            "round": 1,
            "version": Version(3, "run", 3),
            "issued_at": time.time(),
            "seconds": 20.0,
            **fields,
        }
    )


def damaged(text, old, new):
    return RoundTicket.decode(text.replace(old, new))


# -- as data


@pytest.mark.parametrize(
    "made",
    [
        ticket(),
        ticket(version=Version("58-ä", "run", 7), opaque="ü" * 4096, plan_digest="ab"),
        ticket(epochs={f"replica {n}": n for n in range(100)}, round=2**63 - 1),
    ],
)
def test_a_ticket_survives_both_forms(made):
    assert RoundTicket.from_json(made.to_json()) == made
    assert RoundTicket.from_json(made.to_json().encode()) == made
    word = made.encode()
    assert word.isascii()
    assert not set(word) & set(" \t\n\"'=+/;&")
    assert RoundTicket.decode(word) == made


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"round": 0}, "$.round"),
        ({"round": "1"}, "$.round"),
        ({"round": True}, "$.round"),
        ({"version": 3}, "$.version"),
        ({"version": {"label": 3, "lineage": "run", "order": 4}}, "$.version"),
        ({"seconds": 0}, "$.seconds"),
        ({"seconds": -1.5}, "$.seconds"),
        ({"issued_at": -1}, "$.issued_at"),
        ({"issued_at": None}, "$.issued_at"),
        ({"epochs": {"w0": -1}}, "$.epochs"),
        ({"epochs": ["w0"]}, "$.epochs"),
        ({"opaque": "x" * 4097}, "$.opaque"),
        ({"id": ""}, "$.id"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_no_ticket_is_refused_by_path(change, path):
    fields = json.loads(ticket().to_json()) | change
    with pytest.raises(Validation) as caught:
        RoundTicket.from_json(json.dumps(fields))
    assert path in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "aiosync-ticket-1.",
        "aiosync-ticket-1.!!!!",
        "aiosync-ticket-1.ä",
        "aiosync-ticket-1." + base64.urlsafe_b64encode(b"\x80\x04N.").decode(),
        "aiosync-ticket-1." + base64.urlsafe_b64encode(b"[" * 5000).decode(),
        "aiosync-ticket-1." + "A" * (1 << 20),
        "aiosync-ticket-2." + ticket().encode().partition(".")[2],
        ticket().encode()[:-9],
        b"aiosync-ticket-1.",
        None,
        3,
    ],
)
def test_damaged_words_are_refused(text):
    with pytest.raises(Validation):
        RoundTicket.decode(text)


def test_time_that_has_passed_is_taken_off_and_a_slow_clock_adds_none():
    assert ticket().seconds_left == pytest.approx(20.0, abs=2.0)
    assert ticket(issued_at=time.time() + 500).seconds_left == 20.0
    assert ticket(issued_at=time.time() - 0.5).seconds_left == 20.0  # within the allowance
    assert ticket(issued_at=time.time() - 500).seconds_left < 0


# -- what a round runs under


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["object", "string"])
@pytest.mark.parametrize("way", ["send", "begin", "session"])
async def test_the_round_has_the_number_version_and_deadline_of_its_ticket(way, form):
    async with looped(workers=2) as pair:
        trainer = pair.trainer
        headers = []
        for link in trainer.links:
            client = link.client
            start = client.start_weight_update

            async def spy(*, header=None, start=start):
                headers.append(header)
                return await start(header=header)

            client.start_weight_update = spy
        plan = await trainer.plan()
        promise = trainer.make_ticket(version=5, timeout=9, plan_digest=plan.digest, opaque="x")
        assert promise.epochs == {link.name: link.epoch for link in trainer.links}
        assert (promise.round, promise.target, promise.opaque) == (1, aiosync.Model(), "x")
        promise = msgspec.structs.replace(promise, round=41)
        given = promise if form == "object" else promise.encode()
        if way == "send":
            report = await trainer.send_weights(ticket=given, timeout=60)
        elif way == "begin":
            report = await trainer.begin_update(ticket=given)
        else:
            async with trainer.session(ticket=given) as session:
                for name, parameter in pair.model.named_parameters():
                    await session.send(name, parameter.detach())
            report = session.report
        assert report.outcome == "committed"
        assert report.version == promise.version == pair.worker.version
        assert report.round == 41
        assert {header.round for header in headers} == {41}
        assert all(header.deadline_s <= 9 for header in headers)
        assert pair.worker.cycle.ownership.last_round == 41
        await pair.assert_next_round_works()
        assert trainer.last_report.round == 42


@pytest.mark.asyncio
async def test_a_committed_ticket_is_answered_from_the_record_and_moves_nothing():
    async with looped() as pair:
        promise = pair.trainer.make_ticket()
        first = await pair.trainer.send_weights(ticket=promise)
        calls = list(pair.calls)
        for again in (
            await pair.trainer.send_weights(ticket=promise.encode()),
            await pair.trainer.begin_update(ticket=promise),
            await pair.trainer.send_weights(
                ticket=msgspec.structs.replace(promise, issued_at=0.0)  # expired by now
            ),
        ):
            assert again is first
        assert pair.calls == calls
        await pair.assert_next_round_works()


@pytest.mark.asyncio
async def test_a_ticket_whose_round_failed_is_used_up():
    fault = Fault.raises(2, OSError("disk full"))
    async with looped(script={"receiver": [fault]}) as pair:
        promise = pair.trainer.make_ticket()
        with pytest.raises(aiosync.AiosyncError, match="disk full"):
            await pair.trainer.send_weights(ticket=promise, budget=BUDGET)
        calls = list(pair.calls)
        with pytest.raises(Validation, match=r"ticket\.round is 1, which was used already"):
            await pair.trainer.send_weights(ticket=promise, budget=BUDGET)
        assert pair.calls == calls
        await pair.assert_next_round_works()


@pytest.mark.asyncio
async def test_a_ticket_that_was_refused_before_anything_moved_can_be_used():
    async with looped() as pair:
        promise = pair.trainer.make_ticket()
        remove = pair.trainer.gate("start", lambda _: False)
        with pytest.raises(aiosync.GateRejected):
            await pair.trainer.send_weights(ticket=promise)
        remove()
        assert (await pair.trainer.send_weights(ticket=promise)).round == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "options", "text"),
    [
        ({}, {"version": 6}, "version=6 was given, ticket.version is 5"),
        ({}, {"version": "5"}, "version='5' was given"),
        ({}, {"version": None}, "version=None was given"),
        ({"plan_digest": "feed"}, {}, "ticket.plan_digest is feed"),
        ({"epochs": {"w0": 7}}, {}, r"ticket.epochs\['w0'\] is 7; it is \d+ now"),
        ({"epochs": {"w9": 1}}, {}, r"ticket.epochs\['w9'\] is 1; no such member"),
        ({"target": "draft"}, {}, r"\$\.target"),
        ({"target": aiosync.Draft()}, {"target": aiosync.Model()}, "ticket.target is draft"),
        ({"round": 0}, {}, r"\$\.round"),
        ({"seconds": "soon"}, {}, r"\$\.seconds"),
    ],
)
async def test_what_does_not_fit_is_refused_by_field_before_anything_moves(wrong, options, text):
    async with looped() as pair:
        promise = pair.trainer.make_ticket(version=5)
        before = list(pair.calls)
        with pytest.raises(Validation, match=text):
            await pair.trainer.send_weights(
                ticket=msgspec.structs.replace(promise, **wrong), **options
            )
        assert pair.calls == before
        assert pair.trainer.state is State.INITIALIZED
        report = await pair.trainer.send_weights(ticket=promise, version=5)
        assert report.round == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("given", [b"aiosync-ticket-1.", 7, {"id": "x"}, "none", ["x"]])
async def test_what_is_no_ticket_at_all(given):
    async with looped() as pair:
        for call in (pair.trainer.send_weights, pair.trainer.begin_update, pair.trainer.session):
            with pytest.raises(Validation, match="ticket"):
                made = call(ticket=given)
                await made
        await pair.assert_next_round_works()


@pytest.mark.asyncio
async def test_an_expired_ticket_names_the_phase_and_both_clocks():
    async with looped() as pair:
        promise = pair.trainer.make_ticket(timeout=5)
        late = msgspec.structs.replace(promise, issued_at=promise.issued_at - 60)
        with pytest.raises(PhaseTimeout, match=r"expired 5\d\.\d s ago.*issuer's clock") as caught:
            await pair.trainer.send_weights(ticket=late)
        assert caught.value.phase == "admit"
        assert caught.value.report.outcome == "failed"
        await pair.assert_next_round_works()


@pytest.mark.asyncio
async def test_the_tickets_deadline_ends_the_round():
    hold = Hold(1)
    async with looped(source=lambda model: Paced(model, hold)) as pair:
        promise = pair.trainer.make_ticket(timeout=1)
        asyncio.get_running_loop().call_later(1.2, hold.released.set)
        with pytest.raises(PhaseTimeout, match="longer than its"):
            await pair.trainer.send_weights(ticket=promise, timeout=30)
        pair.trainer.source.before = lambda _: None
        await pair.assert_next_round_works()


@pytest.mark.asyncio
async def test_a_ticket_of_an_older_epoch_is_refused_after_the_workers_were_taken_anew():
    async with looped() as pair:
        promise = pair.trainer.make_ticket()
        await pair.trainer.shutdown()
        await pair.trainer.initialize()
        with pytest.raises(Validation, match=r"ticket.epochs\['w0'\] is \d+; it is \d+ now"):
            await pair.trainer.send_weights(ticket=promise)
        await pair.trainer.shutdown()
        promise = pair.trainer.make_ticket()
        assert promise.epochs == {}  # there is none yet
        report = await pair.trainer.send_weights(ticket=promise)
        assert report.outcome == "committed"


@pytest.mark.asyncio
async def test_a_worker_that_restarted_is_noticed_by_its_epoch():
    async with looped() as pair:
        promise = pair.trainer.make_ticket()
        for given in ({"ticket": promise}, {}):
            # As a new process would: it knows nothing of this trainer, and says so.
            pair.worker.incarnation += "'"
            pair.worker.cycle.ownership.take(None)
            if given:
                with pytest.raises(Validation, match=r"ticket.epochs\['w0'\] is \d+; it is"):
                    await pair.trainer.send_weights(**given)
            else:
                assert (await pair.trainer.send_weights()).recovered


@pytest.mark.asyncio
async def test_tickets_issued_in_a_row_follow_each_other():
    async with looped() as pair:
        first, second = pair.trainer.make_ticket(), pair.trainer.make_ticket(version="two")
        third = pair.trainer.make_ticket()
        assert [t.round for t in (first, second, third)] == [1, 2, 3]
        assert [t.version.order for t in (first, second, third)] == [1, 2, 3]
        assert len({t.id for t in (first, second, third)}) == 3
        assert "start_weight_update" not in [method for _, method in pair.calls]
        await pair.trainer.send_weights(ticket=second)
        with pytest.raises(Validation, match=r"ticket\.round is 1"):
            await pair.trainer.send_weights(ticket=first)
        await pair.trainer.send_weights(ticket=third)
        assert pair.worker.version.order == 3


@pytest.mark.asyncio
async def test_a_ticket_of_another_process_continues_that_ones_lineage():
    async with looped() as pair:
        made = ticket(version=Version(7, "the driver's run", 7), round=9)
        await pair.trainer.send_weights(ticket=made.encode())
        report = await pair.trainer.send_weights()
        assert report.version == Version(8, "the driver's run", 8)
        assert report.round == 10


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"timeout": "5"}, {"target": "draft"}, {"version": None}, {"opaque": 5}],
)
async def test_a_ticket_that_cannot_be_right_is_not_issued(options):
    async with looped() as pair:
        with pytest.raises(Validation):
            pair.trainer.make_ticket(**options)
        assert pair.trainer.make_ticket().round == 1
    with pytest.raises(InvalidTransition):
        pair.trainer.make_ticket()


@pytest.mark.asyncio
async def test_a_call_repeated_with_its_ticket_waits_for_itself():
    hold = Hold(1)
    async with looped(source=lambda model: Paced(model, hold)) as pair:
        promise = pair.trainer.make_ticket()
        first = pair.trainer.begin_update(ticket=promise)
        again = pair.trainer.begin_update(ticket=promise, on_busy="supersede")
        hold.released.set()
        assert await again is await first


@pytest.mark.asyncio
async def test_cancelled_rounds_use_their_ticket_up():
    hold = Hold(1)
    async with looped(source=lambda model: Paced(model, hold)) as pair:
        promise = pair.trainer.make_ticket()
        update = pair.trainer.begin_update(ticket=promise, budget=Budget(total=10))
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)
        update.cancel()
        hold.released.set()
        with pytest.raises(RoundCancelled):
            await update
        with pytest.raises(Validation, match=r"ticket\.round"):
            await pair.trainer.send_weights(ticket=promise)
        change(pair.model)
        await pair.assert_next_round_works()
