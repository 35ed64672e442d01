"""Sockets to the ranks of other hosts: two to each, for collectives and for messages. The higher rank connects.

Both ends prove that they know the token of the run and that of the group, which is in the group's store. A rank
listens only while the group starts, and only if it awaits a higher rank of another host. No stranger ends or holds up
the start.

Values that ranks exchange through the store of their group.

The store of torch lets everybody who reaches it write, so each value is parsed by a pattern that bounds all its parts.
"""

import hashlib
import hmac
import itertools
import logging
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

import psutil
from torch.distributed import Store

from motet.collectives.program import CollectiveError, PeerLostError
from motet.core.errors import MotetError, check_input, convert_os_errors
from motet.core.token_authentication import (
    HOW_TO_GIVE_A_TOKEN,
    AuthenticatedListener,
    HandshakeRefusedError,
    RateLimitedLog,
    RunToken,
    TokenHandshake,
    authenticate,
    read_run_token,
)

_FAILURE = "failed: "
_MAX_VALUE_BYTES = 2048  # Longer than any match of a pattern


def printable(content: bytes | bytearray) -> str:
    """Text that another process sent, for a message: without characters that a terminal could take for a command."""
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


KINDS = COLLECTIVES, MESSAGES = (0, 1)
_PURPOSE = "backend motet"
_FIELDS = struct.Struct("<IIB")  # The rank that connects, the rank that accepts, and the purpose of the socket
_TOKEN_PATTERN = re.compile("([0-9a-f]{64})")
_MAX_ADDRESSES = 64
_LISTENER_PATTERN = re.compile(rf"(\d{{1,5}})((?: \d{{1,3}}(?:\.\d{{1,3}}){{3}}){{1,{_MAX_ADDRESSES}}})")
_BACKLOG = 1024
_CONNECT_TIMEOUT_S = 2.0
_RETRY_INTERVAL_S = 0.2
# Rounds over all addresses of a rank that are made if all refuse, and the least time for rounds if one does not answer.
_REFUSED_ROUNDS, _REACH_TIMEOUT_S = 3, 30.0
_REFUSED = (HandshakeRefusedError, ConnectionRefusedError)
_BUSY = (TimeoutError, ConnectionError)  # Not refused: strangers may keep the port busy

StreamKey = tuple[int, int]  # The other rank, and the purpose of the socket


def connect_to_other_hosts(
    store: Store, rank: int, others: list[int], *, timeout_s: float
) -> dict[StreamKey, socket.socket]:
    """Connect to these ranks, which are all that are not on this host."""
    if rank == 0:
        publish_value(store, "token", _make_group_token)
    run_token = _require_run_token()
    (group_token,) = read_value(store, "token", _TOKEN_PATTERN, writer=0)
    # Whoever reads the store does not know the token of the run, and other groups of the run have other stores.
    secret = hmac.digest(run_token.secret.encode(), group_token.encode(), hashlib.sha256).hex()
    awaited = {(other, kind) for other in others for kind in KINDS if other > rank}
    connections = _HostConnections(rank, RunToken(secret), awaited, reach_s=max(_REACH_TIMEOUT_S, timeout_s / 10))
    try:
        if connections.awaited:
            publish_value(store, f"listener/{rank}", connections.listen)
        for other in (other for other in others if other < rank):
            port, addresses = read_value(store, f"listener/{other}", _LISTENER_PATTERN, writer=other)
            for kind in KINDS:
                connections.connect((other, kind), int(port), addresses.split())
        connections.wait(timeout_s)
    except BaseException:
        for stream in connections.streams.values():
            stream.close()
        raise
    finally:
        connections.stop_listening()
    return connections.streams


def _make_group_token() -> str:
    _require_run_token()
    return secrets.token_hex(32)


def _require_run_token() -> RunToken:
    token = read_run_token(os.environ)  # noqa: TID251  (torch passes no settings to a backend)
    check_input(token is not None, f"ranks of several hosts connect to each other: {HOW_TO_GIVE_A_TOKEN}")
    assert token is not None
    return token


def _host_addresses() -> list[str]:
    interfaces = psutil.net_if_addrs().values()
    addresses = {entry.address for entries in interfaces for entry in entries if entry.family == socket.AF_INET}
    return sorted(addresses, key=lambda address: (address.startswith("127."), address))[:_MAX_ADDRESSES]


class _HostConnections:
    """The connections of a rank while a group starts; higher ranks of other hosts are accepted in the background."""

    def __init__(self, rank: int, token: RunToken, awaited: set[StreamKey], *, reach_s: float) -> None:
        self.streams: dict[StreamKey, socket.socket] = {}
        self.awaited = awaited
        self._rank, self._token, self._reach_s = rank, token, reach_s
        self._lock, self._complete = threading.Lock(), threading.Event()
        self._log = RateLimitedLog(logging.getLogger("motet").warning)
        self._listener: AuthenticatedListener | None = None

    def listen(self) -> str:
        """Accept the awaited ranks from now on. Returns the port and the addresses of this host, for the store."""
        with convert_os_errors("listen for ranks of other hosts", "check the network of this host"):
            server = socket.create_server(("", 0), backlog=_BACKLOG)
        port = server.getsockname()[1]
        self._listener = AuthenticatedListener(server, self._accepting_handshake, self._admit)
        return " ".join([str(port), *_host_addresses()])

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until all higher ranks of other hosts have connected."""
        if self.awaited and not self._complete.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            absent = sorted({other for other, _ in self.awaited})
            raise PeerLostError(
                f"rank {self._rank}: ranks {absent}, on other hosts, did not connect in {timeout_s:g} s; check the "
                "network between the hosts, and that all have the same run token"
            )

    def _accepting_handshake(self) -> TokenHandshake:
        return TokenHandshake(self._token, _PURPOSE, _FIELDS.pack(self._rank, 0, 0), is_accepting=True)

    def _admit(self, stream: socket.socket, fields: bytes) -> None:
        """Take the stream of a rank that is awaited, and refuse one that claims to be another."""
        try:
            other, addressed, kind = _FIELDS.unpack(fields)
        except struct.error:
            other, addressed, kind = -1, -1, -1
        with self._lock:
            if addressed == self._rank and (other, kind) in self.awaited:
                self.awaited.remove((other, kind))
                self.streams[other, kind] = stream
                if not self.awaited:
                    self._complete.set()
                return
        self._log(f"rank {self._rank} refused a connection that claims to be rank {other}, which it does not await")
        stream.close()

    def connect(self, key: StreamKey, port: int, addresses: list[str]) -> None:
        """Connect to a lower rank, at the first of its addresses where it proves to be that rank of the group."""
        give_up_s = time.monotonic() + self._reach_s
        for round_id in itertools.count(1):
            problems: dict[str, Exception] = {}
            for address in addresses:
                try:
                    self.streams[key] = self._connect_at(address, port, key)
                    return
                except (OSError, OverflowError) as error:
                    problems[address] = error
            may_be_busy = any(isinstance(e, _BUSY) and not isinstance(e, _REFUSED) for e in problems.values())
            if time.monotonic() > give_up_s or (round_id >= _REFUSED_ROUNDS and not may_be_busy):
                break
            time.sleep(_RETRY_INTERVAL_S)
        reasons = "; ".join(f"{address}: {error}" for address, error in problems.items())
        raise CollectiveError(
            f"rank {self._rank} cannot reach rank {key[0]}, on another host, at port {port} ({reasons}); check the "
            "network between the hosts, and that all have the same run token"
        )

    def _connect_at(self, address: str, port: int, key: StreamKey) -> socket.socket:
        stream = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S)
        try:
            fields = _FIELDS.pack(self._rank, *key)
            handshake = TokenHandshake(self._token, _PURPOSE, fields, is_accepting=False)
            if authenticate(stream, handshake) != _FIELDS.pack(key[0], 0, 0):
                raise HandshakeRefusedError("another rank is at this address")
        except BaseException:
            stream.close()
            raise
        return stream
