"""A version that is sent once more: what a member held before is not taken for this round's."""

from __future__ import annotations

import pytest
from fleets import fleet

import aiosync

pytestmark = pytest.mark.asyncio


def refuse(_weights_id):
    raise RuntimeError("the cache cannot be emptied")


async def test_a_failed_commit_of_a_repeated_version_is_no_success():
    async with fleet(1) as it:
        await it.send(version=5)
        it.workers["w0"].generation.tie_cache("flush", refuse)
        with pytest.raises(aiosync.RemoteError, match="cannot be emptied") as caught:
            await it.send(version=5, rollback=True)
        assert caught.value.report.members[0].outcome == "failed"
        assert it.holders() == set()
        it.workers["w0"].generation.tie_cache("keep")
        report = await it.send(version=5, rollback=True)
        assert report.outcome == "committed"
        assert it.holders() == {"w0"}
