"""Pipeline parallelism: stages of a model, their order of work, and the tensors that cross between them."""
