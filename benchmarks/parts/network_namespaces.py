"""Hosts in miniature around a switch: network namespaces, each with a separate link that is shaped both ways."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

PREFIX = "motet-star-"
BUNDLE = ("gso_max_size", "16384")
"""The kernel hands packets on in bundles, and those that are larger than the burst would be taken apart."""


@contextlib.contextmanager
def star_network(
    names: Sequence[str], rate: str, burst: str, free: Sequence[str] = ()
) -> Iterator[dict[str, tuple[str, str]]]:
    """Name -> (namespace, address); removed at the end. The links of names in `free` are not shaped."""
    mine = f"{PREFIX}{os.getpid()}"
    spaces = {name: f"{mine}-{name}" for name in (*names, "switch")}
    try:
        for space in spaces.values():
            run("ip", "netns", "add", space)
        switch = spaces["switch"]
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        found = {}
        for number, name in enumerate(names, 1):
            space, port = spaces[name], f"port{number}"
            ends = ("cable", "netns", space), (port, "netns", switch)
            run("ip", "link", "add", *ends[0], *BUNDLE, "type", "veth", "peer", *ends[1], *BUNDLE)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            run("ip", "-n", switch, "link", "set", port, "up")
            run("ip", "-n", space, "address", "add", f"10.79.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run("ip", "-n", space, "link", "set", device, "up")
            shape = ("tbf", "rate", rate, "burst", burst, "latency", "100ms")
            for where, device in ((space, "cable"), (switch, port)) if name not in free else ():
                run("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, "root", *shape)
            found[name] = space, f"10.79.0.{number}"
        yield found
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 4999)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.sendall(b"x")
"""


def bytes_per_second(sender: str, receiver: tuple[str, str], size: int = 1 << 24) -> float:
    """Measure the throughput of one connection over the link."""
    space, address = receiver
    command = ["ip", "netns", "exec", space, sys.executable, "-c", _RECEIVE, address]
    send = (
        f"import socket, time; c = socket.create_connection(({address!r}, 4999)); s = time.perf_counter(); "
        f"c.sendall(bytes({size})); c.shutdown(socket.SHUT_WR); c.recv(1); print(time.perf_counter() - s)"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline()
        time.sleep(0.1)
        done = subprocess.run(
            ["ip", "netns", "exec", sender, sys.executable, "-c", send], capture_output=True, text=True, check=True
        )
    return size / float(done.stdout)
