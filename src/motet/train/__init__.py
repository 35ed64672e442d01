"""The typed job, and the loop that trains it on one or many ranks."""
