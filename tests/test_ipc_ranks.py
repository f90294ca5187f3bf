"""A stock vLLM over CUDA IPC from several trainer ranks: each exports for the worker on its GPU."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch
from fake_vllm import fake_handle, fake_vllm
from limits import SLACK
from processes import lines, program

from statemachines.errors import Validation
from transports.tuple_handle import TupleHandle, decode_handles, encode_handles

pytestmark = pytest.mark.timeout(60)
LIMIT = 9000  # one weight of the model and a bias: chunks that end within a layer's group


async def train(vllm, tmp_path, gpus, *flags, **options):
    """Run a rank on each of `gpus` to its end; what each said."""
    args = [*flags]
    for name, value in options.items():
        args += [f"--{name}", str(value)]
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                program(
                    "ipc_rank.py", vllm.url, "--rank", str(rank), "--size", str(len(gpus)),
                    "--store", str(tmp_path / "store"), "--gpu", gpu, "--limit", str(LIMIT), *args,
                )
            )
            for rank, gpu in enumerate(gpus)
        ]  # fmt: skip
        return await asyncio.gather(*(lines(process, 50) for process in ranks))


def forms(packed):
    return ["--packed"] if packed else []


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("gpus", "exporter"),
    [
        (("a", "b"), {"a": 0, "b": 1}),
        (("b", "a", "b"), {"a": 1, "b": 2}),
        (("a", "none", "b"), {"a": 0, "b": 2}),
        (("none", "b", "b", "a"), {"a": 3, "b": 2}),
    ],
)
async def test_every_worker_takes_the_memory_of_the_last_rank_on_its_gpu(
    packed, gpus, exporter, tmp_path
):
    async with fake_vllm("a", "b") as vllm:
        said = await train(vllm, tmp_path, gpus, *forms(packed))
        for rank in said:
            assert [word["outcome"] for word in rank[1:]] == ["committed"] * 2, rank
            assert [word["kept"] for word in rank[1:]] == [0, 0]
        for gpu, rank in exporter.items():
            assert vllm.pids[gpu] == {said[rank][0]["pid"]}
            assert vllm.prints(gpu) == said[rank][-1]["prints"]
        updates = vllm.calls.count("update")
        assert updates > 2 if packed else updates == 2
        assert vllm.calls[-1] == "finish 2"


def failed(said, vllm, me, *, kind, text, first="RoundCancelled"):
    """One error on all ranks, in time; nothing was committed in that round, and the next one is."""
    for number, rank in enumerate(said):
        word = rank[1]
        assert word["outcome"] is None
        assert word["kind"] == (first if number == me else kind), said
        assert number == me or text in word["error"]
        assert word["seconds"] < 10 + SLACK
        assert rank[2]["outcome"] == "committed"
        assert rank[2]["prints"] == vllm.prints("a") == vllm.prints("b")
    assert "finish 1" not in vllm.calls


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("me", [0, 1])
async def test_a_rank_that_is_cancelled_ends_the_round_on_all(packed, me, tmp_path):
    async with fake_vllm("a", "b") as vllm:
        said = await train(vllm, tmp_path, "ab", *forms(packed), fault="cancel", me=me, at=7)
        failed(said, vllm, me, kind="RoundCancelled", text="was cancelled", first="CancelledError")


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize(
    ("fault", "kind", "text", "first"),
    [
        ("raise", "RemoteError", "gather failed", "ValueError"),
        ("export", "RemoteError", "out of memory", "RuntimeError"),
    ],
)
async def test_a_rank_that_fails_ends_the_round_on_all(
    packed, me, fault, kind, text, first, tmp_path
):
    async with fake_vllm("a", "b") as vllm:
        said = await train(vllm, tmp_path, "ab", *forms(packed), fault=fault, me=me, at=7)
        failed(said, vllm, me, kind=kind, text=text, first=first)


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize("at", [2, 5])
async def test_a_rank_that_fails_between_collectives_leaves_no_peer_in_one(
    packed, me, at, tmp_path
):
    """Packed, tensors 2 and 3 are an update, in a group that goes on to tensor 5."""
    async with fake_vllm("a", "b") as vllm:
        said = await train(
            vllm, tmp_path, "ab", "--collective", *forms(packed), fault="settle", me=me, at=at
        )
        failed(said, vllm, me, kind="RemoteError", text="out of memory", first="RuntimeError")
        assert max(rank[1]["seconds"] for rank in said) < 3 + SLACK


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
async def test_a_worker_that_hangs_ends_the_round_on_all_at_its_deadline(packed, tmp_path):
    async with fake_vllm("a", "b") as vllm:
        released = asyncio.Event()

        async def before(number):
            await released.wait()

        vllm.before = before
        said = await train(vllm, tmp_path, "ab", *forms(packed), rounds=1, total=2)
        released.set()
        # Whose time is up first tells the others that it leaves.
        assert "PhaseTimeout" in (rank[1]["kind"] for rank in said)
        for rank in said:
            assert rank[1]["outcome"] is None
            assert rank[1]["seconds"] < 2 + 1 + 3 + SLACK


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
async def test_what_was_exported_is_kept_until_the_workers_have_finished(packed, tmp_path):
    freed = tmp_path / "store-freed"
    async with fake_vllm("a", "b") as vllm:
        vllm.at_finish = lambda: vllm.calls.append(f"freed {freed.exists()}")
        if packed:
            said = await train(vllm, tmp_path, "ab", "--packed", rounds=1)
        else:  # with a transposed tensor, which travels as a copy
            said = await train(vllm, tmp_path, "ab", kind="odd", rounds=1)
        for gpu, rank in zip("ab", said, strict=True):
            assert rank[1]["outcome"] == "committed", rank
            assert vllm.prints(gpu) == rank[1]["prints"]
        assert "freed False" in vllm.calls
        assert set(freed.read_text().split()) == {"0", "1"}


@pytest.mark.asyncio
async def test_more_handles_than_one_meeting_can_carry(tmp_path):
    async with fake_vllm("a", "b") as vllm:
        said = await train(vllm, tmp_path, "ab", kind="many", handle=70_000, rounds=1)
        for gpu, rank in zip("ab", said, strict=True):
            assert rank[1]["outcome"] == "committed", rank
            assert vllm.prints(gpu) == rank[1]["prints"]


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
async def test_a_worker_that_fails_ends_the_round_on_all(packed, tmp_path):
    async with fake_vllm("a", "b") as vllm:

        async def before(number):
            if number == (2 if packed else 0) and "update" * 9 not in vllm.calls:
                vllm.calls.append("update" * 9)
                raise MemoryError("no memory for embed")

        vllm.before = before
        said = await train(vllm, tmp_path, "ab", *forms(packed))
        text = "no memory for embed"
        failed(said, vllm, 0, kind="RemoteError", text=text, first="RemoteError")
        assert said[0][1]["error"] == said[1][1]["error"]


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
async def test_a_rank_that_dies_is_named(packed, tmp_path):
    async with fake_vllm("a", "b") as vllm:
        said = await train(
            vllm, tmp_path, "ab", *forms(packed), fault="die", me=1, at=7, rounds=1, total=8
        )
        assert len(said[1]) == 1
        assert said[0][1]["kind"] == "PeerLost"
        assert "rank 1" in said[0][1]["error"]
        assert "finish 1" not in vllm.calls


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("flags", "fault", "text"),
    [
        (["--packed"], "limit", "packed_buffer_size_bytes differs between trainer ranks"),
        ([], "lacks", "rank 1 does not hold embed.weight"),
    ],
)
async def test_ranks_that_cannot_export_the_same_are_refused_before_anything_moves(
    flags, fault, text, tmp_path
):
    async with fake_vllm("a", "b") as vllm:
        said = await train(vllm, tmp_path, "ab", *flags, fault=fault, me=1, rounds=1)
        for rank in said:
            assert rank[1]["kind"] == "Validation"
            assert text in rank[1]["error"]
            assert rank[1]["state"] == "initialized"
        assert vllm.calls == []


@pytest.mark.asyncio
async def test_a_gpu_that_no_rank_is_on_is_what_the_worker_says(tmp_path):
    async with fake_vllm("a", "c") as vllm:
        said = await train(vllm, tmp_path, "ab", rounds=1)
        for rank in said:
            assert "not found for GPU UUID c" in rank[1]["error"]


# -- what travels between the ranks -------------------------------------------------------------


def test_a_handle_is_the_same_after_it_has_travelled():
    for tensor in (torch.zeros(3, 4).t(), torch.zeros(8, dtype=torch.bfloat16)[3], torch.ones(0)):
        (args,) = fake_handle("a", tensor).values()
        (handle,) = decode_handles(encode_handles([TupleHandle.of(args)]))
        assert handle.args() == args
        assert [type(part) for part in handle.args()] == [type(part) for part in args]


def test_what_is_no_handle_is_refused():
    (args,) = fake_handle("a", torch.zeros(3)).values()
    for wrong in (args[:-1], (torch.nn.Parameter, *args[1:]), (*args[:4], dict, *args[5:])):
        with pytest.raises(Validation, match="form that travels"):
            TupleHandle.of(wrong)
    good = TupleHandle.of(args)
    for field, value in [
        ("shape", [-1]), ("offset", 2**63), ("memory", b"x" * 257), ("device", True), ("dtype", 3),
    ]:  # fmt: skip
        wrong = {name: getattr(good, name) for name in good.__struct_fields__} | {field: value}
        with pytest.raises(Validation, match="no list of handles"):
            decode_handles(encode_handles([TupleHandle(**wrong)]))
    for name in ("nothing", "Tensor", "__name__"):
        with pytest.raises(Validation, match="dtype"):
            TupleHandle(
                **{f: getattr(good, f) for f in good.__struct_fields__} | {"dtype": name}
            ).args()
    with pytest.raises(Validation, match="no list of handles"):
        decode_handles(b"\xc1")
