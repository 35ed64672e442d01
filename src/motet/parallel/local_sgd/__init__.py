"""Replicas that take steps on their own between outer steps: local SGD and DiLoCo."""
