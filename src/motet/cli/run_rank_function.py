"""`python -m motet.cli.run_rank_function PACKAGE.MODULE:FUNCTION [ARGUMENT ...]`: a rank of the supervisor."""

import sys

from motet.cli.environment_variables import read_environment
from motet.parallel.process.launch_environment import read_rank_environment
from motet.train.launch.rank_process import run_supervised_rank, start_heartbeats


def main() -> int:
    """Run the function as the rank that the environment describes."""
    environment = read_environment()
    rank_env = read_rank_environment(environment)
    assert rank_env is not None, "started by hand: use `motet train`"
    start_heartbeats(rank_env.rank, int(environment["MOTET_HEARTBEATS"]))
    return run_supervised_rank(rank_env, int(environment["MOTET_SUPERVISOR"]), sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
