"""The output of `motet collectives run`: a Program on ranks of this machine, checked, counted and timed."""

import json as json_format
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Literal

from motet.cli.collectives import proof_report
from motet.cli.collectives.cost_report import check_carries_data, load_sized_cluster
from motet.cli.environment_variables import read_environment
from motet.cli.job_arguments import parse_bytes
from motet.cli.output import OutputLine, print_lines, table_lines
from motet.cluster.cluster import Cluster
from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA, bus_bandwidth_factor, estimate_cost
from motet.collectives.program import Program, group_by_pair
from motet.collectives.prove.program_checker import prove_program
from motet.core.errors import InputError, MotetError, RankFailedError, check_input
from motet.core.units import format_bytes, format_seconds
from motet.monitor.stdout_stderr import print_json
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.launch.failures import StopFlag
from motet.train.launch.supervisor import LaunchSpec, launch_ranks

Backend = Literal["auto", "motet", "gloo"]

_MAX_RANKS = 32  # Each is a process with torch in it
_MAX_BYTES = 2**32  # Each rank holds several copies of S, some of them in float64
_TIMEOUT_S = 120.0
_PROGRAM_FILE, _MEASUREMENT_FILE = "program.json", "answer.json"
_SENT_KEYS = ("bytes", "program_bytes", "messages", "program_messages")


def run_program(
    words: list[str],
    ranks: int | None,
    size: str | None,
    *,
    repeats: int,
    cluster: str | None,
    backend: Backend,
    json: bool,
) -> None:
    """Execute the Program and print the measurement; raise if a rank did not send the Program's messages."""
    program = proof_report.load_or_build_program(words, ranks, 2)
    remedy = f"give {'more' if program.ranks < 2 else 'fewer'} ranks"
    message = f"{program}: this machine executes Programs of 2 to {_MAX_RANKS} ranks; {remedy}"
    check_input(2 <= program.ranks <= _MAX_RANKS, message)
    prove_program(program)
    message_bytes = 4 * program.message_size_units  # A collective without data moves tokens of four bytes
    if check_carries_data(program.collective, size):
        message_bytes = parse_bytes("1MiB" if size is None else size)
    largest = max(message_bytes, 4 * program.message_size_units)
    check_input(
        largest <= _MAX_BYTES,
        f"{program}: S of {format_bytes(largest)} is more than the {format_bytes(_MAX_BYTES)} that ranks of one "
        "machine execute; give less, or smaller relative sizes",
    )
    options = {} if proof_report.names_program_file(words) else proof_report.split_algorithm_words(words)[2]
    # Before the ranks start, so that a mistake in the file is reported early.
    prediction_cluster = load_sized_cluster(cluster, program.ranks) if cluster else None
    measurement = _run_ranks(program, (str(message_bytes), str(repeats), backend))
    result = _as_json(program, options, measurement, cluster=prediction_cluster)
    if json:
        print_json(result)
    else:
        print_lines(*_result_lines(program, result))
    for rank, row in enumerate(result["sent"]):
        if (row["bytes"], row["messages"]) != (row["program_bytes"], row["program_messages"]):
            raise MotetError(f"{program}: rank {rank} did not send the Program's messages; that is a defect of motet")


def _run_ranks(program: Program, arguments: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="motet-run-") as name:
        folder = Path(name)
        (folder / _PROGRAM_FILE).write_text(program.to_json(), encoding="utf-8")
        function_name = f"{measure_rank.__module__}:{measure_rank.__name__}"
        command = (function_name, name, *arguments)
        spec = LaunchSpec(command, program.ranks, read_environment(), folder, stop_message="stopping")
        exit_status = launch_ranks(spec, lambda text: None)
        exit_status.raise_if_stopped()
        if exit_status.message:
            kinds = {kind.exit_code: kind for kind in (InputError, RankFailedError)}
            kind = kinds.get(exit_status.exit_code, MotetError)
            raise kind("\n".join(filter(None, [exit_status.message, exit_status.traceback])))
        measurement: dict[str, Any] = json_format.loads((folder / _MEASUREMENT_FILE).read_text(encoding="utf-8"))
    return measurement


def measure_rank(
    rank_env: RankEnvironment, stop: StopFlag, folder: str, size: str, repeats: str, backend: Backend
) -> int:
    """Execute the Program as one rank; rank 0 writes the measurement."""
    import torch

    from motet.collectives.execute.program_runner import measure_program
    from motet.parallel.process.process_group import start_process_group

    stop.exit_on_sigterm()
    torch.set_num_threads(1)
    program = proof_report.read_program(str(Path(folder) / _PROGRAM_FILE))
    with start_process_group(rank_env, "cpu", _TIMEOUT_S, cpu_backend=backend) as group:
        assert group.process_group is not None
        measurement = measure_program(program, group.process_group, size=int(size), repeats=int(repeats))
    if rank_env.rank == 0:
        (Path(folder) / _MEASUREMENT_FILE).write_text(json_format.dumps(asdict(measurement)), encoding="utf-8")
    return 0


def _as_json(
    program: Program, options: dict[str, object], measurement: dict[str, Any], *, cluster: Cluster | None
) -> dict[str, Any]:
    seconds = measurement["seconds"]
    message_bytes = 0 if program.collective in COLLECTIVES_WITHOUT_DATA else measurement["size"]
    sent = []
    for rank, (count, messages) in enumerate(zip(measurement["sent_bytes"], measurement["messages"], strict=True)):
        program_bytes, program_messages = _expected_traffic(program, rank, measurement["size"])
        sent.append(dict(zip(_SENT_KEYS, (count, program_bytes, messages, program_messages), strict=True)))
    return {
        "collective": program.collective,
        "algorithm": program.algorithm,
        "options": options,
        "ranks": program.ranks,
        "size": measurement["size"],
        "dtype": measurement["dtype"],
        "repeats": len(seconds),
        "seconds": {"median": median(seconds), "min": min(seconds), "max": max(seconds)},
        "largest_error": measurement["largest_error"],
        "allowed_error": measurement["allowed_error"],
        "sent": sent,
        "predicted_seconds": float(estimate_cost(program, cluster).seconds(message_bytes)) if cluster else None,
    }


def _expected_traffic(program: Program, rank: int, size: int) -> tuple[int, int]:
    """Bytes and messages that a rank sends by the Program; a message of empty chunks is not sent."""
    pairs = (pair for step in program.steps for pair in group_by_pair(step).items())
    sizes = [sum(map(program.relative_size, transfers)) for (src, _), transfers in pairs if src == rank]
    return int(program.send_fraction(rank) * size), sum(each > 0 for each in sizes)


def _result_lines(program: Program, result: dict[str, Any]) -> list[OutputLine]:
    times = {name: format_seconds(value) for name, value in result["seconds"].items()}
    time = f"time: {times['median']}, the median of {result['repeats']} ({times['min']} to {times['max']})"
    if program.collective in COLLECTIVES_WITHOUT_DATA:
        lines: list[OutputLine] = [str(program), "right: every token has arrived", time]
    else:
        speed = result["size"] / result["seconds"]["median"] / 1e9
        bus_speed = speed * float(bus_bandwidth_factor(program.collective, program.ranks))
        error, allowed = result["largest_error"], result["allowed_error"]
        lines = [
            f"{program}, S = {format_bytes(result['size'])} of {result['dtype']}",
            f"right: the largest error is {error:.3g}; rounding may come to {allowed:.3g}",
            f"{time}; algorithm bandwidth {speed:.3g} GB/s, bus bandwidth {bus_speed:.3g} GB/s",
        ]
    if result["predicted_seconds"] is not None:
        lines.append(f"predicted: {format_seconds(result['predicted_seconds'])}")
    header = ["rank", "bytes sent", "by the Program", "messages", "by the Program"]
    rows = ([str(rank), *(str(row[key]) for key in _SENT_KEYS)] for rank, row in enumerate(result["sent"]))
    return [*lines, *table_lines(rows, header=header, right=range(5), indent=2)]
