"""A training step of `moe-tiny` with motet's experts, with a loop over experts, and with those of transformers.

All of them train the same model from the same values on the same batches of the job, in this process, in turn; who
comes first changes from round to round. Router, attention, loss and update are motet's in all of them, so a ratio says
what the experts alone change. A round does some steps of each, and gives one ratio of their medians. The same rounds
are made with forward and backward of the experts of one layer alone.

    python benchmarks/experts.py [--threads 1] [--rounds 15] [--job moe-tiny] [--settings A.B=VALUE ...] [--page]

Before they are timed, outputs and all gradients of a layer, and losses and gradient norms of two steps, must be those
of motet. --page writes docs/benchmarks/experts.md.
"""

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.rounds import interleave, quartiles, ratios

from motet.core.units import format_bytes

if TYPE_CHECKING:
    from parts.expert_layers import ExpertsAlone, Replacement, TrainedJob

    from motet.train.job import Job

PAGE = DOCS / "experts.md"
LARGEST_DIFFERENCE = 1e-5  # Relative, of a norm or a loss: float32 adds in another order
CALLS = {"a training step": 2, "the experts of one layer": 6}  # Calls in a round
MOTET = "**motet**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--job", default="moe-tiny")
    parser.add_argument("--settings", nargs="+", default=[], help="of the job, as a.b=value")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    small = ["data.tokenizer=bytes", "model.vocab_size=260", "data.batch_sequences=2"]
    measure(parse_arguments(parser, rounds=1, settings=small))


def measure(options: argparse.Namespace) -> None:
    import torch
    from parts.expert_layers import ExpertsAlone, TrainedJob

    from motet.cluster.host_limits import keep_freed_memory
    from motet.train.build import precision_context
    from motet.train.job import load_job

    torch.set_num_threads(options.threads)
    keep_freed_memory()  # As ranks do
    job = load_job(options.job, ["run.device=cpu", "run.ranks=1", *options.settings])
    load, ways = load_of_machine(), replacements()
    parts = [f"{conditions(options, job)} {load}"]
    with precision_context(job):
        layers = {name: ExpertsAlone.build(job, replace) for name, replace in ways.items()}
        check_layers(layers)
        steps = {name: TrainedJob.build(job, replace) for name, replace in ways.items()}
        check_steps(steps)
        saved = {name: format_bytes(layer.saved_bytes()) for name, layer in layers.items()}
        for title, subjects, last in zip(CALLS, (steps, layers), ({}, {"saved": saved}), strict=True):
            parts += [f"## {title.capitalize()}", timed(title, subjects, options.rounds, last)]
    print(*parts, sep="\n\n", flush=True)
    if options.page:
        fill(PAGE, parts)


def replacements() -> "dict[str, Replacement]":
    """The ways by their names in tables, motet's first."""
    from parts.expert_layers import LoopOverExperts, TransformersExperts, default_implementation

    ways: dict[str, Replacement] = {MOTET: lambda experts: experts, "loop over experts, `index_add_`": LoopOverExperts}
    if find_spec("transformers") is None:
        print("transformers is left out: it is not installed; run: pip install 'motet[hf]'")
        return ways
    default = default_implementation()
    for name in dict.fromkeys((default, "eager")):
        remark = ", its default" * (name == default)
        ways[f"transformers, `{name}`{remark}"] = partial(TransformersExperts, implementation=name)
    return ways


def conditions(options: argparse.Namespace, job: "Job") -> str:
    has_transformers = find_spec("transformers") is not None
    versions = f" transformers {version('transformers')}." if has_transformers else ""
    return (
        f"Job `{job.name}`, {job.data.batch_sequences} x {job.data.sequence_length} tokens, precision "
        f"`{job.precision.recipe}`, {options.threads} threads; {options.rounds} rounds.{versions}"
    )


def check_layers(layers: "Mapping[str, ExpertsAlone]") -> None:
    """Compare the output and all gradients of each way with those of motet."""
    expected = layers[MOTET].results()
    for name, layer in layers.items():
        for number, (a, b) in enumerate(zip(layer.results(), expected, strict=True)):
            check(f"gradient {number}" if number else "output", name, float(((a - b).norm() / b.norm()).detach()))


def check_steps(steps: "Mapping[str, TrainedJob]") -> None:
    """Compare two steps: the second one sees the update of the first."""
    for _ in range(2):
        for each in steps.values():
            each.seconds()
        expected = steps[MOTET]
        for name, each in steps.items():
            check("loss", name, abs(each.loss / expected.loss - 1))
            check("norm of gradients", name, abs(each.grad_norm / expected.grad_norm - 1))


def check(what: str, name: str, difference: float) -> None:
    if not difference < LARGEST_DIFFERENCE:
        raise SystemExit(f"{name}: the {what} differs from that of motet by {difference:.1e}, relative")


def timed(
    title: str,
    subjects: "Mapping[str, ExpertsAlone | TrainedJob]",
    rounds: int,
    columns: Mapping[str, Mapping[str, str]],
) -> str:
    """Time all ways in rounds, and make a table with more columns. The first round warms up."""

    def one_round(subject: "ExpertsAlone | TrainedJob") -> float:
        return statistics.median(subject.seconds() for _ in range(CALLS[title]))

    results = interleave({name: partial(one_round, subject) for name, subject in subjects.items()}, rounds + 1)
    times = {name: seconds[1:] for name, seconds in results.items()}
    rows = []
    for name, seconds in times.items():
        low, middle, high = quartiles(ratios(seconds, times[MOTET]))
        compared = ["", ""] if name == MOTET else [f"{middle:.3f}x", f"{low:.3f} to {high:.3f}"]
        cells = [column[name] for column in columns.values()]
        rows.append([name, f"{statistics.median(seconds) * 1e3:,.1f}", *compared, *cells])
    return table(["experts", "ms (median)", "motet is (median)", "quartiles", *columns], rows)


if __name__ == "__main__":
    main()
