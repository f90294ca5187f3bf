"""Addresses that others can be told: numeric, without brackets, never a wildcard."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Any

from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Iterable

# Nothing is sent there: connecting a datagram socket only asks the kernel for the route.
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")
_ANY_PORT = 9


def bare_host(host: Any) -> str:
    """A host as stores and sockets want it: a name or a literal, brackets removed.

    Raises:
        Validation: It is a URL, empty, or a wildcard, which nobody can connect to.
    """
    if not isinstance(host, str) or not host.strip() or "/" in host:
        raise Validation(f"a host is a name or an IP address, not {host!r}", phase="init")
    bare = host.strip()
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    try:
        address = ipaddress.ip_address(bare.partition("%")[0])
    except ValueError:
        if ":" in bare:  # a port has a field of its own
            raise Validation(f"{host!r} is no IP address and no name", phase="init") from None
        return bare
    if address.is_unspecified:
        raise Validation(
            f"{host!r} is a wildcard: workers cannot connect to it",
            phase="init",
            next_step="Give an address of this host that the workers reach.",
        )
    return bare


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Families and socket addresses of a bare host; asks the name service.

    Raises:
        Validation: There is no such name.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = f"cannot resolve the host {host!r}: {error}"
        raise Validation(message, phase="init", retryable=True) from error
    return [(family, address) for family, _, _, _, address in found]


def numeric(address: Any) -> tuple[str, int]:
    """Host and port of an IP socket's address; an IPv4 address looks the same on both families."""
    host, port = str(address[0]), int(address[1])
    return host.removeprefix("::ffff:") if "." in host else host, port


def advertised(hosts: Iterable[str | None]) -> str:
    """The address of this host under which all of these peers reach it.

    Args:
        hosts: Where the peers' control servers are; None for one that is not known.

    Raises:
        Validation: No single address of this host is on the way to all of them.
    """
    found = {_source_towards(bare_host(host)) if host else _far_source() for host in hosts}
    others = sorted(source for source in found if not _is_loopback(source))
    if len(others) > 1:
        raise Validation(
            f"the workers reach this host under different addresses: {', '.join(others)}",
            phase="init",
            next_step="Say with master_address which one all of them can use.",
        )
    # Peers on this very host reach any of its addresses.
    return others[0] if others else min(found, default="127.0.0.1")


def _source_towards(host: str) -> str:
    family, address = resolve(host, _ANY_PORT)[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return numeric(probe.getsockname())[0]
    except OSError as error:
        raise Validation(f"no route to the host {host!r}: {error}", phase="init") from error


def _far_source() -> str:
    for host in _FAR_AWAY:
        try:
            return _source_towards(host)
        except Validation:
            continue  # no such route: a host without a network
    return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
