"""Processes to crash: what several test files need."""
