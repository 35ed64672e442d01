"""Tokenising in processes of their own, started as `python -m motet.data.corpus.tokenize_workers FOLDER`.

A worker reads the numbers of shards from its standard input and answers with lines of JSON. It is a fresh program
and not a fork, so it is safe to start after torch, from any script; and it ends as soon as its parent is gone.
"""

import contextlib
import fcntl
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TextIO

from motet.core.errors import InputError, MotetError
from motet.data.corpus.shard_writer import build_shard, read_build_plan
from motet.data.corpus.tokenizer import load_tokenizer


def build_in_processes(
    folder: Path, shard_ids: list[int], workers: int, report_bytes_read: Callable[[int], None]
) -> None:
    """Build these shards of a planned folder with so many workers; the first failure ends all."""
    pending_shards: queue.SimpleQueue[int] = queue.SimpleQueue()
    for shard_id in shard_ids:
        pending_shards.put(shard_id)
    processes = min(workers, len(shard_ids))
    progress_lock = threading.Lock()

    def report_under_lock(bytes_read: int) -> None:
        with progress_lock:
            report_bytes_read(bytes_read)

    with _exclusive_folder_lock(folder) as lock:
        worker_processes = [_start_worker(folder, max(1, workers // processes), lock) for _ in range(processes)]
    with contextlib.ExitStack() as cleanup, ThreadPoolExecutor(processes) as pool:
        try:
            futures = [
                pool.submit(_feed_shards, worker, pending_shards, report_under_lock) for worker in worker_processes
            ]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:  # also on Ctrl-C: the threads end when their workers do
            for worker in worker_processes:
                worker.kill()
                cleanup.callback(worker.communicate)


@contextlib.contextmanager
def _exclusive_folder_lock(folder: Path) -> Iterator[int]:
    """A lock of the folder that the workers inherit and hold as long as they live, whatever becomes of their parent."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems know no such locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def wait_for_orphans(folder: Path) -> None:
    """Wait for the workers of a build that was killed: they end by themselves, but may be in the middle of a write."""
    with _exclusive_folder_lock(folder):
        return


def _start_worker(folder: Path, threads: int, lock: int) -> "subprocess.Popen[str]":
    """A worker of so many threads, in a session of its own: Ctrl-C is for the parent, which ends its workers."""
    command = [
        "env",
        f"RAYON_NUM_THREADS={threads}",
        sys.executable,
        "-m",
        "motet.data.corpus.tokenize_workers",
        str(folder),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, pass_fds=(lock,))


def _feed_shards(
    worker: "subprocess.Popen[str]", pending_shards: "queue.SimpleQueue[int]", report_bytes_read: Callable[[int], None]
) -> None:
    """Give a worker one shard after the other until none waits."""
    assert worker.stdin is not None and worker.stdout is not None
    while True:
        try:
            shard_id = pending_shards.get_nowait()
        except queue.Empty:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended: told below
            worker.stdin.write(f"{shard_id}\n")
            worker.stdin.flush()
        for line in worker.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise InputError(answer["error"])
            if "done" in answer:
                break
            report_bytes_read(answer["read"])
        else:
            code = worker.wait()
            raise MotetError(
                f"a process that tokenised ended with code {code}"
                + (" (killed: out of memory? fewer data.workers need less)" if code < 0 else "")
                + "; what is done is kept, the same command goes on from there"
            )


def run_worker(folder: Path, requests: Iterable[str], answers: TextIO) -> None:
    """The worker itself: a shard for every line that comes in."""
    plan = read_build_plan(folder)
    assert plan is not None, f"{folder} has no plan.json"
    spec = "bytes" if plan.tokenizer == "bytes" else str(folder / plan.tokenizer)
    tokenizer = load_tokenizer(spec, plan.sentinels)

    def answer(value: dict[str, int | str]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    for line in requests:
        try:
            build_shard(folder, plan, int(line), tokenizer, lambda read: answer({"read": read}))
        except InputError as error:
            answer({"error": str(error)})
            return
        except OSError as error:
            answer({"error": f"cannot write {error.filename or folder}: {error.strerror or error}; free some space"})
            return
        answer({"done": int(line)})


def _read_requests(source: TextIO, lines: "queue.SimpleQueue[str]") -> None:
    for line in source:
        lines.put(line)
    os._exit(0)  # the parent is gone: another build may be about to write the shard in hand


if __name__ == "__main__":
    queued: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(sys.stdin, queued), daemon=True).start()
    # What a library prints is no answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    run_worker(Path(sys.argv[1]), iter(queued.get, ""), answers)
