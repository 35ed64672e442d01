"""Strangers at the listener of the backend `motet` while a group of two hosts starts.

Hosts are threads that find each other through a store in memory. Whatever strangers send, the group starts, both ranks
are connected to each other and to nobody else, and no stranger gets a proof.
"""

import hashlib
import hmac
import os
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from fuzzing.cases import FindingError, FuzzCase, FuzzTarget, Outcome, check_equal
from fuzzing.handshakes import CONNECTING, WAIT_S, RawConnection, Secret, Stranger, checked_log
from motet.cli.environment_variables import set_environment_variables
from motet.collectives.shm_backend.transport.host_connections import connect_to_other_hosts
from motet.core.token_authentication import TOKEN_VARIABLE

PURPOSE = b"backend motet"
TOKEN = "the token of the fuzzer's runs"
FIELDS = struct.Struct("<IIB")  # The rank that connects, the one that accepts, and what the socket is for
SOCKETS_OF_RANK = 2


class BackendStrangerTarget(FuzzTarget):
    """Connections to a rank that awaits a rank of another host."""

    name: ClassVar[str] = "backend-strangers"
    first_check: ClassVar[str] = "the hello is complete, has a length that is admitted, and is not the listener's own"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        set_environment_variables({TOKEN_VARIABLE: TOKEN})
        self.pool = ThreadPoolExecutor(4)
        self.replay = self._record()

    def run(self, case: FuzzCase) -> Outcome:
        store = dist.HashStore()
        with checked_log():
            first = self._join(store, 0)
            address = ("127.0.0.1", int(store.get("listener/0").split()[0]))
            secret = self._secret(store)
            connections, is_past = [], False
            try:
                for _ in range(case.rng.choice((1, 1, 1, 2, 3))):
                    if case.is_structured and case.rng.random() < 0.2:
                        connections.append(self._false_rank(case, address, secret))
                        is_past = True
                        continue
                    stranger = Stranger(secret, lambda: FIELDS.pack(1, 0, 0), self.replay)
                    connection, is_past_here = stranger.act(case, address)
                    connections.append(connection)
                    is_past = is_past or is_past_here
                self._check_connected([first, self._join(store, 1)])
            finally:
                for connection in connections:
                    connection.close()
        return Outcome("refused", "the group started without the stranger", is_past)

    def close(self) -> None:
        self.pool.shutdown()

    def _join(self, store: dist.Store, rank: int) -> "Future[Any]":
        return self.pool.submit(connect_to_other_hosts, store, rank, [1 - rank], timeout_s=WAIT_S)

    def _secret(self, store: dist.Store) -> Secret:
        group_token = store.get("token")
        return Secret(hmac.digest(TOKEN.encode(), group_token, hashlib.sha256).hex().encode(), PURPOSE)

    def _check_connected(self, ranks: "list[Future[Any]]") -> None:
        """Bytes that one rank sends arrive at the other one, on the same socket."""
        streams = [rank.result(timeout=2 * WAIT_S) for rank in ranks]
        try:
            for rank, rank_streams in enumerate(streams):
                check_equal("the sockets", sorted(rank_streams), [(1 - rank, kind) for kind in range(SOCKETS_OF_RANK)])
                for (_, kind), stream in rank_streams.items():
                    stream.settimeout(WAIT_S)
                    stream.sendall(bytes([rank, kind]) * 3)
            for rank, rank_streams in enumerate(streams):
                for (_, kind), stream in rank_streams.items():
                    check_equal("the bytes of a rank", stream.recv(99), bytes([1 - rank, kind]) * 3)
        finally:
            for rank_streams in streams:
                for stream in rank_streams.values():
                    stream.close()

    def _false_rank(self, case: FuzzCase, address: tuple[str, int], secret: Secret) -> RawConnection:
        """A process with the token that claims to be a rank that nobody awaits; its connection must be closed."""
        values = case.rng.choice(((0, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 2), (1, 0, 255), (2**32 - 1, 0, 1)))
        fields = FIELDS.pack(*values) if case.rng.random() < 0.8 else case.rng.randbytes(case.rng.choice((0, 1, 8, 10)))
        case.note(f"a rank with the token that says it is {fields!r}")
        connection = RawConnection(address)
        connection.authenticate(secret, case.rng.randbytes(32) + fields)
        if connection.receive(1):
            raise FindingError("a rank that is not awaited was admitted")
        return connection

    def _record(self) -> tuple[bytes, bytes]:
        """A hello and a proof that were good in the start of an earlier group."""
        store = dist.HashStore()
        first = self._join(store, 0)
        address = ("127.0.0.1", int(store.get("listener/0").split()[0]))
        secret, hello = self._secret(store), os.urandom(32) + FIELDS.pack(1, 0, 0)
        connection = RawConnection(address)
        accepting_hello = connection.authenticate(secret, hello)
        other = RawConnection(address)
        other.authenticate(secret, os.urandom(32) + FIELDS.pack(1, 0, 1))
        for stream in first.result(timeout=WAIT_S).values():
            stream.close()
        connection.close()
        other.close()
        assert threading.active_count() < 50
        return hello, secret.proof(CONNECTING, hello, accepting_hello)
