"""The bandwidth of a disk with motet's direct IO, against fio with io_uring.

Both read and overwrite a file of the same size that lies on the disk already, past the page cache, in turn in one run;
who comes first changes from round to round. motet has a few threads and pieces of 4 MiB, as for the state of an
optimizer on disk; fio has a queue of `--depth` blocks. Without fio, motet is measured alone.

    python benchmarks/disk.py [--folder .] [--mebibytes 1024] [--threads 3] [--depth 8] [--block-mebibytes 1]
                              [--rounds 15] [--page]

--page writes docs/benchmarks/disk.md.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table
from parts.rounds import interleave, progress, quartiles, ratio_text

from motet.core.direct_io import PIECE_BYTES, THREADS, DirectFile, IoThreads, aligned_buffer

PAGE = DOCS / "disk.md"
ACTIONS = ("read", "write")
MOTET, FIO = "motet", "fio"
HEADER = ["", "motet (GB/s)", "quartiles", "fio (GB/s)", "quartiles", "motet / fio"]
NO_FIO = "fio is not installed here (on Debian: apt-get install fio), so motet is measured alone."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk")
    parser.add_argument("--mebibytes", type=int, default=1024, help="the size of the file")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads of motet")
    parser.add_argument("--depth", type=int, default=8, help="blocks in the queue of fio")
    parser.add_argument("--block-mebibytes", type=int, default=1, help="the size of a block of fio")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, rounds=1, mebibytes=32)
    parts = measure(options)
    print("\n\n".join(parts))
    if options.page:
        fill(PAGE, parts)


def measure(options: argparse.Namespace) -> list[str]:
    """The paragraphs and the table of the page."""
    piece_bytes = min(PIECE_BYTES, options.mebibytes * 2**20)
    size = options.mebibytes * 2**20 // piece_bytes * piece_bytes
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="motet-disk-") as folder:
        path = Path(folder, "file.bin")
        with closing(DirectFile(path, create=True)) as file, closing(IoThreads(options.threads)) as threads:
            progress(f"write {size // 2**20} MiB for the first time")
            file.allocate(size, "make room or set --folder")
            buffers = [aligned_buffer(piece_bytes) for _ in range(2 * options.threads)]
            motet = {
                (MOTET, name): partial(motet_Bps, transfer, file, buffers)
                for name, transfer in (("read", threads.read), ("write", threads.write))
            }
            motet[MOTET, "write"]()
            fio = {(FIO, name): partial(fio_Bps, name, path, options) for name in ACTIONS}
            has_fio = shutil.which("fio") is not None
            rates = interleave(motet | fio if has_fio else motet, options.rounds)
            is_direct = file.is_direct
    rows = [[name, *row_of_action(name, rates, has_fio)] for name in ACTIONS]
    kind = "direct" if is_direct else "buffered, as the filesystem has no direct IO"
    where = (
        f"A file of {size // 2**20} MiB; motet: {options.threads} threads, pieces of {piece_bytes // 2**20} MiB "
        f"on huge pages where the host has them, {kind}; {fio_text(options) if has_fio else NO_FIO} "
        f"{options.rounds} rounds; GB are 10^9 bytes."
    )
    return [where, table(HEADER if has_fio else HEADER[:3], rows)]


def fio_text(options: argparse.Namespace) -> str:
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{version}: io_uring, depth {options.depth}, blocks of {options.block_mebibytes} MiB on its usual pages."


def row_of_action(name: str, rates: Mapping[tuple[str, str], Sequence[float]], has_fio: bool) -> list[str]:
    cells = []
    for who in (MOTET, FIO) if has_fio else (MOTET,):
        low, _, high = quartiles(rates[who, name])
        cells += [f"{statistics.median(rates[who, name]) / 1e9:.2f}", f"{low / 1e9:.2f} to {high / 1e9:.2f}"]
    return [*cells, ratio_text(rates[MOTET, name], rates[FIO, name])] if has_fio else cells


def motet_Bps(  # noqa: N802
    transfer: Callable[[DirectFile, memoryview, int], "Future[None]"], file: DirectFile, buffers: Sequence[memoryview]
) -> float:
    """Bytes per second through the whole file, with one transfer for each buffer under way."""
    size, under_way = file.path.stat().st_size, deque[tuple["Future[None]", memoryview]]()
    start_s = time.perf_counter()
    free = list(buffers)
    for offset in range(0, size, len(buffers[0])):
        if not free:
            done, buffer = under_way.popleft()
            done.result()
            free.append(buffer)
        buffer = free.pop()
        under_way.append((transfer(file, buffer, offset), buffer))
    for done, _ in under_way:
        done.result()
    return size / (time.perf_counter() - start_s)


def fio_Bps(name: str, path: Path, options: argparse.Namespace) -> float:  # noqa: N802
    """Bytes per second of fio through the same file, without the start of its process."""
    settings = {
        "name": name,
        "filename": path,
        "rw": name,
        "size": path.stat().st_size,
        "bs": f"{options.block_mebibytes}m",
        "ioengine": "io_uring",
        "iodepth": options.depth,
        "direct": 1,
        "overwrite": 1,
        "output-format": "json",
    }
    command = ["fio", *(f"--{key}={value}" for key, value in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][name]["bw_bytes"])


if __name__ == "__main__":
    main()
