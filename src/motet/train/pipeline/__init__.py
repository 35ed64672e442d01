"""Training in a pipeline: the stages of a rank, and the forwards and backwards of a step."""
