"""The other side of `ranks.py`: a process that imports torch once and then serves one call after another."""

import ast
import contextlib
import faulthandler
import gc
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _pytest.assertion.rewrite import rewrite_asserts
from torch.distributed import distributed_c10d

from motet.parallel.process.process_group import start_process_group
from motet.train.launch.failures import RankExitRecord, run_and_record
from ranks import Call


def serve(handle: int) -> None:
    """Answer calls until the pipe is closed: the pickled result, or the record of a failure."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    pipe = Connection(handle)
    gc.collect()
    gc.freeze()  # what was imported stays; what a test leaves, a group's memory among it, is collected soon
    pipe.send("ready")
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        with _lines_recorded(call.test):
            answer = _answer(call)
        pipe.send(answer)


@contextlib.contextmanager
def _lines_recorded(test: str) -> Iterator[None]:
    """Record the test with the lines that it reaches, if lines are counted here (benchmarks/mutations.py)."""
    counter = coverage.Coverage.current() if (coverage := sys.modules.get("coverage")) else None
    if counter is not None:
        counter.switch_context(test)
    yield
    if counter is not None:
        counter.save()  # the process is killed in the end


def _answer(call: Call) -> bytes | RankExitRecord:
    result: bytes = b""

    def work() -> int:
        nonlocal result
        result = pickle.dumps(_call(call))
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        # A group that failed to start (the peer had failed at once) has counted: its successor would be "1", and "0"
        # to the peer, and each would wait for the other's address under its own name.
        distributed_c10d._world.group_count = 0
        record = run_and_record(call.place.rank, work)
    return record if record.error_message else result


def _call(call: Call) -> Any:
    function: Any = _module(call.file, call.module)
    for name in call.name.split("."):
        function = getattr(function, name)
    arguments = pickle.loads(call.arguments)
    if not call.with_group:
        return function(call.place, *arguments)
    with start_process_group(call.place, "cpu", call.timeout_s, cpu_backend=call.backend) as group:
        return function(group, *arguments)


_loaded: dict[tuple[str, int], ModuleType] = {}


def _module(file: str, name: str) -> ModuleType:
    """A test module by its file, with pytest's assertions that show their values.

    A module that another one has imported already is taken as it is: a second copy would have classes of its own, and
    their objects could not be pickled, since the modules that imported the first copy go on using that one.
    """
    key = (file, Path(file).stat().st_mtime_ns)
    imported = sys.modules.get(name)
    if imported is not None and imported.__file__ == file and all(loaded != file for loaded, _ in _loaded):
        _loaded[key] = imported
    if key not in _loaded:
        source = Path(file).read_bytes()
        tree = ast.parse(source)
        rewrite_asserts(tree, source, file)
        module = ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module
        exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
        _loaded[key] = module
    return _loaded[key]
