"""The error of a sum of quantised gradients: quantised at each hop of a ring, or once in an all-to-all (qgZ).

Both are reduce-scatters of N ranks, played in one process on the codecs that training uses. In a ring a share passes
all ranks: each decodes the sum that it receives, adds its part and encodes the result. In the other way each rank
encodes its part once, and the owner of the share decodes and adds all of them, as motet does. The error is that of the
complete sum, 2-norm over 2-norm, against the sum in float64.

The gradients are real: the decoder of the job `tiny` takes some steps of AdamW on its data, and then each rank has the
gradient of a separate batch, of all parameters of one block.

    python benchmarks/quantised_sums.py [--codecs int8 int4] [--ranks 2 4 8 16 32 64] [--steps 30] [--rows 1] [--page]

--page writes docs/benchmarks/quantised-sums.md and its picture.
"""

import argparse
from math import sqrt
from typing import Any, NamedTuple

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table
from parts.report.plots import Axis, Line, save_line_plot

PAGE = DOCS / "quantised-sums.md"
PICTURE = DOCS / "quantised-sums.svg"
WARM_UP_ROWS = 4
LEARNING_RATE = 1e-3
BLOCK = 1
"""The block of the decoder, counted from 0."""


class Errors(NamedTuple):
    """Relative errors of a codec at a number of ranks."""

    ring: float
    once: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=30, help="steps of training before the gradients are taken")
    parser.add_argument("--rows", type=int, default=1, help="sequences in the batch of a rank")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, codecs=["int8"], ranks=[2], steps=1)
    gradients = real_gradients(max(options.ranks), options)
    errors = {
        codec: {ranks: errors_of(codec, gradients[:ranks]) for ranks in options.ranks} for codec in options.codecs
    }
    same = {ranks: likeness(gradients[:ranks]) for ranks in options.ranks}
    found = table_of(errors, same)
    note = (
        f"{gradients.shape[1]:,} gradients of a rank, of block {BLOCK} of `tiny` after {options.steps} steps, from "
        f"{options.rows} x 256 tokens each."
    )
    print(note, found, sep="\n\n")
    if options.page:
        draw_picture(errors)
        alt = "Relative error of the sum over the number of ranks"
        fill(PAGE, [note, found, f"![{alt}]({PICTURE.name})"])


def real_gradients(ranks: int, options: argparse.Namespace) -> Any:
    """[ranks, elements] in float32: mean gradients of different batches at one point of training."""
    import torch

    from motet import load_job
    from motet.data.corpus.prepare import prepare_data
    from motet.data.samples.loader import BatchLoader
    from motet.models.build import build_trainable_model

    job = load_job("tiny", [f"data.batch_sequences={WARM_UP_ROWS}"])
    data = BatchLoader(prepare_data(job.data), job.data, seed=0)
    model = build_trainable_model(job.model, 0, torch.float32, torch.device("cpu"))
    module: Any = model.module
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    for step in range(options.steps):
        mean_loss(model, data.batch(step, range(WARM_UP_ROWS))).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    chosen = list(module.blocks[BLOCK].parameters())
    found = torch.empty(ranks, sum(p.numel() for p in chosen))
    job = load_job("tiny", [f"data.batch_sequences={options.rows}"])
    data = BatchLoader(prepare_data(job.data), job.data, seed=1)
    for rank in range(ranks):
        loss = mean_loss(model, data.batch(rank, range(options.rows)))
        found[rank] = torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, chosen)])
    return found


def mean_loss(model: Any, batch: Any) -> Any:
    return model.loss_sum(batch) / batch.weights.sum()


def errors_of(text: str, gradients: Any) -> Errors:
    """Errors of the sum of all rows, computed in both ways."""
    import torch

    from motet.collectives.compression.codecs import parse_codec, rank_slices

    codec = parse_codec(text)
    whole = gradients.sum(0, dtype=torch.float64)
    ring, once = torch.empty_like(whole), torch.empty_like(whole)
    for owner, (start, stop) in enumerate(rank_slices(whole.numel(), len(gradients))):
        parts = gradients[:, start:stop]
        ring[start:stop] = around_a_ring(codec, parts, owner)
        once[start:stop] = at_the_owner(codec, parts)
    return Errors(*(float((found - whole).norm() / whole.norm()) for found in (ring, once)))


def around_a_ring(codec: Any, parts: Any, owner: int) -> Any:
    """The sum around a ring, which starts behind the owner and ends with it: one encoding a hop, ranks - 1 in all."""
    ranks = len(parts)
    total = parts[(owner + 1) % ranks]
    for hop in range(2, ranks + 1):
        total = through(codec, total, hop) + parts[(owner + hop) % ranks]
    return total


def at_the_owner(codec: Any, parts: Any) -> Any:
    """The sum at the owner, whose part is encoded too, as in motet's reduce-scatter."""
    return sum(through(codec, part, rank) for rank, part in enumerate(parts))


def through(codec: Any, tensor: Any, seed: int) -> Any:
    """Encode and decode the tensor, as a receiver sees it."""
    from motet.collectives.compression.compressed_collectives import decode, encode

    return decode(codec, encode(codec, tensor, seed), tensor.shape, tensor.dtype, seed)


def likeness(gradients: Any) -> float:
    """The norm of the sum over the norm of a sum of uncorrelated gradients: 1 if they are, sqrt(ranks) if equal."""
    import torch

    wide = gradients.to(torch.float64)
    return float(wide.sum(0).norm() / sqrt(float(wide.square().sum())))


def table_of(errors: dict[str, dict[int, Errors]], same: dict[int, float]) -> str:
    head = ["ranks", "likeness"]
    for codec in errors:
        head += [f"`{codec}`, ring", f"`{codec}`, once", "ratio"]
    rows = []
    for ranks, alike in same.items():
        cells = [str(ranks), f"{alike:.2f}"]
        for by_ranks in errors.values():
            found = by_ranks[ranks]
            cells += [f"{found.ring:.3g}", f"{found.once:.3g}", f"{found.ring / found.once:.2f}"]
        rows.append(cells)
    return table(head, rows)


def draw_picture(errors: dict[str, dict[int, Errors]]) -> None:
    lines = []
    for number, (codec, by_ranks) in enumerate(errors.items()):
        lines += [
            Line(f"{codec}, ring", [(ranks, e.ring) for ranks, e in by_ranks.items()], number),
            Line(f"{codec}, once", [(ranks, e.once) for ranks, e in by_ranks.items()], number, dashed=True),
        ]
    ranks = sorted(next(iter(errors.values())))
    save_line_plot(
        PICTURE,
        lines,
        title="Error of a sum of quantised gradients",
        note="quantised at each hop of a ring, and once by each rank (dashed)",
        x=Axis("ranks", logarithmic=True, ticks=tuple(map(float, ranks))),
        y=Axis("error / norm of the sum", logarithmic=True),
    )


if __name__ == "__main__":
    main()
