"""A payload that is sent twice is received once."""

from __future__ import annotations

import asyncio

import pytest
from by_hand import ByHand, by_hand, header, owned, values

from aiosync import InvalidTransition

pytestmark = pytest.mark.asyncio


class Once(ByHand):
    one_update = True


async def test_the_same_payload_again_has_the_outcome_of_the_first():
    async with by_hand(Once) as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        engine.hold("update")
        calls = [
            asyncio.create_task(engine.update_weights({"value": 1.0}, header=this))
            for _ in range(3)
        ]
        await engine.reached["update"].wait()
        seq = engine.machine.seq
        assert not any(call.done() for call in calls)
        engine.holds["update"].set()
        await asyncio.gather(*calls)
        await engine.update_weights({"value": 1.0}, header=this)  # late, after a lost answer
        assert engine.steps.count("update") == 1
        with pytest.raises(InvalidTransition, match="a second update in one round"):
            await engine.update_weights({"value": 2.0}, header=this)
        assert engine.machine.seq == seq
        await engine.finish_weight_update("1", header=this)
        assert values(engine.model) == {1.0}
        with pytest.raises(InvalidTransition):
            await engine.update_weights({"value": 1.0}, header=this)


async def test_a_repeated_payload_that_failed_fails_again():
    async with by_hand(Once) as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        engine.hold("update")
        engine.errors["update"] = OSError("disk gone")
        calls = [
            asyncio.create_task(engine.update_weights({"value": 1.0}, header=this))
            for _ in range(2)
        ]
        await engine.reached["update"].wait()
        engine.holds["update"].set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [OSError, OSError]
