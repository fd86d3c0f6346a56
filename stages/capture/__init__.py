"""Capture: hidden states from the target to disk and back. Plan, extraction core, row store, work cache, dialects, layer
probe, value checks."""
