"""Files that decide who adds what, and who is who: everything else reads their values."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "motet"
DIMENSIONS = {"dp", "tp", "cp", "pp", "ep"}

# What only these files may do. A file is below src/motet; the reason stands beside it.
OWNERS = {
    "name a dimension": {
        "parallel/layout.py",  # sizes of dimensions from settings, and rows of a rank
        "parallel/model_sharding.py",  # dimensions over which tensors are split, and gradients partial
        "parallel/sync_groups.py",  # ranks that add gradients
        "parallel/step_plan/check.py",  # derives them again, by a definition of its own
        "parallel/context_parallel/context_checks.py",  # refusals of its setting
        "parallel/context_parallel/context_step.py",  # whether each row is computed by one rank
        "train/config_rules.py",  # settings that have no effect without a dimension
        "cli/show/layout_report.py",  # whether the words of a layout say its size
        "parity/diagnose/mismatch_evidence.py",  # the word for a factor in a message
    },
    "ask torch for the world": {"parallel/process/process_group.py"},
    "make a sync group": {"parallel/sync_groups.py"},
    "ask for sync groups": {"parallel/step_plan/plan.py"},
    "make process groups": {
        "parallel/data_parallel/composite.py",  # of `plan.group.sum_groups`
        "parallel/data_parallel/communication/shard_replica_mesh.py",
        "parallel/local_sgd/outer_optimizer.py",  # of independent replicas
        "parallel/context_parallel/context_step.py",  # of ranks that share rows
        "parallel/context_parallel/gathered_rows.py",  # of ranks that share rows
        "parallel/process/process_group.py",
        "parallel/tensor_parallel/sharded_module.py",  # of ranks that split layers
        "train/balance/expert_balance.py",  # of ranks that have parts of the same rows
        "train/engine.py",  # of `module_part_groups`
        "train/pipeline/pipeline_step.py",  # of `pipeline_groups`, and of stages that share parameters
    },
    "add up numbers of ranks": {
        "parallel/local_sgd/outer_optimizer.py",
        "train/engine.py",
        "train/evaluation.py",
    },
}
# Predictions of layouts that run elsewhere read all of their sizes.
PREDICTS = ("plan/", "cli/plan", "train/forecast/")
# Files that add up metrics, so that they must ask who reports.
ADDS_METRICS = {"train/engine.py", "train/evaluation.py"}


CALLS = {
    "make a sync group": {"SyncGroup"},
    "ask for sync groups": {"make_sync_groups"},
    "make process groups": {
        "new_process_group",
        "join_subgroup",
        "make_mesh",
        "make_meshes",
        "new_named_process_group",
    },
    "add up numbers of ranks": {"sum_scalars"},
}


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def deeds(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the deeds of OWNERS that a file does, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(name)) | ast.Attribute(attr=name) if name in DIMENSIONS:
                yield "name a dimension", node.lineno
            case ast.Attribute(attr="WORLD"):
                yield "ask torch for the world", node.lineno
            case ast.Call(args=[], keywords=[]) if called(node) in ("get_rank", "get_world_size"):
                yield "ask torch for the world", node.lineno
            case ast.Call():
                yield from ((deed, node.lineno) for deed, names in CALLS.items() if called(node) in names)


@cache
def found() -> tuple[tuple[str, str, int], ...]:
    paths = {path.relative_to(SRC).as_posix(): path for path in sorted(SRC.rglob("*.py"))}
    return tuple(
        (deed, name, line)
        for name, path in paths.items()
        for deed, line in deeds(ast.parse(path.read_text()))
        if deed != "name a dimension" or not name.startswith(PREDICTS)
    )


def test_only_the_owners_do_it() -> None:
    wrong = [f"{name}:{line} does {deed}" for deed, name, line in found() if name not in OWNERS[deed]]
    assert not wrong, "\n".join(wrong)


def test_every_owner_does_it() -> None:
    done = {(deed, name) for deed, name, _ in found()}
    assert {(deed, name) for deed, names in OWNERS.items() for name in names} <= done


@pytest.mark.parametrize("name", sorted(ADDS_METRICS))
def test_a_file_that_adds_up_metrics_asks_who_reports(name: str) -> None:
    assert "reports" in {
        called(node) for node in ast.walk(ast.parse((SRC / name).read_text())) if isinstance(node, ast.Call)
    }


@pytest.mark.parametrize(
    ("text", "deed"),
    [
        ("x = layout.dp", "name a dimension"),
        ("x = dims.size('tp')", "name a dimension"),
        ("x = dist.get_world_size()", "ask torch for the world"),
        ("g = dist.group.WORLD", "ask torch for the world"),
        ("g = new_process_group(group, ranks)", "make process groups"),
        ("total = api.sum_scalars([1.0], group)", "add up numbers of ranks"),
        ("g = SyncGroup((), ((0, 1),))", "make a sync group"),
    ],
)
def test_the_law_sees_a_violation(text: str, deed: str) -> None:
    assert deed in {seen for seen, _ in deeds(ast.parse(text))}
