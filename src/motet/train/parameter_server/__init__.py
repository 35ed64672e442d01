"""The processes of a run with a parameter server: coordinator, servers and workers."""
