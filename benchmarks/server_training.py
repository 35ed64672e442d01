"""Loss curves and staleness of a parameter server's modes, compared with the synchronous run's.

Each variant trains the job `tiny` with four workers and one server, from the same values as the synchronous run of its
seed. A finished run is a line of docs/benchmarks/training-curves.csv, and is not repeated. Every run is made in a
temporary folder; an interrupted run begins anew. A gradient that is further behind than its mode allows ends this
program.

    python benchmarks/server_training.py [--steps 200] [--seeds 0 1 2] [--only sync async ...] [--curves FILE]
                                         [--page | --no-page]

At the end docs/benchmarks/server-training.md and its pictures are made of the curves that are there; --page does that
alone, --no-page does not. Asynchronous and bounded runs depend on who was faster, so another time gives other numbers.
"""

from parts.ps_variants import SERVER_STUDY
from parts.report.ps_tables import checked, table_of, table_of_staleness
from parts.report.study_page import Curves, write_page
from parts.study_runs import make


def main() -> None:
    make(SERVER_STUDY, __doc__ or "", 200, write)


def write(curves: Curves, steps: int) -> None:
    write_page(SERVER_STUDY, curves, steps, [table_of(curves), checked(curves), table_of_staleness(curves)])


if __name__ == "__main__":
    main()
