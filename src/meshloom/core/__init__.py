"""What everything stands on: trees, specs, layouts, the two functions that mention a sharding, meshes, config sections."""
