"""The proof of a job's splits and stages: by a smaller twin of its model, and kept for later runs."""
