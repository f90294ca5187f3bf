"""Faults that weight synchronisation is known for: ids, titles, and those that cannot occur here.

An id names a case that tests carry as ``@pytest.mark.fault("A-HANG-1")`` or in their own name
(``test_a_hang_1_...``). `docs/faults.md` says of each what aiosync does.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

FAULTS = {
    "A-HANG-1": "a worker's update call fails while the trainer is sending",
    "A-HANG-2": "the trainer's source raises in the middle of its pass",
    "A-HANG-3": "the stream differs from its announcement in order or count",
    "A-HANG-4": "one worker fails while it loads a middle chunk",
    "A-HANG-5": "the rendezvous and the call that asks for it depend on each other",
    "A-HANG-6": "trainer ranks get out of step in the source's own collectives",
    "A-HANG-7": "a participant dies or stops while the group is set up",
    "A-HANG-8": "worker and restarted trainer wait for each other",
    "A-HANG-9": "a replica is killed in the middle of a round",
    "A-SILENT-1": "success is reported although no bytes, or other bytes, arrived",
    "A-SILENT-2": "a 200 that reports a failure is taken for success",
    "A-SILENT-3": "errors of commands nobody waits for get lost",
    "A-SILENT-4": "only the first of several workers gets the weights",
    "A-STATE-1": "a round starts while another one is under way",
    "A-STATE-2": "a worker believes for good that a failed round is still running",
    "A-STATE-3": "one pause of several fails and the others stay paused",
    "A-STATE-4": "a round is finished while a slow worker still receives",
    "A-STATE-5": "a failure strikes after the old weights were given up",
    "A-LAYOUT-1": "mixed dtypes in one buffer misalign what follows",
    "A-LAYOUT-2": "scalars break the packing",
    "A-LAYOUT-3": "non-contiguous tensors arrive scrambled",
    "A-LAYOUT-4": "a tensor is larger than the buffer, or the buffer size is nonsense",
    "A-LAYOUT-5": "bool and small integers are refused by the transport",
    "A-LAYOUT-6": "bf16 and fp8 bits change, or are taken by one backend only",
    "A-LAYOUT-7": "a tensor is not on the device of the channel",
    "A-LAYOUT-8": "tensors without elements",
    "A-LAYOUT-9": "a wrong shape is accepted because copies broadcast",
    "A-LAYOUT-10": "the two sides disagree about a dtype",
    "A-LAYOUT-11": "tensors with gradients upset sharing or loading",
    "A-LAYOUT-12": "a tensor without data (meta device) in the stream",
    "A-NAMES-1": "of tied tensors only one name arrives",
    "A-NAMES-2": "buffers are left behind",
    "A-NAMES-3": "wrappers put prefixes before the names",
    "A-NAMES-4": "a name that is not sent keeps its old value",
    "A-NAMES-5": "one name comes twice",
    "A-NAMES-6": "names that the worker does not know",
    "A-RDZV-1": "forms of the master's address",
    "A-RDZV-2": "the port is taken",
    "A-RDZV-3": "ranks of several workers collide",
    "A-RDZV-4": "replicas of different sizes",
    "A-RDZV-5": "a worker refuses the trainer that comes after a crashed one",
    "A-RDZV-6": "an address to listen at is given out as one to connect to",
    "A-RDZV-7": "keys of a long-lived store are used twice",
    "A-RDZV-8": "the two sides choose different backends",
    "A-VERSION-1": "a restarted replica serves before it is current",
    "A-VERSION-2": "the version goes backwards after the trainer restarted",
    "A-VERSION-3": "a version is published although a chunk failed",
    "A-VERSION-4": "a forward pass sees half of the new weights",
    "A-VERSION-5": "post-processing runs per chunk instead of once",
    "A-VERSION-6": "what was cached under the old weights is used under the new",
    "A-LIFETIME-1": "a buffer is overwritten while a slow reader still copies",
    "A-LIFETIME-2": "a reader's end removes the writer's shared memory",
    "A-LIFETIME-3": "descriptors leak with every tensor or round",
    "A-LIFETIME-4": "exported GPU memory is never reclaimed",
    "A-LIFETIME-5": "memory is reused before the consumer has opened it",
    "A-LIFETIME-6": "a GPU handle is opened on the wrong device",
    "A-LIFETIME-7": "parameters are replaced instead of written in place",
    "A-LIFETIME-8": "shared memory runs out",
    "A-CANCEL-1": "one cancelled round stops the state machine for good",
    "A-CANCEL-2": "a cancellation or a timeout is swallowed",
    "A-CANCEL-3": "a caller gets the outcome of somebody else's call",
    "A-CANCEL-4": "a blocking call outlives its cancelled task and keeps the process",
    "A-CANCEL-5": "the end of an iterator gets lost between threads",
    "A-CANCEL-6": "one of several calls fails and the others go on behind the caller's back",
    "A-CANCEL-7": "what was opened just after a cancellation is leaked",
    "A-CANCEL-8": "blocking work on the event loop",
    "A-HTTP-1": "an announcement larger than the server's body limit",
    "A-HTTP-2": "the client leaves while the server applies weights",
    "A-HTTP-3": "time limits that cut long calls, or none at all",
    "A-HTTP-4": "replies that are no answer of the protocol",
    "A-HTTP-5": "more replicas than the connection pool has places",
    "A-INPUT-1": "pickles from the network are loaded",
    "A-INPUT-2": "hostile lengths, depths and numbers",
    "A-INPUT-3": "peers of different protocol versions",
}

NOT_HERE = {
    "A-LIFETIME-4": "no GPU memory is exported: `ipc` moves CPU tensors through memory files",
    "A-LIFETIME-6": "no GPU handles: a memory file has no device, and pickled handles are refused",
}

_IN_A_NAME = re.compile(r"test_(?P<id>[ab]_[a-z]+_\d+)(?:_|$)")


def fault_in_name(function: str) -> str | None:
    """The id that a test's own name begins with."""
    found = _IN_A_NAME.match(function)
    return found["id"].upper().replace("_", "-") if found else None


def shown_faults(folder: Path) -> dict[str, set[str]]:
    """The files whose tests show each fault, read from the sources: nothing is imported."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for fault in _faults_in(node):
                found.setdefault(fault, set()).add(path.name)
    return found


def _faults_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        own = fault_in_name(node.name)
        return [own] if own else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
        return [ast.literal_eval(argument) for argument in node.args]
    return []
