"""Losses as sums over a device's rows, never means: pure functions, no loops."""
