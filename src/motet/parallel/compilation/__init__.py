"""Rendezvous of ranks: the launch environment, process groups, and checks that ranks agree."""
