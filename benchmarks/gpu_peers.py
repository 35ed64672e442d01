"""A training step on one GPU: motet, plain PyTorch eager and compiled, transformers' Trainer, and Liger's kernels.

All train the same decoder (blocks of Llama 3.1 8B) on the same batches, a few steps each in turn; each round gives one
ratio of each contender to motet. Peers that are not installed are left out with a reason. Needs torch and motet's
sources alone: packages that a bare machine lacks come from a folder of wheels (`make gpu-wheels`).

    python benchmarks/gpu_peers.py [--layers 2] [--tokens 4096] [--rounds 15] [--only NAME ...] [--wheels DIR]
    python benchmarks/gpu_peers.py --device cpu --tiny
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from parts.arguments import parse_arguments
from parts.rounds import interleave, quartiles, ratio_text, ratios

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
STEPS = 4
BASE = "motet"
SHARE_AIM, RATIO_AIM = 0.6, 1.05  # Of the measured peak, with 4096 tokens on a GPU; and the time of the best peer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=4096, help="of a row")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose name contains one of these")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of packages that are missing here")
    options = parse_arguments(parser, device="cpu", tiny=True, rounds=2, only=["motet", "Trainer"])
    from gpu_checks import wheels

    with tempfile.TemporaryDirectory() as folder:
        try:
            sys.path += wheels.unpack_needed(options.wheels, Path(folder))
        except wheels.MissingWheelError as problem:
            print(f"gpu_peers: {problem}", file=sys.stderr)
            return 2
        return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Train with each contender in turn, and print a line for each."""
    import torch
    from gpu_checks.speed_rows import matmul_flops
    from parts.gpu_contenders import CONTENDERS, Shape, flops_of_step, make

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is here: nothing is measured; --device cpu --tiny runs the code", file=sys.stderr)
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    blocks = (64, 4, 2, 128) if options.tiny else (4096, 32, 8, 14336)
    layers, vocabulary, tokens = (2, 512, 64) if options.tiny else (options.layers, options.vocabulary, options.tokens)
    shape = Shape(layers, *blocks, vocabulary, options.rows, tokens)
    wanted = [name for name in CONTENDERS if not options.only or any(part in name for part in options.only)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; {shape}; {options.rounds} rounds of {STEPS} steps")
    made = {name: make(name, shape, device) for name in dict.fromkeys([BASE, *wanted])}
    for name, reason in made.items():
        if isinstance(reason, str):
            print(f"{name}: left out, {reason}")
    ready = {name: pair for name, pair in made.items() if not isinstance(pair, str)}
    if BASE not in ready:
        return 1
    batches = shape.batches(STEPS, device)
    results, failed = take_turns({name: partial(contender, batches) for name, (contender, _) in ready.items()}, options)
    for name, reason in failed.items():
        print(f"{name}: left out after it began, {reason}")
    if BASE not in results:
        return 1
    times = {name: [statistics.median(seconds) for seconds, _ in rounds] for name, rounds in results.items()}
    size = 256 if options.tiny else 8192
    flops, peak = flops_of_step(shape), matmul_flops(device.type, size, size, size)
    print(f"{flops / 1e12:.4g} TFLOP a step; a bf16 product of {size} x {size} reaches {peak / 1e12:.4g} TFLOP/s")
    heads = ("first step", "step, median (quartiles)", "tokens/s", "of peak", "time over motet's (quartiles)", "loss")
    print(" | ".join(("contender", *heads)))
    for name, each in times.items():
        low, middle, high = quartiles(each)
        share = f"{flops / middle / peak:.1%}"
        step = f"{middle * 1e3:.4g} ms ({low * 1e3:.4g} to {high * 1e3:.4g})"
        speed, first = f"{shape.rows * shape.length / middle:,.0f}", f"{ready[name][1]:.3g} s"
        compared, loss = ratio_text(each, times[BASE]), f"{results[name][-1][1]:.4f}"
        print(" | ".join([name, first, step, speed, share, compared, loss]))
    for line in aims(times, flops / peak, is_checked=device.type == "cuda"):
        print(line)
    return 0


def take_turns(
    turns: Mapping[str, Callable[[], Result]], options: argparse.Namespace
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """The results of the contenders that ran in every round, and why others failed."""
    from parts.gpu_contenders import failure_text

    failed = dict[str, str]()

    def turn(name: str) -> Result | None:
        try:
            return None if name in failed else turns[name]()
        except Exception as problem:  # noqa: BLE001  # The others go on
            failed[name] = failure_text(problem)
            return None

    results = interleave({name: partial(turn, name) for name in turns}, options.rounds)
    return {name: rounds for name, rounds in results.items() if name not in failed}, failed


def aims(times: Mapping[str, Sequence[float]], least_s: float, *, is_checked: bool) -> list[str]:
    """A line for each aim, from the seconds of all rounds and the fewest seconds that the peak allows."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    ours, peers = ({name for name in medians if name.startswith(BASE) == is_ours} for is_ours in (True, False))
    best = min(ours, key=medians.__getitem__)
    share = least_s / medians[best]

    def verdict(holds: bool) -> str:
        return ("holds" if holds else "DOES NOT HOLD") if is_checked else "not checked: no GPU"

    lines = [f"aim {SHARE_AIM:.0%} of the measured peak: {share:.1%} by {best}: {verdict(share >= SHARE_AIM)}"]
    if not peers:
        return [*lines, f"aim {RATIO_AIM}x the best peer: not checked: no peer ran"]
    peer = min(peers, key=medians.__getitem__)
    middle, text = statistics.median(ratios(times[peer], times[best])), ratio_text(times[peer], times[best])
    return [*lines, f"aim {RATIO_AIM}x the best peer: {text} by {best} over {peer}: {verdict(middle >= RATIO_AIM)}"]


if __name__ == "__main__":
    sys.exit(main())
