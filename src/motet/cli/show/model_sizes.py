"""The output of `motet show model`: the sizes of a model's blocks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from motet.cli.job_arguments import is_config, load_job_or_config, trace_job
from motet.cli.output import OutputLine, print_lines, table_lines
from motet.core.errors import InputError, check_input
from motet.core.units import format_bytes, format_count
from motet.memory.policy_choice import fixed_policies
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.spec.layer_specs import BlockSpec
from motet.models.spec.model_spec import ModelSpec, spec_from_settings
from motet.models.spec.spec_file import write_spec_file
from motet.monitor.stdout_stderr import print_json, stdout_console
from motet.train.job import Job, batch_shape

AttentionCount = Literal["causal", "full"]


@dataclass(frozen=True)
class ModelRequest:
    """The options of the command."""

    source: str
    overrides: list[str]
    sequence_length: int | None
    attention: AttentionCount
    is_traced: bool
    output: Path | None
    json: bool


def show_model_sizes(request: ModelRequest) -> None:
    """Print parameters, FLOPs and saved activations of each block, and write them to a file."""
    job = _load_job(request)
    spec = trace_job(job) if request.is_traced else spec_from_settings(job.model)
    if request.output is not None:
        write_spec_file(request.output, spec, source=request.source, dtype=job.precision.resolved.compute)
    report = {"source": request.source, **_model_sizes(job, spec, request.attention)}
    if request.json:
        print_json(report)
    else:
        print_lines(report["source"], *_table_lines(report), "")
        stdout_console().print(_summary(report))


def _load_job(request: ModelRequest) -> Job:
    source, length = request.source, request.sequence_length
    if request.overrides and is_config(source):
        override = request.overrides[0]
        raise InputError(f"override {override!r}: {source} is a config, and only jobs have settings to replace")
    words = [*request.overrides, *([f"data.sequence_length={length}"] if length else [])]
    job = load_job_or_config(source, words)
    tokens = job.data.sequence_length
    context = getattr(_known_settings(job), "context", tokens)
    problem = f"sequences of {tokens} tokens are longer than model.context = {context}"
    check_input(tokens <= context, f"{problem}; shorten data.sequence_length or lengthen model.context")
    return job


def _known_settings(job: Job) -> object:
    path = getattr(job.model, "hf_path", None)
    try:
        return job.model if path is None else settings_from_config(read_config(path))
    except InputError:
        return None


def _model_sizes(job: Job, spec: ModelSpec, attention: AttentionCount) -> dict[str, Any]:
    sequence, two_sequences = batch_shape(job, 1), batch_shape(job, 2)
    dtype = job.precision.resolved.compute
    tokens = sequence.length + sequence.source_length

    policies = fixed_policies(job.memory, spec.policy_count) if job.memory.recompute != "auto" else None

    def sizes(layer: BlockSpec | ModelSpec) -> dict[str, Any]:
        flops, saved_bytes = layer.forward_flops(sequence, attention), layer.saved_bytes(sequence, dtype)
        return {
            "parameters": layer.parameter_count,
            "active_parameters": layer.active_parameter_count,
            "forward_flops_per_token": flops / tokens,
            "training_flops_per_token": layer.training_flops(sequence, attention) / tokens,
            # The cost of one more sequence: some tensors do not grow with the number of sequences.
            "saved_bytes_per_token": (layer.saved_bytes(two_sequences, dtype) - saved_bytes) / tokens,
            "saved_bytes_per_sequence": saved_bytes,
        }

    return {
        "sequence_length": job.data.sequence_length,
        "tokens_per_sequence": tokens,
        "dtype": dtype,
        "attention": attention,
        **sizes(spec),
        "recompute": job.memory.recompute,
        "saved_bytes_per_sequence_with_recomputation": policies and spec.saved_bytes(sequence, dtype, policies),
        "blocks": [{"name": block.name, "repeat": block.repeat, **sizes(block)} for block in spec.blocks],
    }


def _table_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    header = ("block", "repeat", "parameters", "FLOPs per token", "saved per token")
    rows = []
    counts = Counter[tuple[tuple[str, Any], ...]]()  # Equal blocks may alternate with others
    for block in report["blocks"]:
        counts[tuple(item for item in block.items() if item[0] != "repeat")] += block["repeat"]
    kinds = [{**dict(kind), "repeat": count} for kind, count in counts.items()]
    for row in (*kinds, {**report, "name": "model", "repeat": ""}):
        flops, saved = format_count(row["training_flops_per_token"]), format_bytes(row["saved_bytes_per_token"])
        rows.append((row["name"], str(row["repeat"]), f"{row['parameters']:,}", flops, saved))
    return table_lines(rows, header=header, right=range(1, 5))


def _summary(report: dict[str, Any]) -> str:
    active = f"A token goes through {report['active_parameters']:,} parameters. "
    policy, saved = report["recompute"], report["saved_bytes_per_sequence_with_recomputation"]
    pairs = "pairs that see each other" if report["attention"] == "causal" else "all pairs"
    return (
        (active if report["active_parameters"] != report["parameters"] else "")
        + "A block's row is one repetition. FLOPs are of forward and backward in sequences of "
        f"{report['tokens_per_sequence']:,} tokens, attention counted for {pairs}. Saved from forward to backward "
        f"for one such sequence in {report['dtype']}, nothing recomputed: "
        f"{format_bytes(report['saved_bytes_per_sequence'])}."
        + (f" With memory.recompute={policy}: {format_bytes(saved)}." if policy != "none" and saved else "")
    )
