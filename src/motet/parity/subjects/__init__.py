"""What can be verified: a job, a module of the user, or parallel code of the user."""
