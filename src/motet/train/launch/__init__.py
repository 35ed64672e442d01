"""How a run starts and ends: entry points, the supervisor of local ranks, run folders and failures."""
