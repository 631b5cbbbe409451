"""What everything stands on: trees, specs, layouts, the three functions that move anything inside a layer, meshes, config sections."""
