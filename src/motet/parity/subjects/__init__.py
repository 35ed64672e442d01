"""Subjects of verification: a job, a module of the user, or parallel code of the user."""
