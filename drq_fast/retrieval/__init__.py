"""Image retrieval on top of the layer and the index."""
