"""The start of the backend among strangers, forged values in the store, and memory that is not a group's.

Hosts are threads here, which find each other through a store in memory and connect through real sockets.
"""

import fcntl
import hmac
import os
import re
import resource
import select
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from motet.collectives.program import CollectiveError, PeerLostError
from motet.collectives.shm_backend.transport import rendezvous, shared_memory
from motet.collectives.shm_backend.transport.host_connections import (
    StreamKey,
    connect_to_other_hosts,
    publish_value,
    read_value,
)
from motet.core import token_authentication
from motet.core.errors import InputError
from motet.core.token_authentication import NO_AUTH_VARIABLE, TOKEN_VARIABLE, RunToken, TokenHandshake, authenticate
from motet.parallel.process.launch_environment import RankEnvironment
from motet_groups import motet_group
from ranks import Ranks
from refusals import refused

TOKEN = "of these tests only"
Streams = dict[StreamKey, socket.socket]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return dist.HashStore()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def join(pool: ThreadPoolExecutor, store: dist.Store, rank: int, ranks: int = 2) -> Future[Streams]:
    others = [other for other in range(ranks) if other != rank]
    return pool.submit(connect_to_other_hosts, store, rank, others, timeout_s=10.0)


def port_of(store: dist.Store, rank: int) -> int:
    return int(store.get(f"listener/{rank}").split()[0])


def check(*ranks: Future[Streams]) -> None:
    """Check that bytes sent on each socket arrive at the rank and on the socket that they are for."""
    streams = [rank.result(timeout=20) for rank in ranks]
    for rank, rank_streams in enumerate(streams):
        assert sorted(rank_streams) == [
            (other, kind) for other in range(len(ranks)) if other != rank for kind in range(2)
        ]
        for (other, kind), stream in rank_streams.items():
            stream.sendall(bytes([rank, other, kind]))
    for rank, rank_streams in enumerate(streams):
        for (other, kind), stream in rank_streams.items():
            with stream:
                assert stream.recv(9) == bytes([other, rank, kind])


def reset(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


STRANGERS: dict[str, tuple[int, Callable[[socket.socket], object]]] = {
    "silent": (1, lambda stream: None),
    "many that are silent": (100, lambda stream: None),
    "gone": (3, lambda stream: stream.close()),
    "reset": (3, reset),
    "half a hello": (3, lambda stream: stream.sendall((44).to_bytes(4, "big") + b"x" * 20)),
    "rubbish": (3, lambda stream: stream.sendall(bytes(range(256)))),
    "a hello of 4 GiB": (3, lambda stream: stream.sendall(b"\xff" * 4 + b"x" * 100)),
    "the old greeting": (3, lambda stream: stream.sendall(b"0" * 32 + b"\1\0\0\0\0")),
    "a hello and a false proof": (3, lambda stream: stream.sendall((41).to_bytes(4, "big") + b"x" * 41 + b"y" * 32)),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_neither_end_nor_hold_up_the_start(
    pool: ThreadPoolExecutor, store: dist.Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    count, act = STRANGERS[name]
    monkeypatch.setattr(token_authentication, "HANDSHAKE_TIMEOUT_S", 3600.0)
    first = join(pool, store, 0)
    strangers = [socket.create_connection(("127.0.0.1", port_of(store, 0))) for _ in range(count)]
    try:
        for stranger in strangers:
            act(stranger)
        check(first, join(pool, store, 1))
    finally:
        for stranger in strangers:
            stranger.close()


def test_three_hosts_connect(pool: ThreadPoolExecutor, store: dist.Store) -> None:
    check(*[join(pool, store, rank, 3) for rank in range(3)])


def test_a_rank_of_another_run_is_refused(
    pool: ThreadPoolExecutor, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = join(pool, store, 0)
    port_of(store, 0)
    monkeypatch.setenv(TOKEN_VARIABLE, "of those other tests")
    with pytest.raises(CollectiveError, match=r"rank 1 cannot reach rank 0.*that all have the same run token"):
        join(pool, store, 1).result(timeout=20)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    check(first, join(pool, store, 1))


def test_a_rank_that_serves_another_run_is_not_believed(
    pool: ThreadPoolExecutor, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write to the store can name a port where something else listens."""
    other_store = dist.HashStore()
    elsewhere = join(pool, other_store, 0)
    store.set("token", other_store.get("token"))
    store.set("listener/0", other_store.get("listener/0"))
    port_of(other_store, 0)
    monkeypatch.setenv(TOKEN_VARIABLE, "of those other tests")
    with pytest.raises(CollectiveError, match="rank 1 cannot reach rank 0"):
        join(pool, store, 1).result(timeout=20)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    check(elsewhere, join(pool, other_store, 1))


def test_several_hosts_need_a_token_or_the_wish_to_have_none(
    pool: ThreadPoolExecutor, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    ranks = [join(pool, store, rank) for rank in range(2)]
    for rank in ranks:
        with pytest.raises(
            InputError, match=f"connect to each other: give every host the same token in .*{TOKEN_VARIABLE}"
        ):
            rank.result(timeout=20)
    monkeypatch.setenv(NO_AUTH_VARIABLE, "1")
    store = dist.HashStore()
    check(*[join(pool, store, rank) for rank in range(2)])


def connected(store: dist.Store, fields: tuple[int, int, int]) -> socket.socket:
    """A socket to rank 0, whose other end knows both tokens and says this of itself."""
    secret = hmac.digest(TOKEN.encode(), store.get("token"), "sha256").hex()
    handshake = TokenHandshake(RunToken(secret), "backend motet", struct.pack("<IIB", *fields), is_accepting=False)
    stream = socket.create_connection(("127.0.0.1", port_of(store, 0)))
    assert authenticate(stream, handshake) == struct.pack("<IIB", 0, 0, 0)
    return stream


@pytest.mark.parametrize("claim", [(2, 0, 0), (0, 0, 0), (1, 0, 2), (1, 1, 0), (1, 0, 0)])
def test_a_claim_to_be_another_rank_is_refused(
    pool: ThreadPoolExecutor, store: dist.Store, claim: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The second socket for collectives of rank 1 is refused, too."""
    first = join(pool, store, 0)
    streams = [connected(store, fields) for fields in ((1, 0, 0), claim)]
    second = streams[1]
    (mad,), _, _ = select.select(streams, [], [], 10)
    streams.remove(mad)
    with mad:
        assert mad.recv(1) == b"" and (mad is second or claim == (1, 0, 0))
    assert f"rank 0 refused a connection that claims to be rank {claim[0]}" in caplog.text
    streams.append(connected(store, (1, 0, 1)))
    second_streams: Future[Streams] = Future()
    second_streams.set_result({(0, kind): stream for kind, stream in enumerate(streams)})
    check(first, second_streams)


def test_all_who_do_not_come_are_named(pool: ThreadPoolExecutor, store: dist.Store) -> None:
    with pytest.raises(PeerLostError, match=r"rank 0: ranks \[1, 2\], on other hosts, did not connect in 0.2 s"):
        connect_to_other_hosts(store, 0, [1, 2], timeout_s=0.2)


FORGED = {
    "contact/1": [
        *(b"", b"[]", b"1 2", b"-1 2 host", b"9999999999 2 host", b"1 2 " + b"h" * 301, b"1 2 \xff\xfe", b"1 2 a\nb"),
        *(b"9" * 5000 + b" 2 host", b"[" * 100_000, b"1 2 " + b"\0" * 10_000_000),
    ],
    "memory/1": [b"", b"-1", b"1e3", b"9999999999", b"/etc/passwd", b"3 4"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in FORGED.items() for value in values])
def test_forged_values_of_the_store_are_refused(key: str, value: bytes) -> None:
    store = dist.HashStore()
    store.set("contact/1", f"{os.getpid()} {rendezvous.process_start_ticks(os.getpid())} {rendezvous.host_identity()}")
    store.set(key, value)
    # This process stands in for rank 1 that is the first of its host, so that rank 2 maps its memory.
    store.set("contact/0", "1 1 another host")
    with pytest.raises(
        CollectiveError, match=rf"^the store of the group has .{{2,82}} \({len(value)} bytes\) as {key}"
    ):
        rendezvous.establish_connections(store, 2, 3, timeout_s=1.0)


def test_a_forged_listener_is_refused(store: dist.Store) -> None:
    store.set("token", "0" * 64)
    for value in ("", "80", "-80 127.0.0.1", "8000000 127.0.0.1", "80 a.example", "80" + " 127.0.0.1" * 65):
        store.set("listener/0", value)
        with pytest.raises(CollectiveError, match=r"as listener/0 of rank 0, which no rank sets"):
            connect_to_other_hosts(store, 1, [0], timeout_s=1.0)
    store.set("listener/0", "99999 127.0.0.1")
    with pytest.raises(CollectiveError, match="rank 1 cannot reach rank 0, on another host, at port 99999"):
        connect_to_other_hosts(store, 1, [0], timeout_s=1.0)


def test_a_value_that_cannot_be_made_ends_the_ranks_that_wait_for_it() -> None:
    def fail() -> str:
        raise InputError("cannot make it: no room")

    store = dist.HashStore()
    refused("cannot make it", publish_value, store, "memory/0", fail)
    with pytest.raises(PeerLostError, match=r"^rank 0 failed: cannot make it: no room$"):
        read_value(store, "memory/0", re.compile("([0-9]+)"), writer=0)
    store.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(PeerLostError, match=r"^rank 3 did not set memory/3 in the store of the group: "):
        read_value(store, "memory/3", re.compile("([0-9]+)"), writer=3)


def without_a_listener(place: RankEnvironment) -> None:
    def listen(*_: object) -> None:
        raise AssertionError("a rank listens")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", listen)
        with motet_group(place):
            dist.all_reduce(torch.ones(3))


def test_ranks_of_one_host_do_not_listen(ranks: Ranks) -> None:
    ranks.run_places(2, without_a_listener)


# The memory of a host.
def file_of(size: int, *, path: Path | None = None, seals: int = 0) -> int:
    """A file in memory, or on a disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT) if path else os.memfd_create("motet", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_only_the_memory_of_a_group_is_mapped(tmp_path: Path) -> None:
    size = shared_memory.SharedMemoryLayout(2).total_bytes
    descriptor = shared_memory.create_shared_memory(2)
    status = os.fstat(descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0 and not os.get_inheritable(descriptor)
    for length in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, length)
    opened = shared_memory.open_shared_memory(2, os.getpid(), descriptor)
    shared_memory.SharedMemorySegment(2, opened).words[3] = 5
    assert shared_memory.SharedMemorySegment(2, descriptor).words[3] == 5
    seals, pipe = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, os.pipe()
    unlike = {
        file_of(size, path=tmp_path / "planted"): "can be shortened by others",
        file_of(size): "can be shortened by others",
        file_of(size // 2, seals=seals): f"has {size // 2} bytes instead of {size}",
        os.open(tmp_path, os.O_RDONLY): "is not a file",
        os.open("/dev/null", os.O_RDWR): "is not a file",
        pipe[0]: "is not a file",
    }
    for planted, problem in unlike.items():
        refused(rf"/{planted}, which the store names .* {problem}", open_memory, planted)
    for number in (opened, descriptor, *unlike, pipe[1]):
        os.close(number)
    refused(r"which the store names .* is not a file", open_memory, descriptor)


def open_memory(descriptor: int) -> int:
    return shared_memory.open_shared_memory(2, os.getpid(), descriptor)


@pytest.mark.parametrize(
    ("limit", "value", "sentence"),
    [
        (resource.RLIMIT_FSIZE, 1 << 20, r"may have 1 MiB, .* File too large; raise .* \(ulimit -f\)"),
        (resource.RLIMIT_NOFILE, 3, r"and 3 of them may be open\): Too many open files; raise .* \(ulimit -n\)"),
    ],
)
def test_a_limit_below_the_memory_is_named(limit: int, value: int, sentence: str) -> None:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        refused(f"^cannot make the 18.1 MiB of memory that the 2 ranks of this host share .*{sentence}", make_memory)
    finally:
        resource.setrlimit(limit, before)


def make_memory() -> int:
    return shared_memory.create_shared_memory(2)
