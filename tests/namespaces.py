"""Two hosts on one machine, for tests: network namespaces joined by a cable, each with a host name of its own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    name: str
    space: str

    def command(self, *command: str) -> list[str]:
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.space, *named, *command]


def missing() -> str | None:
    """Why there can be no hosts here, if that is so."""
    if os.geteuid() != 0:
        return "hosts in miniature are network namespaces, which only root can make"
    for command in ("ip", "unshare", "hostname"):
        if shutil.which(command) is None:
            return f"the command {command} is missing"
    trial = f"motet-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
    return None if made.returncode == 0 else f"network namespaces cannot be made here: {made.stderr.strip()}"


@contextlib.contextmanager
def two_hosts(*names: str) -> Iterator[list[Host]]:
    hosts = [Host(name, f"motet-{os.getpid()}-{name}") for name in names]
    # `ip netns exec` shows the files of this folder in /etc.
    folders = [Path("/etc/netns") / host.space for host in hosts]
    try:
        for host, folder in zip(hosts, folders, strict=True):
            _run("ip", "netns", "add", host.space)
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"10.78.0.{n} {name}" for n, name in enumerate(names, 1))]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        ends = [("cable", "netns", host.space) for host in hosts]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, host in enumerate(hosts, 1):
            _run("ip", "-n", host.space, "address", "add", f"10.78.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _run("ip", "-n", host.space, "link", "set", device, "up")
        yield hosts
    finally:
        for host, folder in zip(hosts, folders, strict=True):
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}"
