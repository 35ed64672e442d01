"""All layouts of a job on a number of devices, ranked by predicted time."""
