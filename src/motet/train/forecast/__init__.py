"""The planner's prediction of a job, and of a step of a run."""
