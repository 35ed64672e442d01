"""Pipeline parallelism: stages of a model, their order of work, and what crosses between them."""
