"""What the modes of a parameter server do to training: loss curves beside the synchronous run's, and staleness.

Each variant trains the job `tiny` with four workers and one server, from the same values as the synchronous run of its
seed. A run that is finished leaves one small file in docs/benchmarks/curves, and is not done again. Every run is made
in a temporary folder; one that is interrupted begins anew. A run in which any step's event tells of a gradient that is
further behind than its mode allows ends this program with that step.

    python benchmarks/server_training.py [--steps 200] [--seeds 0 1 2] [--only sync async ...] [--curves FOLDER]
                                         [--page | --no-page]

At the end docs/benchmarks/server-training.md and its pictures are made of the curves that are there; --page does that
alone, --no-page does not. Asynchronous and bounded runs depend on who was faster, so another time gives other numbers.
"""

from parts.runs import make
from parts.served import SERVED
from parts.served_tables import checked, table_of, table_of_staleness
from parts.variants_page import Curves, write_page


def main() -> None:
    make(SERVED, __doc__ or "", 200, write)


def write(curves: Curves, steps: int) -> None:
    write_page(SERVED, curves, steps, [table_of(curves), checked(curves), table_of_staleness(curves)])


if __name__ == "__main__":
    main()
