"""`motet collectives run`: a Program on ranks of this machine, checked against float64, counted and timed."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from motet.cli.collectives.option_limits import integer_option

if TYPE_CHECKING:
    from motet.cluster.cluster import Cluster
    from motet.collectives.program import Program
    from motet.parallel.process.launch_environment import RankEnvironment
    from motet.train.launch.failures import StopFlag

_MAX_RANKS = 32  # On one machine: each is a process with torch in it
_MAX_BYTES = 2**32  # Of S: each rank keeps several copies of it, some of them in float64
_TIMEOUT_S = 120.0
_PROGRAM_FILE, _MEASUREMENT_FILE = "program.json", "answer.json"


def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="COLLECTIVE ALGORITHM [NAME=VALUE]... or FILE.json", help="What to carry out."),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(callback=integer_option("--ranks", 2), help="How many on this machine; 2 when not given."),
    ] = None,
    size: Annotated[str | None, typer.Option(help="S, for example 4KiB or 16MiB; 1MiB if not given.")] = None,
    repeats: Annotated[
        int, typer.Option(callback=integer_option("--repeats", 1, 10_000), help="How often to measure.")
    ] = 5,
    cluster: Annotated[str | None, typer.Option(help="A preset or TOML file, to predict the time on.")] = None,
    backend: Annotated[
        Literal["auto", "motet", "gloo"], typer.Option(help="What carries the messages; auto is motet on Linux x86-64.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Carry a Program out on CPU ranks by messages: check the sums, count what is sent, and measure the time."""
    from motet.cli.collectives.cost import load_sized_cluster
    from motet.cli.collectives.list_algorithms import print_lines
    from motet.cli.parse_sizes import load_or_build_program, names_program_file, split_algorithm_words
    from motet.collectives.prove.program_checker import prove_program
    from motet.core.errors import InputError
    from motet.core.units import format_bytes
    from motet.monitor.console import print_json

    program = load_or_build_program(words, ranks, 2)
    if not 2 <= program.ranks <= _MAX_RANKS:
        remedy = "more" if program.ranks < 2 else "fewer"
        raise InputError(
            f"{program}: this machine carries out Programs of 2 to {_MAX_RANKS} ranks; give {remedy} ranks"
        )
    prove_program(program)
    message_bytes = _message_bytes(program, size)
    if max(message_bytes, 4 * program.message_size_units) > _MAX_BYTES:
        raise InputError(
            f"{program}: S of {format_bytes(max(message_bytes, 4 * program.message_size_units))} is more than the "
            f"{format_bytes(_MAX_BYTES)} that ranks of one machine carry out; give less, or smaller relative sizes"
        )
    options = {} if names_program_file(words) else split_algorithm_words(words)[2]
    prediction_cluster = (
        load_sized_cluster(cluster, program.ranks) if cluster else None
    )  # a mistake in it is told at once
    result = _as_json(program, options, _run_ranks(program, message_bytes, repeats, backend), prediction_cluster)
    if json:
        print_json(result)
    else:
        print_lines(*_result_lines(program, result))
    _check_sent_counts(program, result)


def _message_bytes(program: Program, text: str | None) -> int:
    """S in bytes. What carries no data moves tokens, one number each."""
    from motet.cli.parse_sizes import parse_bytes
    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA
    from motet.core.errors import InputError

    if program.collective not in COLLECTIVES_WITHOUT_DATA:
        return parse_bytes("1MiB" if text is None else text)
    if text is not None:
        raise InputError(f"--size {text}, but a {program.collective} carries no data; leave --size out")
    return 4 * program.message_size_units


def _run_ranks(program: Program, size: int, repeats: int, backend: str) -> dict[str, Any]:
    """Start the ranks, and take what rank 0 has written down."""
    import sys
    import tempfile

    from motet.cli.environment import read_environment
    from motet.core.errors import InputError, MotetError, RankFailedError
    from motet.train.launch.supervisor import LaunchSpec, launch_ranks, rank_environment

    with tempfile.TemporaryDirectory(prefix="motet-run-") as name:
        folder = Path(name)
        (folder / _PROGRAM_FILE).write_text(program.to_json(), encoding="utf-8")
        function_name = "motet.cli.collectives.run:measure_rank"
        command = (sys.executable, "-m", "motet.cli.rank_main", function_name, name, str(size), str(repeats), backend)
        spec = LaunchSpec(
            command, program.ranks, rank_environment(read_environment(), 1), folder, stop_message="stopping"
        )
        exit_status = launch_ranks(spec, lambda text: None)
        exit_status.raise_if_stopped()
        if exit_status.message:
            kind = {InputError.exit_code: InputError, RankFailedError.exit_code: RankFailedError}.get(
                exit_status.exit_code, MotetError
            )
            raise kind("\n".join(filter(None, [exit_status.message, exit_status.traceback])))
        measurement: dict[str, Any] = json_format.loads((folder / _MEASUREMENT_FILE).read_text(encoding="utf-8"))
    return measurement


def measure_rank(
    rank_env: RankEnvironment,
    stop: StopFlag,
    folder: str,
    size: str,
    repeats: str,
    backend: Literal["auto", "motet", "gloo"],
) -> int:
    """What each rank does."""
    from dataclasses import asdict

    import torch

    from motet.cli.parse_sizes import read_program
    from motet.collectives.execute.measure import measure_program
    from motet.parallel.process.process_group import start_process_group

    stop.exit_on_sigterm()
    torch.set_num_threads(1)
    with start_process_group(rank_env, "cpu", _TIMEOUT_S, backend) as group:
        assert group.process_group is not None
        measurement = measure_program(
            read_program(str(Path(folder) / _PROGRAM_FILE)), group.process_group, int(size), int(repeats)
        )
    if rank_env.rank == 0:
        (Path(folder) / _MEASUREMENT_FILE).write_text(json_format.dumps(asdict(measurement)), encoding="utf-8")
    return 0


def _as_json(
    program: Program, options: dict[str, object], measurement: dict[str, Any], cluster: Cluster | None
) -> dict[str, Any]:
    """What is printed as JSON."""
    from statistics import median

    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA, estimate_cost

    seconds = measurement["seconds"]
    message_bytes = 0 if program.collective in COLLECTIVES_WITHOUT_DATA else measurement["size"]
    sent = []
    for rank, (count, messages) in enumerate(zip(measurement["sent_bytes"], measurement["messages"], strict=True)):
        expected = _expected_traffic(program, rank, measurement["size"])
        sent.append(
            {"bytes": count, "messages": messages, "program_bytes": expected[0], "program_messages": expected[1]}
        )
    return {
        "collective": program.collective,
        "algorithm": program.algorithm,
        "options": options,
        "ranks": program.ranks,
        "size": measurement["size"],
        "dtype": measurement["dtype"],
        "repeats": len(seconds),
        "seconds": {"median": median(seconds), "least": min(seconds), "most": max(seconds)},
        "largest_error": measurement["largest_error"],
        "allowed_error": measurement["allowed_error"],
        "sent": sent,
        "predicted_seconds": float(estimate_cost(program, cluster).seconds(message_bytes)) if cluster else None,
    }


def _expected_traffic(program: Program, rank: int, size: int) -> tuple[int, int]:
    """The bytes and messages that a rank sends by the Program. A message of empty chunks is not sent."""
    from motet.collectives.program import group_by_pair

    pairs = (pair for step in program.steps for pair in group_by_pair(step).items())
    weights = [sum(map(program.relative_size, transfers)) for (src, _), transfers in pairs if src == rank]
    return int(program.send_fraction(rank) * size), sum(weight > 0 for weight in weights)


def _result_lines(program: Program, result: dict[str, Any]) -> list[str]:
    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA
    from motet.collectives.cost.size_sweep import format_seconds
    from motet.collectives.draw.frames import align_columns
    from motet.core.units import format_bytes

    times = {name: format_seconds(value) for name, value in result["seconds"].items()}
    time = f"time: {times['median']}, the median of {result['repeats']} ({times['least']} to {times['most']})"
    if program.collective in COLLECTIVES_WITHOUT_DATA:
        lines = [str(program), "right: every token has arrived", time]
    else:
        lines = [
            f"{program}, S = {format_bytes(result['size'])} of {result['dtype']}",
            f"right: the largest error is {result['largest_error']:.3g}; "
            f"rounding may come to {result['allowed_error']:.3g}",
            f"{time}; {_bandwidth_text(program, result)}",
        ]
    if result["predicted_seconds"] is not None:
        lines.append(f"predicted: {format_seconds(result['predicted_seconds'])}")
    rows = [["rank", "bytes sent", "by the Program", "messages", "by the Program"]]
    keys = ("bytes", "program_bytes", "messages", "program_messages")
    rows += [[str(rank), *(str(row[key]) for key in keys)] for rank, row in enumerate(result["sent"])]
    return [*lines, *align_columns(rows, right_aligned=range(5))]


def _bandwidth_text(program: Program, result: dict[str, Any]) -> str:
    from motet.collectives.cost.alpha_beta import bus_bandwidth_factor

    speed = result["size"] / result["seconds"]["median"] / 1e9
    bus = speed * float(bus_bandwidth_factor(program.collective, program.ranks))
    return f"algorithm bandwidth {speed:.3g} GB/s, bus bandwidth {bus:.3g} GB/s"


def _check_sent_counts(program: Program, result: dict[str, Any]) -> None:
    from motet.core.errors import MotetError

    for rank, row in enumerate(result["sent"]):
        if (row["bytes"], row["messages"]) != (row["program_bytes"], row["program_messages"]):
            raise MotetError(f"{program}: rank {rank} did not send what the Program says; that is a defect of motet")
