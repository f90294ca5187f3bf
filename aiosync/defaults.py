"""Every timeout and every size of the protocol in one table.

Seconds end in ``_s``, bytes in ``_bytes``. ``None`` in a public argument always means "the value
of this table", never "no limit".
"""

from __future__ import annotations

import msgspec


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """The table; `DEFAULTS` is the one instance the package reads."""

    total_s: float = 3600.0  # a whole round, `send_weights` from call to return
    admit_s: float = 30.0  # until every member accepted `start`
    hold_s: float = 120.0  # a gateway's start, until somebody decides about it
    pause_s: float = 60.0  # until generation is paused (or resumed)
    stall_s: float = 30.0  # longest time without a byte of progress
    decide_s: float = 40.0  # a verified round, until its driver says commit; less than finish
    finish_s: float = 60.0  # prepare and commit: verify, swap, post-process
    commit_s: float = 300.0  # a worker's swap alone; past it the swap counts as stuck
    queue_s: float = 60.0  # a request behind a pause or a swap, before it is refused
    queue_limit: int = 4096  # requests that queue there
    retry_after_s: float = 1.0  # what a refused request is told
    cleanup_s: float = 1.0  # everything that happens after the deadline or the first failure

    lease_s: float = 30.0  # silence of a trainer that an open round survives
    legacy_lease_s: float = 300.0  # the same for clients that know nothing of leases
    heartbeat_s: float = 10.0  # a third of the lease: one lost beat is no death

    clock_allowance_s: float = 1.0  # by how much the clocks of two hosts may disagree
    beat_s: float = 1.0  # between two probes of a fleet's members
    beats_missed: int = 3  # unanswered probes after which a member is lost
    join_s: float = 5.0  # what one that joins may cost a round, once
    patience: float = 0.3  # share of their own time that members wait for slower ones
    patience_s: float = 1.0  # the same in seconds, at least

    connect_s: float = 5.0  # TCP or Unix connect of one control call
    rpc_s: float = 300.0  # one control call of a phase (vLLM's own default)
    probe_s: float = 10.0  # one call that only asks: status, health, ready, world size
    shutdown_s: float = 0.5  # a closing server waits this long, twice, for running handlers

    body_limit_bytes: int = 64 << 20  # request body a server reads; 60,000 names are 4.5 MB
    init_body_bytes: int = 4 << 20  # the same of calls that announce no metadata
    small_body_bytes: int = 64 << 10  # the same of calls with next to no body
    reply_limit_bytes: int = 4 << 20  # reply body a client reads
    event_limit_bytes: int = 1 << 20  # one line of an event stream
    token_limit_bytes: int = 4 << 10  # a token file
    json_depth: int = 64  # nesting of a control message

    events_history: int = 256  # transitions a hub keeps for `since=`
    subscription: int = 256  # transitions an unread subscription holds before it drops
    buffer_bytes: int = 64 << 20  # one staging buffer of the data plane
    buffers: int = 2  # staging buffers in flight


DEFAULTS = Defaults()
