"""The generation gate: requests together or one swap alone, whatever is cancelled when."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiosync.errors import PhaseTimeout, Validation
from aiosync.generation import GenerationGate

pytestmark = pytest.mark.anyio
settle = anyio.wait_all_tasks_blocked


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class Holder:
    """A task that holds the gate until it is told to leave."""

    def __init__(self, group, enter):
        self.inside, self._leave, self.error = False, anyio.Event(), None
        self.scope = anyio.CancelScope()
        group.start_soon(self._run, enter)

    async def _run(self, enter):
        with self.scope:
            try:
                async with enter():
                    self.inside = True
                    await self._leave.wait()
            except PhaseTimeout as error:
                self.error = error
            finally:
                self.inside = False

    async def leave(self):
        self._leave.set()
        await settle()


async def test_requests_run_together_and_a_swap_alone():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        first, second = Holder(group, gate.request), Holder(group, gate.request)
        await settle()
        assert (first.inside, second.inside, gate.in_flight, gate.state) == (
            True, True, 2, "running",
        )  # fmt: skip
        swap = Holder(group, gate.swap)
        await settle()
        late = Holder(group, gate.request)
        await settle()
        assert (gate.state, swap.inside, late.inside) == ("pausing", False, False)
        assert repr(gate) == "<GenerationGate pausing in_flight=2 waiting=1>"
        await first.leave()
        assert not swap.inside
        await second.leave()
        assert (gate.state, swap.inside, late.inside, gate.in_flight) == ("paused", True, False, 0)
        await swap.leave()
        assert (gate.state, late.inside, gate.in_flight) == ("running", True, 1)
        await late.leave()
    facts = gate.statistics()
    assert facts.pop("seconds_paused") == gate.seconds_paused > 0
    assert facts == {
        "state": "running", "in_flight": 0, "parked": 0, "requests_waiting": 0,
        "swaps_waiting": 0, "swaps_done": 1, "held_by": [],
    }  # fmt: skip


async def test_swaps_take_turns_and_waiting_requests_go_in_between():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        first = Holder(group, gate.swap)
        await settle()
        second = Holder(group, gate.swap)
        await settle()
        request = Holder(group, gate.request)
        await settle()
        assert (first.inside, second.inside, request.inside) == (True, False, False)
        await first.leave()
        assert (second.inside, request.inside, gate.state) == (False, True, "pausing")
        await request.leave()
        assert second.inside
        await second.leave()
    assert gate.state == "running"


async def test_a_swap_that_waits_too_long_names_the_requests_and_lets_them_flow():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        running = [Holder(group, gate.request) for _ in range(3)]
        await settle()
        with pytest.raises(PhaseTimeout, match="3 requests were still running") as caught:
            async with gate.swap(timeout=0):
                pytest.fail("entered")
        assert caught.value.phase == "pause"
        assert caught.value.message.endswith(" 0 s: request-1, request-2, request-3")
        assert "checkpoint()" in caught.value.next_step
        assert caught.value.detail == {"in_flight": 3}
        assert gate.state == "running"
        async with gate.request():
            assert gate.in_flight == 4
        for holder in running:
            await holder.leave()
        async with gate.swap(timeout=0):
            assert gate.in_flight == 0


async def test_a_swap_times_out_behind_another_swap():
    gate = GenerationGate()
    async with gate.swap():
        with pytest.raises(PhaseTimeout, match="another swap is still paused"):
            async with gate.swap(timeout=0):
                pytest.fail("entered")
        assert gate.state == "paused"
        assert gate.statistics()["swaps_waiting"] == 0
    async with gate.request():
        pass


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
async def test_an_unbounded_swap_is_refused(timeout):
    with pytest.raises(Validation):
        async with GenerationGate().swap(timeout=timeout):
            pytest.fail("entered")


async def test_errors_inside_reopen_the_gate():
    gate = GenerationGate()
    for enter in (gate.request, gate.swap):
        with pytest.raises(ZeroDivisionError):
            async with enter():
                raise ZeroDivisionError
    assert (gate.state, gate.in_flight) == ("running", 0)
    assert gate.statistics()["swaps_done"] == 0


async def test_cancelled_waiters_leave_nothing_behind():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        running = Holder(group, gate.request)
        await settle()
        swap = Holder(group, gate.swap)
        await settle()
        behind = Holder(group, gate.swap)
        await settle()
        request = Holder(group, gate.request)
        await settle()
        request.scope.cancel()
        await settle()
        assert gate.statistics()["requests_waiting"] == 0
        behind.scope.cancel()
        await settle()
        assert gate.statistics()["swaps_waiting"] == 0
        other = Holder(group, gate.request)
        await settle()
        swap.scope.cancel()  # the draining swap itself: requests flow again
        await settle()
        assert (gate.state, other.inside, gate.in_flight) == ("running", True, 2)
        await running.leave()
        await other.leave()


async def test_a_waiter_that_is_admitted_and_cancelled_at_once_hands_its_turn_back():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        swap = Holder(group, gate.swap)
        await settle()
        doomed = [Holder(group, gate.request), Holder(group, gate.swap)]
        await settle()
        last = Holder(group, gate.swap)
        await settle()
        swap._leave.set()
        for _ in range(3):  # let the swap end; the doomed are admitted but have not run yet
            if gate.in_flight:
                break
            await checkpoint()
        for holder in doomed:
            holder.scope.cancel()
        await settle()
        assert [h.inside for h in doomed] == [False, False]
        assert last.inside
        await last.leave()
    assert (gate.state, gate.in_flight) == ("running", 0)


@pytest.mark.parametrize("turns", range(12))
async def test_cancel_sweep(turns):
    """Cancel everything k turns in, once; afterwards the gate is as new."""
    gate = GenerationGate()
    inside = Counter()

    async def work(enter, kind):
        async with enter():
            inside[kind] += 1
            try:
                assert inside["swap"] <= 1
                assert not (inside["swap"] and inside["request"])
                await checkpoint()
                await checkpoint()
            finally:
                inside[kind] -= 1

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(work, gate.request, "request")
            group.start_soon(work, gate.swap, "swap")
            group.start_soon(work, gate.request, "request")
        for _ in range(turns):
            await checkpoint()
        group.cancel_scope.cancel()
    assert not any(inside.values())
    with anyio.fail_after(5):
        async with gate.swap(timeout=5):
            assert gate.in_flight == 0
        async with gate.request():
            assert gate.in_flight == 1
    assert gate.statistics()["requests_waiting"] == gate.statistics()["swaps_waiting"] == 0


@pytest.mark.fault("A-VERSION-4")
async def test_a_reader_never_sees_two_versions():
    """Fifty tensors' worth of values are replaced one by one with the loop running in between."""
    gate = GenerationGate()
    model = [0] * 50
    seen = []
    done = anyio.Event()

    async def read():
        while not done.is_set():
            async with gate.request():
                values = set()
                for i in range(0, 50, 10):
                    values.update(model[i : i + 10])
                    await checkpoint()
                seen.append(values)

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(read)
        for version in range(1, 21):
            async with gate.swap():
                for i in range(50):
                    model[i] = version
                    if i % 7 == 0:
                        await checkpoint()
        done.set()
    assert all(len(values) == 1 for values in seen)
    assert len({min(values) for values in seen}) > 1


async def test_many_requests_do_not_starve_a_swap():
    gate = GenerationGate()
    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        await stack.enter_async_context(gate.request())
        swap = Holder(group, gate.swap)
        await settle()
        for _ in range(20):
            Holder(group, gate.request)
        await settle()
        assert gate.in_flight == 1
        await stack.aclose()
        await settle()
        assert swap.inside
        await swap.leave()
        assert gate.in_flight == 20
        group.cancel_scope.cancel()
    assert gate.in_flight == 0
