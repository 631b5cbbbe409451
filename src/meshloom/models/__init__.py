"""One model family a file; the MODELS table is in `table.py`."""
