"""One fact sheet a model family."""
