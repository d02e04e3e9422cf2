"""Crashing the store for real, over and over, and holding it to its promise: ``python -m fuzz --help``."""
