"""`motet collectives run`: a Program on ranks of this machine, checked against float64, counted and timed."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from motet.cli.collectives_limits import whole

if TYPE_CHECKING:
    from motet.cluster.cluster import Cluster
    from motet.collectives.program import Program
    from motet.parallel.process.launch_environment import RankEnvironment
    from motet.train.launch.failures import StopFlag

_MOST_RANKS = 32
"""On one machine: each is a process with torch in it."""
_MOST_BYTES = 2**32
"""Of S: each rank keeps several copies of it, some of them in float64."""
_TIMEOUT_S = 120.0
_PROGRAM, _ANSWER = "program.json", "answer.json"


def run(  # noqa: PLR0913 - options of a command
    words: Annotated[
        list[str],
        typer.Argument(metavar="COLLECTIVE ALGORITHM [NAME=VALUE]... or FILE.json", help="What to carry out."),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(callback=whole("--ranks", 2), help="How many on this machine; 2 when not given."),
    ] = None,
    size: Annotated[str | None, typer.Option(help="S, for example 4KiB or 16MiB; 1MiB if not given.")] = None,
    repeats: Annotated[int, typer.Option(callback=whole("--repeats", 1, 10_000), help="How often to measure.")] = 5,
    cluster: Annotated[str | None, typer.Option(help="A preset or TOML file, to predict the time on.")] = None,
    backend: Annotated[
        Literal["auto", "motet", "gloo"], typer.Option(help="What carries the messages; auto is motet on Linux x86-64.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Carry a Program out on CPU ranks by messages: check the sums, count what is sent, and measure the time."""
    from motet.cli.amounts import is_file, one_program, split_words
    from motet.cli.collectives import say
    from motet.cli.collectives_cost import sized_cluster
    from motet.collectives.prove.program_checker import prove_program
    from motet.core.errors import InputError
    from motet.core.units import format_bytes
    from motet.monitor.console import print_json

    program = one_program(words, ranks, 2)
    if not 2 <= program.ranks <= _MOST_RANKS:
        remedy = "more" if program.ranks < 2 else "fewer"
        raise InputError(
            f"{program}: this machine carries out Programs of 2 to {_MOST_RANKS} ranks; give {remedy} ranks"
        )
    prove_program(program)
    asked = _size(program, size)
    if max(asked, 4 * program.message_size_units) > _MOST_BYTES:
        raise InputError(
            f"{program}: S of {format_bytes(max(asked, 4 * program.message_size_units))} is more than the "
            f"{format_bytes(_MOST_BYTES)} that ranks of one machine carry out; give less, or smaller relative sizes"
        )
    options = {} if is_file(words) else split_words(words)[2]
    predicted_on = sized_cluster(cluster, program.ranks) if cluster else None  # a mistake in it is told at once
    found = _record(program, options, _carried_out(program, asked, repeats, backend), predicted_on)
    if json:
        print_json(found)
    else:
        say(*_told(program, found))
    _check_counts(program, found)


def _size(program: Program, text: str | None) -> int:
    """S in bytes. What carries no data moves tokens, one number each."""
    from motet.cli.amounts import parse_bytes
    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA
    from motet.core.errors import InputError

    if program.collective not in COLLECTIVES_WITHOUT_DATA:
        return parse_bytes("1MiB" if text is None else text)
    if text is not None:
        raise InputError(f"--size {text}, but a {program.collective} carries no data; leave --size out")
    return 4 * program.message_size_units


def _carried_out(program: Program, size: int, repeats: int, backend: str) -> dict[str, Any]:
    """Start the ranks, and take what rank 0 has written down."""
    import sys
    import tempfile

    from motet.cli.environment import read_environment
    from motet.core.errors import InputError, MotetError, RankFailedError
    from motet.train.launch.supervisor import LaunchSpec, launch_ranks, rank_environment

    with tempfile.TemporaryDirectory(prefix="motet-run-") as name:
        folder = Path(name)
        (folder / _PROGRAM).write_text(program.to_json(), encoding="utf-8")
        work = "motet.cli.collectives_run:measure_rank"
        command = (sys.executable, "-m", "motet.cli.rank", work, name, str(size), str(repeats), backend)
        start = LaunchSpec(
            command, program.ranks, rank_environment(read_environment(), 1), folder, stop_message="stopping"
        )
        ended = launch_ranks(start, lambda text: None)
        ended.raise_if_stopped()
        if ended.message:
            kind = {InputError.exit_code: InputError, RankFailedError.exit_code: RankFailedError}.get(
                ended.exit_code, MotetError
            )
            raise kind("\n".join(filter(None, [ended.message, ended.traceback])))
        found: dict[str, Any] = json_format.loads((folder / _ANSWER).read_text(encoding="utf-8"))
    return found


def measure_rank(
    place: RankEnvironment,
    stop: StopFlag,
    folder: str,
    size: str,
    repeats: str,
    backend: Literal["auto", "motet", "gloo"],
) -> int:
    """What each rank does."""
    from dataclasses import asdict

    import torch

    from motet.cli.amounts import read_program
    from motet.collectives.execute.measure import measure_program
    from motet.parallel.process.process_group import start_process_group

    stop.exit_on_sigterm()
    torch.set_num_threads(1)
    with start_process_group(place, "cpu", _TIMEOUT_S, backend) as group:
        assert group.process_group is not None
        found = measure_program(
            read_program(str(Path(folder) / _PROGRAM)), group.process_group, int(size), int(repeats)
        )
    if place.rank == 0:
        (Path(folder) / _ANSWER).write_text(json_format.dumps(asdict(found)), encoding="utf-8")
    return 0


def _record(
    program: Program, options: dict[str, object], found: dict[str, Any], cluster: Cluster | None
) -> dict[str, Any]:
    """What is printed as JSON."""
    from statistics import median

    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA, estimate_cost

    seconds = found["seconds"]
    carried = 0 if program.collective in COLLECTIVES_WITHOUT_DATA else found["size"]
    sent = []
    for rank, (count, messages) in enumerate(zip(found["sent_bytes"], found["messages"], strict=True)):
        promised = _promised(program, rank, found["size"])
        sent.append(
            {"bytes": count, "messages": messages, "program_bytes": promised[0], "program_messages": promised[1]}
        )
    return {
        "collective": program.collective,
        "algorithm": program.algorithm,
        "options": options,
        "ranks": program.ranks,
        "size": found["size"],
        "dtype": found["dtype"],
        "repeats": len(seconds),
        "seconds": {"median": median(seconds), "least": min(seconds), "most": max(seconds)},
        "largest_error": found["largest_error"],
        "allowed_error": found["allowed_error"],
        "sent": sent,
        "predicted_seconds": float(estimate_cost(program, cluster).seconds(carried)) if cluster else None,
    }


def _promised(program: Program, rank: int, size: int) -> tuple[int, int]:
    """The bytes and messages that a rank sends by the Program. A message of empty chunks is not sent."""
    from motet.collectives.program import group_by_pair

    pairs = (pair for step in program.steps for pair in group_by_pair(step).items())
    weights = [sum(map(program.relative_size, transfers)) for (src, _), transfers in pairs if src == rank]
    return int(program.send_fraction(rank) * size), sum(weight > 0 for weight in weights)


def _told(program: Program, found: dict[str, Any]) -> list[str]:
    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA
    from motet.collectives.cost.size_sweep import format_seconds
    from motet.collectives.draw.frames import align_columns
    from motet.core.units import format_bytes

    times = {name: format_seconds(value) for name, value in found["seconds"].items()}
    time = f"time: {times['median']}, the median of {found['repeats']} ({times['least']} to {times['most']})"
    if program.collective in COLLECTIVES_WITHOUT_DATA:
        lines = [str(program), "right: every token has arrived", time]
    else:
        lines = [
            f"{program}, S = {format_bytes(found['size'])} of {found['dtype']}",
            f"right: the largest error is {found['largest_error']:.3g}; "
            f"rounding may come to {found['allowed_error']:.3g}",
            f"{time}; {_speeds(program, found)}",
        ]
    if found["predicted_seconds"] is not None:
        lines.append(f"predicted: {format_seconds(found['predicted_seconds'])}")
    rows = [["rank", "bytes sent", "by the Program", "messages", "by the Program"]]
    keys = ("bytes", "program_bytes", "messages", "program_messages")
    rows += [[str(rank), *(str(row[key]) for key in keys)] for rank, row in enumerate(found["sent"])]
    return [*lines, *align_columns(rows, right_aligned=range(5))]


def _speeds(program: Program, found: dict[str, Any]) -> str:
    from motet.collectives.cost.alpha_beta import bus_bandwidth_factor

    speed = found["size"] / found["seconds"]["median"] / 1e9
    bus = speed * float(bus_bandwidth_factor(program.collective, program.ranks))
    return f"algorithm bandwidth {speed:.3g} GB/s, bus bandwidth {bus:.3g} GB/s"


def _check_counts(program: Program, found: dict[str, Any]) -> None:
    from motet.core.errors import MotetError

    for rank, row in enumerate(found["sent"]):
        if (row["bytes"], row["messages"]) != (row["program_bytes"], row["program_messages"]):
            raise MotetError(f"{program}: rank {rank} did not send what the Program says; that is a defect of motet")
