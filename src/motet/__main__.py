"""`python -m motet` and `torchrun -m motet`: the same as the command `motet`."""

from motet.cli.main import main

main()
