"""The collector's threshold while many objects are made, and who makes them so."""

from __future__ import annotations

import ast
import gc
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from insiders import another_inside

import aiosync
from aiosync import few_collections as module
from aiosync.codec import convert, decode_json, decode_msgpack
from aiosync.engines.streamed import StreamUpdateInfo, plan_of
from aiosync.feed import SourceFeed
from aiosync.few_collections import OBJECTS, few_collections
from aiosync.glance import Glance
from aiosync.infos import parse_info
from aiosync.metadata import from_wire, plain_metas, to_wire
from aiosync.module_layout import lay_out
from aiosync.module_walk import named_members
from aiosync.ranks import TrainerRanks
from aiosync.sinks import InPlaceSink
from aiosync.source_pass import SourcePass
from aiosync.spare import views_into
from aiosync.streaming import stream_in
from transports.lane import Lane

USUAL = (700, 10, 10)
ROOT = Path(__file__).resolve().parents[1]
MANY = 3000


@pytest.fixture(autouse=True)
def usual_thresholds():
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(*USUAL)
    gc.enable()
    gc.collect()
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


@contextmanager
def counted():
    """The generations of all collections that begin meanwhile."""
    found: list[int] = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_nothing_is_collected_inside_and_all_is_as_before_outside():
    with counted() as found, few_collections:
        kept = [[] for _ in range(20_000)]
        assert not found
    assert gc.get_threshold() == USUAL
    with counted() as found:
        kept += [[] for _ in range(2_000)]
    assert found  # what waited is looked at


def test_an_error_puts_it_back():
    with pytest.raises(KeyError), few_collections:
        raise KeyError
    assert gc.get_threshold() == USUAL


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "OBJECTS", 5_000)
    with counted() as found, few_collections:
        kept = [[] for _ in range(12_000)]
        assert found
    assert len(kept) == 12_000


def test_the_last_of_several_threads_puts_it_back():
    with ExitStack() as stack:
        with few_collections, few_collections:
            stack.enter_context(another_inside(few_collections))
        assert gc.get_threshold() == (OBJECTS, *USUAL[1:])
    assert gc.get_threshold() == USUAL


def test_a_collector_that_somebody_disabled_stays_so():
    gc.disable()
    with few_collections:
        pass
    assert not gc.isenabled()
    gc.enable()
    with few_collections:
        gc.disable()
    assert not gc.isenabled()
    with few_collections:
        gc.enable()
    assert gc.isenabled()
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("theirs", [0, OBJECTS + 1])
def test_thresholds_that_are_off_or_higher_stay(theirs):
    gc.set_threshold(theirs, 10, 10)
    with few_collections:
        assert gc.get_threshold() == (theirs, 10, 10)
    assert gc.get_threshold() == (theirs, 10, 10)


@pytest.mark.parametrize("theirs", [(0, 10, 10), (50_000, 20, 100), (700, 10, 10)])
def test_what_somebody_sets_meanwhile_stays(theirs):
    with few_collections:
        gc.set_threshold(*theirs)
    assert gc.get_threshold() == theirs


@pytest.mark.filterwarnings("ignore:.*fork")  # of a process with threads
def test_a_forked_child_has_nobody_inside():
    # The lock is held by a thread that the child does not have.
    with another_inside(few_collections), few_collections._lock:
        pid = os.fork()
        if pid == 0:
            found = [gc.get_threshold()]
            if few_collections._lock.acquire(timeout=1):
                few_collections._lock.release()
                with few_collections:
                    found.append(gc.get_threshold())
                found.append(gc.get_threshold())
            os._exit(found != [USUAL, (OBJECTS, *USUAL[1:]), USUAL])
        assert os.waitpid(pid, 0)[1] == 0
    assert gc.get_threshold() == USUAL


# -- who makes many


NAMES = [f"layers.{at}.weight" for at in range(MANY)]
SHAPES = [(2, at % 3 + 1) for at in range(MANY)]
METAS = plain_metas(NAMES, [torch.float32] * MANY, SHAPES)
LISTS = dict(zip(("names", "dtype_names", "shapes"), to_wire(METAS), strict=True))
INFO = LISTS | {"metadata_digest": "d", "plan_digest": "p"}
JSON, MSGPACK = msgspec.json.encode(INFO), msgspec.msgpack.encode(INFO)


def a_glance():
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(MANY // 2))
    tensors = named_members(model)[0]
    return lambda: Glance.of(model, tensors, list(tensors))


def a_layout():
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(MANY // 2))
    return lambda: lay_out(model, rename=None, dtype=None, persistent=False)


MAKERS = {
    "a module's description": a_layout,
    "an announcement that arrives": lambda: lambda: from_wire(*LISTS.values()),
    "a plan": lambda: lambda: plan_of(METAS, 1 << 20),
    "spare memory": lambda: lambda: views_into(torch.empty(64 * MANY, dtype=torch.uint8), METAS),
    "a body": lambda: lambda: decode_json(JSON, dict),
    "a body of msgpack": lambda: lambda: decode_msgpack(MSGPACK, dict),
    "its check": lambda: lambda: convert(INFO, StreamUpdateInfo),
    "an info": lambda: lambda: parse_info(StreamUpdateInfo, INFO, what="update_info"),
    "a glance": a_glance,
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_makers_of_many_objects_have_few_collections(maker):
    make = maker()
    make()  # what is made once, such as torch's guards
    gc.set_threshold(100, 10, 10)
    gc.collect()
    with counted() as found:
        made = make()
    assert made is not None
    assert len(found) <= MANY // 300  # one for each hundred objects otherwise


def test_a_plan_is_nothing_to_the_collector():
    (chunk,) = plan_of(METAS, 1 << 20).chunks
    assert not any(map(gc.is_tracked, chunk.pieces))


class OwnSource(aiosync.ModuleSource):
    def iter_full(self):
        yield from super().iter_full()


@pytest.mark.parametrize("kind", [aiosync.ModuleSource, OwnSource])
def test_a_pass_over_a_modules_own_parameters_has_few_collections(kind):
    seen = []

    class Sender:
        takes_parameters = True

        def write(self, batch):
            seen.append(gc.get_threshold()[0])

    the_pass = SourcePass(SourceFeed(kind(torch.nn.Linear(2, 2))), TrainerRanks.alone(), Sender())
    the_pass.prepare()
    the_pass.run()
    assert set(seen) == {OBJECTS if kind is aiosync.ModuleSource else USUAL[0]}
    assert gc.get_threshold() == USUAL


class Loading(torch.nn.Linear):
    def load_weights(self, pairs):
        return {name for name, _ in pairs}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [torch.nn.Linear, Loading])
async def test_tensors_arrive_with_few_collections_where_no_code_of_others_takes_them(kind):
    seen, net = [], kind(2, 2)

    class Receiver:
        def receive(self, plan, destination, landed, **options):
            seen.append(gc.get_threshold()[0])
            destination.meanwhile(1)
            seen.append(gc.get_threshold()[0])
            destination.meanwhile(None)  # all is on its way
            seen.append(gc.get_threshold()[0])

        def close(self):
            pass

    sink, lane = InPlaceSink(net), Lane("few")
    metas = [aiosync.ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in net.named_parameters()]
    options = {"plan": None, "round": 1, "stall": 1.0, "grace": 1.0, "lane": lane}
    try:
        await stream_in(Receiver(), sink, prepare=lambda: sink.begin(metas), **options)
    finally:
        lane.close()
    inside = USUAL[0] if kind is Loading else OBJECTS
    assert seen == [inside, inside, USUAL[0]]
    assert gc.get_threshold() == USUAL


def test_nobody_waits_inside():
    """Others would run meanwhile, for as long as they please."""
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)

    def uses(tree):
        return [
            block
            for block in ast.walk(tree)
            if isinstance(block, ast.With)
            and any("few_collections" in ast.dump(item) for item in block.items)
        ]

    found = [
        block
        for path in (ROOT / "aiosync").rglob("*.py")
        for block in uses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found
    assert not any(isinstance(node, waits) for block in found for node in ast.walk(block))


def test_what_somebody_saved_inside_and_put_back_afterwards_does_not_stay():
    with few_collections:
        saved = gc.get_threshold()
        gc.set_threshold(50, 5, 5)
    gc.set_threshold(*saved)
    with few_collections:
        assert gc.get_threshold()[0] == OBJECTS
    assert gc.get_threshold() == USUAL


def test_one_who_was_just_leaving_is_not_there_in_a_forked_child():
    few_collections.__enter__()
    with few_collections._lock:
        few_collections._users -= 1  # and is about to put it back
        few_collections.begin_anew()
    assert gc.get_threshold() == USUAL


def test_what_somebody_sets_inside_stays_when_another_comes():
    with few_collections:
        gc.set_threshold(50, 5, 5)
        with few_collections:
            assert gc.get_threshold() == (50, 5, 5)
    assert gc.get_threshold() == (50, 5, 5)
