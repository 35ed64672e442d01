"""The alpha-beta-gamma cost of a Program on a cluster, and the choice of an algorithm by it."""
