"""Models: structured layers in the place of dense ones."""
