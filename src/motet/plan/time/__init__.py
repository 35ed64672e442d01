"""The time of a planned step: kernels, collectives, and a simulation of their waits."""
