"""Independent replicas with rare outer steps: local SGD and DiLoCo."""
