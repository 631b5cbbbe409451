"""Losses as (sum, count) pairs: pure functions, no loops."""
