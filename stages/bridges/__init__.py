"""Bridges: hidden-state stores of other tools, recognised, read and written. Their files are data, never code."""
