"""Loss curves of compressed, quantised and infrequent communication, compared with the exact run's.

Each variant trains the job `tiny` on two ranks with the same values, batches and learning rates as the exact run of its
seed; only the communication differs. A finished run is a line of docs/benchmarks/training-curves.csv, and is
not repeated. Every run is made in a temporary folder; an interrupted run begins anew.

    python benchmarks/compressed_training.py [--steps 500] [--seeds 0 1 2] [--only exact int4 ...] [--curves FILE]
                                             [--page | --no-page]

At the end docs/benchmarks/compressed-training.md and its pictures are made of the curves that are there; --page does
that alone, --no-page does not. Other work on the machine does not change the losses.
"""

from parts.compression_variants import COMPRESSION_STUDY, VARIANTS, bytes_per_parameter
from parts.report.pages import table
from parts.report.study_page import Curves, gap_cells, loss_cells, seeds_of, write_page
from parts.study_runs import make


def main() -> None:
    make(COMPRESSION_STUDY, __doc__ or "", 500, write)


def write(curves: Curves, steps: int) -> None:
    write_page(COMPRESSION_STUDY, curves, steps, [table_of(curves)])


def table_of(curves: Curves) -> str:
    head = [
        "variant", "bytes per parameter and step", "validation loss", "over seeds", "gap to exact", "over seeds",
        "gap without error feedback", "over seeds",
    ]  # fmt: skip
    rows = []
    for name, variant in VARIANTS.items():
        if variant.is_without or not seeds_of(curves, name):
            continue
        without = gap_cells(COMPRESSION_STUDY, curves, variant.without) if variant.without else ["", ""]
        sent = f"{bytes_per_parameter([*COMPRESSION_STUDY.common, *variant.settings]):.3g}"
        gaps = gap_cells(COMPRESSION_STUDY, curves, name)
        rows.append([variant.words, sent, *loss_cells(curves, name), *gaps, *without])
    return table(head, rows)


if __name__ == "__main__":
    main()
