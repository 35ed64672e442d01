"""Attention of sequences that ranks share: motet's three exchanges, and gathered keys with a dense mask.

All of them compute attention of the same tokens, forward and backward, in the same rank processes on Gloo, in turn; who
comes first changes from round to round. A round gives one ratio for each. Before they are timed, the output and all
gradients of each must be those of complete rows on one device.

The same runs show the ring with and without overlap, and the work of the slowest rank in both orders of tokens. The
ring with and without overlap runs between two hosts in miniature, too, whose link is shaped as in benchmarks/hosts.py.

    python benchmarks/context_parallel.py [--ranks 2 4] [--rounds 15] [--cases causal-4096 window-4096]
                                          [--decoder 4096] [--link 4096] [--rate 200mbit] [--page]

The link needs root and iproute2, as hosts.py does; otherwise that part is left out. --page writes
docs/benchmarks/context-parallel.md.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hosts import HOSTS, PREFIX, add_link_arguments, missing, start_ranks, two_hosts
from parts.arguments import parse_arguments
from parts.rank_processes import launch, rank_group
from parts.report.pages import DOCS, collected_results, fill, load_of_machine, store_result, table
from parts.rounds import interleave, progress, ratio_text, ratios

if TYPE_CHECKING:
    from parts.context_attention import (
        AttentionCase,
        AttentionContender,
        AttentionLayer,
        DecoderPasses,
        PassTimes,
    )
    from torch import Tensor

    Subject = AttentionLayer | DecoderPasses
    Times = Mapping[AttentionContender, list[list[PassTimes]]]  # Of each round, by rank

PAGE = DOCS / "context-parallel.md"
CASES = ("causal-4096", "causal-8192", "documents-4096", "window-4096", "full-4096")
WORDS = {
    "causal": "causal",
    "documents": "causal, 16 packed documents",
    "window": "causal, window of 512",
    "full": "every key visible",
}
LONGEST_FOR_MORE_RANKS = 4096  # Tokens; longer rows, and the decoder, run on the first number of ranks alone
LARGEST_DIFFERENCE = 1e-5  # Of a norm, relative: float32 adds blocks in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="KIND-TOKENS; kinds: " + ", ".join(WORDS))
    parser.add_argument("--decoder", type=int, default=4096, help="tokens of the row of the decoder; 0 for none")
    parser.add_argument("--link", type=int, default=4096, help="tokens of the row over a shaped link; 0 for none")
    add_link_arguments(parser, PAGE)
    small = [f"{kind}-256" for kind in WORDS]
    options = parse_arguments(parser, ranks=[2], rounds=1, cases=small, decoder=256, link=256)
    warnings.filterwarnings("ignore")
    if options.rank is not None:
        measure_over_link(options)
    elif "RANK" in os.environ:
        measure(options)
    else:
        run_all(options)


def run_all(options: argparse.Namespace) -> None:
    """Start all ranks, and write the page."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are taken down
    parts = [conditions(options)]
    with collected_results() as sections:
        exit_codes = [launch(ranks, threads=1) for ranks in options.ranks]
        if options.link and (reason := missing()):
            store_result(f"## Two hosts\n\nLeft out: {reason}.")
        elif options.link:
            with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, two_hosts(options) as hosts:
                exit_codes.append(start_ranks(hosts, folder, ranks_per_host=1))
    if any(exit_codes):
        sys.exit(1)
    parts += sections
    print(*parts, sep="\n\n", flush=True)
    if options.page:
        fill(PAGE, parts)


def conditions(options: argparse.Namespace) -> str:
    from parts.context_attention import HEAD_DIM, KEY_HEADS, QUERY_HEADS

    return (
        f"One row, {QUERY_HEADS} query heads, {KEY_HEADS} key heads of {HEAD_DIM}, float32, Gloo, one thread a rank; "
        f"{options.rounds} rounds. This machine has {os.cpu_count()} cores, which more ranks share. Milliseconds are "
        f"medians of the slowest rank. {load_of_machine()}"
    )


def measure(options: argparse.Namespace) -> None:
    """Measure as one of the ranks on this host."""
    import torch.distributed as dist
    from parts.context_attention import (
        AttentionLayer,
        BenchmarkRanks,
        DecoderPasses,
        complete_attention,
        complete_passes,
    )

    is_first = int(os.environ["WORLD_SIZE"]) == options.ranks[0]
    names = [name for name in options.cases if is_first or named_case(name).tokens <= LONGEST_FOR_MORE_RANKS]
    with rank_group(threads=1) as group:
        group = replace(group, process_group=dist.new_group(backend="cpu:gloo"))
        ranks, sections = BenchmarkRanks(group), [f"## {group.world} ranks"]
        rows, overlap_rows, balance_rows = list[list[str]](), list[list[str]](), list[list[str]]()
        for case in map(named_case, names):
            layers = {each: AttentionLayer(case, each, ranks) for each in contenders(case, group.world)}
            times = take_turns(case, layers, complete_attention(case), rounds=options.rounds)
            rows += ratio_rows(case, times)
            overlap_rows.append(overlap_row(case, times))
            balance_rows += balance_rows_of(case, layers, times)
        if rows:
            sections += [
                table(RATIO_HEAD, rows),
                f"### Overlap on {group.world} ranks",
                table(OVERLAP_HEAD, overlap_rows),
            ]
        if balance_rows:
            sections += [f"### Work of {group.world} ranks", table(BALANCE_HEAD, balance_rows)]
        if options.decoder and is_first:
            case = named_case(f"causal-{options.decoder}")
            passes = {each: DecoderPasses(case, each, ranks) for each in contenders(case, group.world, is_layer=False)}
            times = take_turns(case, passes, complete_passes(case), rounds=options.rounds)
            sections += [f"### A decoder on {group.world} ranks", table(RATIO_HEAD, ratio_rows(case, times))]
        if group.rank == 0:
            for section in sections:
                store_result(section)


def measure_over_link(options: argparse.Namespace) -> None:
    """Measure as the rank of a host."""
    import torch
    import torch.distributed as dist
    from parts.context_attention import AttentionContender, AttentionLayer, BenchmarkRanks, complete_attention

    from motet.cluster.host_limits import keep_freed_memory
    from motet.parallel.process.process_group import default_rank_group

    torch.set_num_threads(1)
    keep_freed_memory()
    store = dist.FileStore(str(Path(options.folder) / "store"), HOSTS)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=HOSTS)
    ranks = BenchmarkRanks(default_rank_group(torch.device("cpu")))
    rows, overlap_rows = list[list[str]](), list[list[str]]()
    for kind in ("causal", "full"):
        case = named_case(f"{kind}-{options.link}")
        layers = {each: AttentionLayer(case, each, ranks) for each in contenders(case, HOSTS, is_layer=False)}
        without = AttentionContender("ring", overlaps=False)
        layers[without] = AttentionLayer(case, without, ranks)
        times = take_turns(case, layers, complete_attention(case), rounds=options.rounds)
        rows += ratio_rows(case, times)
        overlap_rows.append(overlap_row(case, times))
    if options.rank == 0:
        store_result(f"## Two hosts, a rank on each, and a link of {options.rate}")
        store_result(table(RATIO_HEAD, rows))
        store_result(table(OVERLAP_HEAD, overlap_rows))
    dist.barrier()
    dist.destroy_process_group()


def named_case(name: str) -> "AttentionCase":
    """A case of `--cases`."""
    from parts.context_attention import AttentionCase

    kind, _, tokens = name.partition("-")
    if kind not in WORDS or not tokens.isdigit():
        raise SystemExit(f"{name} is not KIND-TOKENS; kinds are {', '.join(WORDS)}")
    window, documents = 512 if kind == "window" else None, 16 if kind == "documents" else 1
    return AttentionCase(WORDS[kind], int(tokens), window, documents, causal=kind != "full")


def contenders(case: "AttentionCase", ranks: int, *, is_layer: bool = True) -> "list[AttentionContender]":
    """The ways that take turns. A layer alone runs without overlap and, if its order matters, in both orders, too."""
    from parts.context_attention import AttentionContender

    dense, gathered, ring, heads = map(AttentionContender, ("dense", "all-gather", "ring", "all-to-all"))
    chosen = [dense, gathered, ring, heads, *([replace(ring, inner=2)] if ranks > 2 else [])]
    if is_layer:
        chosen.append(replace(ring, overlaps=False))
        if case.causal and case.window is None:
            chosen += [replace(each, order="contiguous") for each in (gathered, ring)]
    return chosen


def take_turns(
    case: "AttentionCase",
    subjects: "Mapping[AttentionContender, Subject]",
    complete: "list[Tensor]",
    *,
    rounds: int,
) -> "Times":
    """Check all results, and then time them. The first round warms up."""
    import torch.distributed as dist
    from parts.context_attention import PassTimes

    progress(f"{case.name}, {case.tokens} tokens")
    for contender, subject in subjects.items():
        check_results(contender, subject.results(), subject.expected(complete))

    def one_round(subject: "Subject") -> "list[PassTimes]":
        dist.barrier()
        times: list[PassTimes | None] = [None] * dist.get_world_size()
        dist.all_gather_object(times, subject.run())
        return [each for each in times if each is not None]

    turns: dict[AttentionContender, Callable[[], list[PassTimes]]] = {
        contender: partial(one_round, subject) for contender, subject in subjects.items()
    }
    return {contender: results[1:] for contender, results in interleave(turns, rounds + 1).items()}


def check_results(contender: "AttentionContender", results: "Sequence[Tensor]", expected: "Sequence[Tensor]") -> None:
    """Check results against those of one device."""
    for number, (a, b) in enumerate(zip(results, expected, strict=True)):
        difference = float((a - b).norm() / b.norm())
        if not difference < LARGEST_DIFFERENCE:
            name = f"gradient {number}" if number else "output"
            raise SystemExit(f"{contender}: the {name} differs from that of one device by {difference:.1e} of its norm")


# --- tables -----------------------------------------------------------------------------------------------

RATIO_HEAD = (
    "attention", "tokens", "", "forward (ms)", "backward (ms)", "speed relative to the dense mask",
    "processor time, of that of the dense mask",
)  # fmt: skip
OVERLAP_HEAD = ("attention", "tokens", "with overlap (ms)", "without (ms)", "speed with overlap, relative to without")
BALANCE_HEAD = (
    "attention", "tokens", "", "order", "processor time of the busiest rank over the mean", "pairs over the mean",
    "time, relative to head-tail",
)  # fmt: skip


def slowest(rounds: "Sequence[list[PassTimes]]") -> list[float]:
    """Seconds of forward and backward of the slowest rank in each round."""
    return [max(each.total_s for each in times) for times in rounds]


def milliseconds(seconds: Sequence[float]) -> str:
    """The median."""
    return f"{statistics.median(seconds) * 1e3:,.1f}"


def ratio_rows(case: "AttentionCase", times: "Times") -> list[list[str]]:
    """Each way relative to the first, the dense mask."""
    rows, (reference, *_) = [], times.values()
    for contender, rounds in times.items():
        if contender.order is not None or not contender.overlaps:
            continue
        forward = [max(each.forward_s for each in ranks) for ranks in rounds]
        backward = [max(each.backward_s for each in ranks) for ranks in rounds]
        cells = ["", ""]
        if contender.kind != "dense":
            used, used_by_first = ([sum(each.process_s for each in ranks) for ranks in r] for r in (rounds, reference))
            share = statistics.median(ratios(used, used_by_first))
            cells = [ratio_text(slowest(reference), slowest(rounds)), f"{share:.0%}"]
        passes = milliseconds(forward), milliseconds(backward)
        rows.append([case.name, f"{case.tokens:,}", contender.name, *passes, *cells])
    return rows


def overlap_row(case: "AttentionCase", times: "Times") -> list[str]:
    """The ring with and without overlap."""
    from parts.context_attention import AttentionContender

    ring = AttentionContender("ring")
    with_overlap, without = (slowest(times[each]) for each in (ring, replace(ring, overlaps=False)))
    cells = milliseconds(with_overlap), milliseconds(without), ratio_text(without, with_overlap)
    return [case.name, f"{case.tokens:,}", *cells]


def balance_rows_of(
    case: "AttentionCase", layers: "Mapping[AttentionContender, AttentionLayer]", times: "Times"
) -> list[list[str]]:
    """Each kind in both orders. All ranks call this, because pairs are counted in one more run."""
    import torch.distributed as dist
    from parts.context_attention import counted_pairs

    rows = []
    for other in [contender for contender in times if contender.order is not None]:
        usual = replace(other, order=None)
        for contender in (usual, other):
            pairs = [0] * dist.get_world_size()
            dist.all_gather_object(pairs, counted_pairs(layers[contender]))
            shares = [
                max(each.thread_s for each in ranks) * len(ranks) / sum(each.thread_s for each in ranks)
                for ranks in times[contender]
            ]
            order = contender.order or case.default_order
            cells = ratio_text(shares, [1.0] * len(shares)), f"{max(pairs) * len(pairs) / sum(pairs):.2f}"
            step = "" if contender is usual else ratio_text(slowest(times[other]), slowest(times[usual]))
            rows.append([case.name, f"{case.tokens:,}", contender.name, f"`{order}`", *cells, step])
    return rows


if __name__ == "__main__":
    main()
