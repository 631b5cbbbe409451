"""One parallel strategy a file; the STRATEGIES table is in `table.py`."""
