"""Jobs: TOML texts and overrides of the command line, from syntax to the checks before any rank is started.

An accepted job holds each value of its TOML and of its overrides, as `tomllib` reads them, and is the same after it was
written and read again. Some cases also run as the command `motet train --print-job`, which must print the same.
"""

import contextlib
import copy
import io
import json
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from fuzzing import mutations
from fuzzing.cases import FindingError, FuzzCase, FuzzTarget, check_equal, sentence_problem
from motet.cli.main import main as motet_command
from motet.core.errors import MotetError
from motet.core.text_files import to_toml
from motet.train.job import Job, builtin_jobs, job_from_tree, load_job
from motet.train.launch.preflight import check_job, check_memory
from motet.train.launch.run_folder import job_to_tree

COMMAND_SHARE = 8  # One case in this many also runs as a command

# Sections that the built-in jobs leave at their defaults.
EXTRA_SECTIONS: tuple[dict[str, Any], ...] = (
    {"layout": {"zero": 3, "shard_group": 2, "reshard_after_forward": False}, "run": {"ranks": 4}},
    {"layout": {"pp": 2, "schedule": "zb-v", "chunks": 2, "stages": "0,1,2,3", "microbatches": 4}, "run": {"ranks": 4}},
    {"layout": {"tp": 2, "sp": True, "rules": {"*.up_proj": "columns"}}, "run": {"ranks": 2}},
    {"layout": {"data": "parameter_server", "server": {"count": 2, "mode": "bounded", "staleness": 1}}},
    {"layout": {"data": "parameter_server", "server": {"transport": "collectives"}}, "run": {"ranks": 4}},
    {"communication": {"bucket_mib": 4.0, "compress_gradients": "int8:32"}, "outer": {"every": 4}},
    {"data": {"mixture": [{"source": "stdlib", "weight": 2.0}, {"source": "a.jsonl", "text_field": "body"}]}},
    {"optimizer": {"groups": [{"match": ["*.bias"], "learning_rate_scale": 0.5}], "clip_norm": False}},
)


class JobTarget(FuzzTarget):
    """Texts of jobs and words of the command line."""

    name: ClassVar[str] = "jobs"
    first_check: ClassVar[str] = "the text is TOML in UTF-8, and each override has the form `section.key=value`"
    first_refusals: ClassVar[str] = r"is not valid TOML|is not UTF-8|is not of the form|is a value, not a section"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        trees = [tomllib.loads(text) for text in builtin_jobs().values()]
        small = tomllib.loads(builtin_jobs()["tiny"])
        self.trees = [*trees, *(_merged(small, sections) for sections in EXTRA_SECTIONS)]
        self.leaves = _schema_leaves(Job.model_json_schema())
        self.file = folder / "job.toml"

    def run(self, case: FuzzCase) -> None:
        text, overrides = self._input(case)
        self.file.write_bytes(text)
        error, job = None, None
        try:
            job = load_job(str(self.file), list(overrides))
            _check_values(job, text, overrides)
            check_equal("a job that was written and read again", _read_again(job), job)
        except MotetError as refusal:
            error = refusal
        if case.number % COMMAND_SHARE == 0:
            _check_command(str(self.file), overrides, job, error)
        if job is None or error is not None:
            assert error is not None
            raise error
        check_job(job, job.run.ranks)
        check_memory(job, range(job.run.ranks), job.run.ranks)

    def _input(self, case: FuzzCase) -> tuple[bytes, list[str]]:
        rng = case.rng
        tree = copy.deepcopy(rng.choice(self.trees))
        if not case.is_structured:
            text, change = mutations.change_bytes(rng, to_toml(tree).encode())
            case.note(change)
            return text, []
        overrides = []
        for _ in range(rng.choice((0, 0, 1, 2))):
            overrides.append(self._override(case, tree))
            case.note(f"override {overrides[-1]!r}")
        if not overrides or rng.random() < 0.3:
            tree = self._change(case, tree)
        return to_toml(_toml_values(tree)).encode("utf-8", "replace"), overrides

    def _change(self, case: FuzzCase, tree: dict[str, Any]) -> dict[str, Any]:
        if case.rng.random() < 0.5:
            changed, change = mutations.change_tree(case.rng, tree)
            case.note(change)
            return changed if isinstance(changed, dict) else {"name": changed}
        path = self._setting(case, tree)
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                return tree
        node[path[-1]] = self._value(case, path)
        case.note(f"{'.'.join(path)} = {node[path[-1]]!r}")
        return tree

    def _override(self, case: FuzzCase, tree: dict[str, Any]) -> str:
        rng = case.rng
        path = self._setting(case, tree)
        if rng.random() < 0.1:
            return str(rng.choice(mutations.TEXTS))
        value = self._value(case, path)
        text = value if isinstance(value, str) else to_toml({"v": _toml_values(value)}).partition("= ")[2].strip()
        return f"{'.'.join(path)}={text}"

    def _setting(self, case: FuzzCase, tree: dict[str, Any]) -> tuple[str, ...]:
        """A setting of the tree or, less often, any."""
        known = [path for path, _ in _leaves(tree) if path in self.leaves]
        return case.rng.choice(known if known and case.rng.random() < 0.6 else list(self.leaves))

    def _value(self, case: FuzzCase, path: tuple[str, ...]) -> Any:
        kinds = self.leaves[path]
        value = _fitting_value(case, case.rng.choice(kinds))
        return value if case.rng.random() < 0.7 else mutations.other_value(case.rng, value)


def _merged(tree: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(tree)
    for name, values in sections.items():
        if name == "data":
            merged["data"].pop("source", None)
        merged[name] = {**merged.get(name, {}), **copy.deepcopy(values)}
    return merged


def _schema_leaves(schema: dict[str, Any]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Dotted path of each setting -> the JSON schemas of its values."""
    leaves: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def visit(node: dict[str, Any], path: tuple[str, ...]) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for part in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            visit(part, path)
        for key, child in node.get("properties", {}).items():
            visit(child, (*path, key))
        if path and "properties" not in node and "anyOf" not in node and "oneOf" not in node:
            leaves.setdefault(path, []).append(node)

    visit(schema, ())
    return leaves


def _fitting_value(case: FuzzCase, schema: dict[str, Any]) -> Any:
    """A value that the schema of a setting allows, most of the time."""
    rng = case.rng
    if "const" in schema or "enum" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "integer":
            return rng.choice((schema.get("minimum", 0), 1, 2, 3, 4, 8, 64, 1000, 10**6, 10**12))
        case "number":
            return rng.choice((0.0, 0.5, 1.0, 1e-3, 10, 1e308, 5e-324))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_fitting_value(case, item) for item in schema.get("prefixItems", [schema.get("items", {})])]
        case "object":
            return {"*.up_proj": "columns"} if rng.random() < 0.5 else {}
        case "null":
            return None
    return rng.choice(("stdlib", "int8:32", "bytes", "0-3,4-7", "gpipe", "os:system", "ring", *mutations.TEXTS))


def _toml_values(value: Any) -> Any:
    """The value without None, which TOML does not have."""
    if isinstance(value, dict):
        return {str(key): _toml_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_toml_values(item) for item in value]
    return "none" if value is None else value


def _read_again(job: Job) -> Job:
    return job_from_tree(tomllib.loads(to_toml(job_to_tree(job))))


def _check_values(job: Job, text: bytes, overrides: list[str]) -> None:
    """Each value of the text, or of the overrides alone if there are any, is in the job."""
    tree = tomllib.loads(text.decode("utf-8-sig"))
    wanted = {} if overrides else dict(_leaves(tree))
    for override in overrides:
        key, _, written = override.partition("=")
        path = tuple(key.strip().split("."))
        wanted = {other: value for other, value in wanted.items() if other[: len(path)] != path}
        wanted[path] = _override_value(written.strip())
    if {("run", "steps"), ("run", "epochs")} <= wanted.keys():
        del wanted["run", "steps"], wanted["run", "epochs"]  # The last one counts
    for path, value in wanted.items():
        if path[:2] == ("layout", "rules"):
            continue
        actual: Any = job
        for key in path:
            actual = actual[int(key)] if isinstance(actual, tuple) else getattr(actual, key)
        expected = None if path == ("optimizer", "clip_norm") and value is False else value
        if not _is_same(actual, expected):
            raise FindingError(f"{'.'.join(path)} = {value!r:.300} became {actual!r:.300}")


def _override_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # Also a number with more digits than Python reads
        return text


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for index, item in enumerate(tree) for leaf in _leaves(item, (*path, str(index)))]
    return [(path, tree)]


def _is_same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, BaseModel):
        return all(_is_same(getattr(actual, key), value) for key, value in expected.items())
    if isinstance(expected, list):
        pairs = (
            zip(actual, expected, strict=True) if isinstance(actual, tuple) and len(actual) == len(expected) else None
        )
        return pairs is not None and all(_is_same(mine, true) for mine, true in pairs)
    if isinstance(expected, bool | str) or isinstance(actual, bool | str):
        return bool(str(actual) == str(expected) and isinstance(actual, bool) == isinstance(expected, bool))
    return bool(actual == (float(expected) if isinstance(actual, float) else expected))


def _check_command(source: str, overrides: list[str], job: Job | None, error: MotetError | None) -> None:
    """Check that `motet train JOB --print-job` prints the same job as JSON, or the same sentence."""
    arguments, output, errors, code = sys.argv, io.StringIO(), io.StringIO(), 0
    sys.argv = ["motet", "train", "--print-job", "--json", "--", source, *overrides]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            motet_command()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = arguments
    check_equal("the exit code of `motet train --print-job`", code, error.exit_code if error else 0)
    if error:
        said = errors.getvalue().strip().removeprefix("motet: ")
        problem = sentence_problem(said)
        if problem:
            raise FindingError(f"`motet train` says: {problem}: {said}")
    else:
        assert job is not None
        check_equal("the job that is printed", job_from_tree(json.loads(output.getvalue())), job)
