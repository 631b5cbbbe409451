"""From text to batches: sources, tokenizers, the token store, packing, mixtures, sampling, loading. NumPy only."""
