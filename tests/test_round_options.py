"""What a round was called with is judged where it was called, by the name of the option."""

from __future__ import annotations

import pytest
from looped import looped

from aiosync import State, Validation

WRONG = [
    ("rollback", "yes"),
    ("rollback", 1),
    ("rollback", None),
    ("on_busy", "later"),
    ("on_busy", ["wait"]),
    ("target", "draft"),
    ("ticket", 3),
    ("timeout", "5"),
    ("budget", 5),
    ("pause", "keep"),
    ("around", 3),
    ("source", "model"),
]


@pytest.mark.asyncio
async def test_a_wrong_value_is_refused_before_a_worker_is_asked():
    async with looped() as pair:
        before = list(pair.calls)
        trainer = pair.trainer
        for name, value in WRONG:
            ways = [trainer.send_weights, trainer.begin_update]
            for way in ways if name == "source" else [*ways, trainer.session]:
                with pytest.raises(Validation, match=name) as caught:
                    await way(version=1, **{name: value})
                assert repr(value)[:4] in str(caught.value) or name == "source"
        assert (pair.calls, trainer.state) == (before, State.INITIALIZED)
        await pair.assert_next_round_works()
        await trainer.send_weights(version=1, rollback=True)
