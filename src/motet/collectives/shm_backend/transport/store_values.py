"""Values that ranks exchange through the store of their group.

The store of torch lets everybody who reaches it write, so each value is parsed by a pattern that bounds all its parts.
"""

import re
from collections.abc import Callable

from torch.distributed import Store

from motet.collectives.errors import CollectiveError, PeerLostError
from motet.core.errors import MotetError

_FAILURE = "failed: "
_MAX_VALUE_BYTES = 2048  # Longer than what any pattern matches


def printable(content: bytes | bytearray) -> str:
    """Text that another process sent, for a message: without what a terminal could take for a command."""
    text = content.rstrip(b"\0").decode(errors="replace")
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def publish_value(store: Store, key: str, make: Callable[[], str]) -> str:
    """Set a value that other ranks wait for. If it cannot be made, they get the reason instead."""
    try:
        value = make()
    except MotetError as error:
        store.set(key, f"{_FAILURE}{error}")
        raise
    store.set(key, value)
    return value


def read_value(store: Store, key: str, pattern: re.Pattern[str], *, writer: int) -> tuple[str, ...]:
    """Wait for a value of another rank, and return the groups of its pattern."""
    try:
        content = store.get(key)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PeerLostError(f"rank {writer} did not set {key} in the store of the group: {reason}") from error
    if match := pattern.fullmatch(content[:_MAX_VALUE_BYTES].decode(errors="replace")):
        return match.groups()
    text = printable(content[:_MAX_VALUE_BYTES])
    if text.startswith(_FAILURE):
        raise PeerLostError(f"rank {writer} failed: {text.removeprefix(_FAILURE)}")
    raise CollectiveError(
        f"the store of the group has {text[:80]!r} ({len(content)} bytes) as {key} of rank {writer}, which no rank "
        "sets; let only ranks of the same version of motet reach the store"
    )
