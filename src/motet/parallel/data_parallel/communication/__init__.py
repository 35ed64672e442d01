"""The collectives of gradients and parameters: settings, groups, algorithms and compression."""
