"""Tokenising in separate processes, started as `python -m motet.data.corpus.tokenize_workers FOLDER`.
A worker reads shard ids from standard input and answers with lines of JSON. It is no fork, so any script can start it
after torch; it ends as soon as its parent does."""

import contextlib
import fcntl
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TextIO

from motet.core.errors import InputError, MotetError
from motet.data.corpus.shard_writer import build_shard, read_build_plan
from motet.data.corpus.tokenizer import load_tokenizer


def build_in_processes(folder: Path, shard_ids: list[int], *, workers: int, advance: Callable[[int], None]) -> None:
    """Build these shards of a planned folder with `workers` processes; the first failure ends all."""
    pending, count = deque(shard_ids), min(workers, len(shard_ids))
    progress_lock = threading.Lock()

    def advance_under_lock(bytes_read: int) -> None:
        with progress_lock:
            advance(bytes_read)

    with _exclusive_folder_lock(folder) as lock:
        processes = [_start_worker(folder, max(1, workers // count), lock) for _ in range(count)]
    with contextlib.ExitStack() as cleanup, ThreadPoolExecutor(count) as pool:
        try:
            futures = [pool.submit(_feed_shards, worker, pending, advance_under_lock) for worker in processes]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:  # also on Ctrl-C: the threads end when their workers do
            for worker in processes:
                worker.kill()
                cleanup.callback(worker.communicate)


@contextlib.contextmanager
def _exclusive_folder_lock(folder: Path) -> Iterator[int]:
    """A lock of the folder that the workers inherit and hold as long as they live, with or without their parent."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def wait_for_orphans(folder: Path) -> None:
    """Wait until the workers of a killed build have ended, since one may be writing a file."""
    with _exclusive_folder_lock(folder):
        return


def _start_worker(folder: Path, threads: int, lock: int) -> "subprocess.Popen[str]":
    # In a new session: Ctrl-C is for the parent, which ends its workers.
    module, pipe = "motet.data.corpus.tokenize_workers", subprocess.PIPE
    command = ["env", f"RAYON_NUM_THREADS={threads}", sys.executable, "-m", module, str(folder)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, pass_fds=(lock,))


def _feed_shards(worker: "subprocess.Popen[str]", pending: deque[int], advance: Callable[[int], None]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    while True:
        try:
            shard_id = pending.popleft()
        except IndexError:  # all shards are taken
            return
        with contextlib.suppress(BrokenPipeError):  # the worker has ended, which is reported below
            worker.stdin.write(f"{shard_id}\n")
            worker.stdin.flush()
        for line in worker.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise InputError(answer["error"])
            if "done" in answer:
                break
            advance(answer["read"])
        else:
            code = worker.wait()
            cause = " (killed: out of memory? fewer data.workers need less)" if code < 0 else ""
            remedy = "finished shards are kept, the same command goes on from there"
            raise MotetError(f"a process that tokenised ended with code {code}{cause}; {remedy}")


def run_worker(folder: Path, requests: Iterable[str], answers: TextIO) -> None:
    """Build a shard for every line of the requests."""
    plan = read_build_plan(folder)
    assert plan is not None, f"{folder} has no plan.json"
    tokenizer = load_tokenizer("bytes" if plan.tokenizer == "bytes" else str(folder / plan.tokenizer), plan.sentinels)

    def answer(**value: int | str) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    for line in requests:
        try:
            build_shard(folder, plan, int(line), tokenizer=tokenizer, advance=lambda read: answer(read=read))
        except (InputError, OSError) as error:
            problem = str(error)
            if isinstance(error, OSError):
                problem = f"cannot write {error.filename or folder}: {error.strerror or error}; free some space"
            answer(error=problem)
            return
        answer(done=int(line))


def _read_requests(source: TextIO, lines: "queue.SimpleQueue[str]") -> None:
    for line in source:
        lines.put(line)
    os._exit(0)  # the parent has ended: another build may be about to write this shard


if __name__ == "__main__":
    queued: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(sys.stdin, queued), daemon=True).start()
    # Output that a library prints is no answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    run_worker(Path(sys.argv[1]), iter(queued.get, ""), answers)
