"""Compilation of the blocks of a module."""
