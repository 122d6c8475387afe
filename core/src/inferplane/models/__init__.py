"""Models: where they come from, how they are read, and one file per architecture family."""
