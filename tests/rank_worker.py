"""The other side of `ranks.py`: a process that imports torch once and forks ranks, which serve call after call."""

import ast
import faulthandler
import gc
import os
import pickle
import signal
import sys
import warnings
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from _pytest.assertion.rewrite import rewrite_asserts
from torch.distributed import distributed_c10d

from motet.cluster import local_device
from motet.parallel.process.process_group import start_process_group
from motet.train.launch.failures import RankExitRecord, run_and_record
from one_measurement import measure_once
from ranks import Call


def fork_workers(handle: int) -> None:
    """Fork a rank process for each path of its output, and answer with its id; answer `(id, whether to wait)` with the
    exit code, until the pipe is closed."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # Many tests: what some need, all ranks get
        for module in ("torch._dynamo", "transformers.modeling_utils", "motet.train.build"):
            import_module(module)
    measure_once(local_device)  # Before a module that predicts steps takes the functions from there
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported stays; what a test leaves, a group's memory among it, is collected soon
    pipe, codes = Connection(handle), dict[int, int]()
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if isinstance(asked, Path):
            rank_handle = recv_handle(pipe)
            if (pid := os.fork()) == 0:
                pipe.close()
                _serve(rank_handle, asked)
            os.close(rank_handle)
            pipe.send(pid)
            continue
        pid, wait = asked
        if pid not in codes:
            ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            codes |= {pid: os.waitstatus_to_exitcode(status)} if ended else {}
        pipe.send(codes.get(pid))


def _serve(handle: int, output: Path) -> NoReturn:
    """Answer calls until the pipe is closed: the pickled result, or the record of a failure."""
    with output.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Connection(handle)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            os._exit(0)
        os.environ["PYTEST_CURRENT_TEST"] = call.test
        pipe.send(_answer(call))


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
