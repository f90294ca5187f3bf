"""Less patience with name servers, on one thread and for a while.

torch's store asks a name server what the address it connects to is called, only for its log. A
reply that is lost costs it five seconds each time, while its own limit for the connection runs out,
and on a host whose name servers do not answer it never connects. The C library of Linux keeps its
resolver's settings per thread, where they can be changed for such a call.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_IS_SET_UP = 1  # RES_INIT of <resolv.h>


class _Settings(ctypes.Structure):
    """How `struct __res_state` begins; applications have relied on it for decades."""

    _fields_ = (
        ("seconds", ctypes.c_int),  # the first wait for a reply
        ("attempts", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("servers", ctypes.c_int),
    )


@contextmanager
def hurried_lookups() -> Iterator[None]:
    """Within, this thread asks one name server once and waits a second; elsewhere a no-op."""
    settings = _of_this_thread()
    if settings is None:
        yield
        return
    usual = settings.seconds, settings.attempts, settings.servers
    settings.seconds, settings.attempts, settings.servers = 1, 1, min(1, settings.servers)
    try:
        yield
    finally:
        settings.seconds, settings.attempts, settings.servers = usual


def _of_this_thread() -> _Settings | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        locate, set_up = library["__res_state"], library["__res_init"]
    except AttributeError:  # not the GNU library: its resolver has other settings, or none
        return None
    locate.restype = ctypes.POINTER(_Settings)
    settings: _Settings = locate().contents
    if not settings.options & _IS_SET_UP and set_up() != 0:
        return None
    return settings
