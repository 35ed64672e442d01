"""Other files that motet reads: clusters, Programs, schedules of pipelines, and the files of a run folder.

An accepted file is the same after it was written and read again, and holds the numbers that the standard library
reads in it. A run folder with a changed file is resumed, or refused.
"""

import copy
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from fuzzing import mutations
from fuzzing.cases import FuzzCase, FuzzTarget, check_equal
from motet.cluster.cluster import cluster_presets, load_cluster
from motet.collectives.algorithms import build
from motet.collectives.program import Program
from motet.collectives.prove.program_checker import prove_program
from motet.core.errors import InputError
from motet.core.text_files import to_toml
from motet.monitor.summary import read_summary
from motet.parallel.pipeline.schedules import SCHEDULES, format_schedule, make_schedule, read_schedule
from motet.train.job import load_job
from motet.train.launch.run_folder import choose_resumed_run, read_stored_job, write_run_start

SUMMARY, VERSIONS, JOB = "summary.json", "versions.json", "job.toml"
PROGRAMS = (("all-reduce", "ring", 4), ("all-gather", "bruck", 3), ("broadcast", "tree", 4))


class RunFileTarget(FuzzTarget):
    """Clusters, Programs, schedules and run folders."""

    name: ClassVar[str] = "run-files"
    first_check: ClassVar[str] = "the file is TOML, JSON, or a line of actions for each rank"
    first_refusals: ClassVar[str] = r"is not (valid TOML|UTF-8|an action|JSON)|nvalid JSON|cannot read"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.clusters = [tomllib.loads(text) for text in cluster_presets().values()]
        self.programs = [json.loads(build(kind, name, ranks=ranks).to_json()) for kind, name, ranks in PROGRAMS]
        self.schedules = [
            format_schedule(make_schedule(name, 2, chunks=kind.chunks or 2, microbatches=4), with_messages=is_complete)
            for name, kind in SCHEDULES.items()
            for is_complete in (True, False)
            if kind.chunks != 1
        ]
        self.job = load_job("tiny")
        self.run_folder = folder / "run"
        self.run_folder.mkdir()
        write_run_start(self.run_folder, self.job, {"motet": "0", "started": "now"})
        texts = {"name": "tiny", "exit_reason": "running", "message": ""}
        counts = {"steps": 3, "last_step": 9, "tokens": 7, "ranks": 2, "parameters": 5, "attempts": 1}
        values = dict.fromkeys(("first_loss", "final_loss", "uniform_loss", "tokens_per_s", "mfu", "peak_bytes"), None)
        summary: dict[str, Any] = {**texts, **counts, **values, "finished": False, "evaluations": {}}
        (self.run_folder / SUMMARY).write_text(json.dumps(summary, indent=2))
        self.kinds: tuple[Callable[[FuzzCase, Path], None], ...] = (
            self._run_cluster,
            self._run_program,
            self._run_schedule,
            self._run_folder,
        )

    def run(self, case: FuzzCase) -> None:
        scratch = self.folder / "case"
        scratch.mkdir()
        try:
            case.rng.choice(self.kinds)(case, scratch)
        finally:
            shutil.rmtree(scratch)

    def _changed(self, case: FuzzCase, tree: Any, write: Callable[[Any], bytes]) -> bytes:
        if case.is_structured:
            tree, change = mutations.change_tree(case.rng, copy.deepcopy(tree))
            content = write(tree)
        else:
            content, change = mutations.change_bytes(case.rng, write(tree))
        case.note(change)
        return content

    def _run_cluster(self, case: FuzzCase, scratch: Path) -> None:
        path = scratch / "cluster.toml"
        path.write_bytes(self._changed(case, case.rng.choice(self.clusters), _toml))
        cluster = load_cluster(str(path))
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
        expected = values.get("hosts", 1) * values.get("devices_per_host", 1)
        check_equal("the ranks of a cluster", cluster.ranks, expected)

    def _run_program(self, case: FuzzCase, scratch: Path) -> None:
        content = self._changed(case, case.rng.choice(self.programs), _json)
        program = Program.from_json(content, source="program.json")
        values = json.loads(content)
        check_equal("the ranks of a Program", program.ranks, values["ranks"])
        check_equal("a Program that was written and read again", Program.from_json(program.to_json()), program)
        prove_program(program)

    def _run_schedule(self, case: FuzzCase, scratch: Path) -> None:
        path, text = scratch / "schedule.csv", case.rng.choice(self.schedules)
        if case.is_structured:
            lines = [line.split(",") for line in text.splitlines()]
            row = case.rng.choice(lines)
            index, other = case.rng.randrange(len(row)), case.rng.randrange(len(row))
            match kind := case.rng.choice(("exchange", "drop", "repeat", "number", "other rank")):
                case "exchange":
                    row[index], row[other] = row[other], row[index]
                case "drop":
                    del row[index]
                case "repeat":
                    row.insert(other, row[index])
                case "number":
                    row[index] = case.rng.choice(("9F9", "999999F0", "0F999999", "0F0", "-1F0", "0Q0", "٣F0"))
                case _:
                    case.rng.choice(lines).append(row.pop(index))
            text = "".join(",".join(line) + "\n" for line in lines)
            case.note(f"{kind} at {index}, {other}")
            path.write_text(text)
        else:
            content, change = mutations.change_bytes(case.rng, text.encode())
            case.note(change)
            path.write_bytes(content)
        schedule = read_schedule(path)
        again = scratch / "again.csv"
        again.write_text(format_schedule(schedule))
        check_equal("a schedule that was written and read again", read_schedule(again).actions, schedule.actions)

    def _run_folder(self, case: FuzzCase, scratch: Path) -> None:
        folder = scratch / "run"
        shutil.copytree(self.run_folder, folder)
        path = folder / case.rng.choice((SUMMARY, VERSIONS, JOB))
        text = path.read_text()
        tree = tomllib.loads(text) if path.name == JOB else json.loads(text)
        path.write_bytes(self._changed(case, tree, _toml if path.name == JOB else _json))
        case.note(path.name)
        read_stored_job(folder)
        choose_resumed_run(self.job, folder)
        read_summary(folder)
        write_run_start(folder, self.job, {"started": "again"})
        entries = json.loads((folder / VERSIONS).read_text())
        check_equal("the last entry of versions.json", entries[-1], {"started": "again"})
        check_equal("the job that is stored", read_stored_job(folder), self.job)


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _toml(tree: Any) -> bytes:
    if not isinstance(tree, dict):
        raise InputError("a file of TOML is a table; give it keys")
    return to_toml(_without_none(tree)).encode("utf-8", "replace")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value if item is not None] if isinstance(value, list) else value
