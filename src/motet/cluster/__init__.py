"""Descriptions of devices and links, and what this machine turns out to be."""
