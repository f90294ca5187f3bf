"""The shared secret of the control plane, and where it may be left out."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_token(token: object) -> str:
    """`token` if it can stand in a header.

    Raises:
        Validation: It is empty, or holds spaces or characters outside printable ASCII. The token
            itself is not in the message.
    """
    if not isinstance(token, str) or not token:
        raise Validation("the token must be a non-empty string")
    if not all("!" <= char <= "~" for char in token):
        raise Validation("the token must be printable ASCII without spaces")
    return token


def read_token(path: str | Path) -> str:
    """The token in a file, blanks around it removed. Blocks.

    Raises:
        Validation: The file cannot be read, or what it holds is no token; names the file.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(DEFAULTS.token_limit_bytes + 1)
    except OSError as error:
        raise Validation(f"token file {path}: {error.strerror or error}") from error
    if len(raw) > DEFAULTS.token_limit_bytes:
        raise Validation(f"token file {path}: longer than {DEFAULTS.token_limit_bytes} bytes")
    try:
        return check_token(raw.decode("ascii").strip())
    except UnicodeDecodeError:
        raise Validation(f"token file {path}: not ASCII text") from None
    except Validation as error:
        raise Validation(f"token file {path}: {error.message}") from None


async def load_token(token: str | None, path: str | Path | None) -> str | None:
    """The token given outright, or the one in a file (read beside the event loop), or none.

    Raises:
        Validation: Both were given, or `read_token` refuses the file.
    """
    if token is not None and path is not None:
        raise Validation("give a token or a token file, not both")
    if token is not None:
        return check_token(token)
    if path is None:
        return None
    async with Lane("aiosync-token") as lane:
        return await lane.run(read_token, path)


def is_authorized(token: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request's headers (names in lower case) carry `token`; constant time.

    Without a token everything is allowed that no browser sent on behalf of another site: a page
    must not drive a worker on its reader's own machine.
    """
    if token is None:
        return "origin" not in headers
    given = headers.get("authorization", "")
    scheme, _, value = given.partition(" ")
    known = scheme.lower() == "bearer"
    # Header bytes that are no text arrive as surrogates.
    sent = value.strip().encode("utf-8", "surrogateescape")
    same = hmac.compare_digest(sent, token.encode())
    return known and same


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
