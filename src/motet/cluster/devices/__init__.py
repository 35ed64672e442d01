"""Tables of devices, the names that people call them by, and devices that a cluster file describes."""
