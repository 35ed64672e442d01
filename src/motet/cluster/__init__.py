"""Descriptions of devices, links and networks, and the properties of the local device."""
