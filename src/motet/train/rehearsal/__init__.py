"""The rehearsal of a run: the start and a step of shapes of one rank of many, on one machine."""
