"""Generation: the cache, the engine, sampling."""
