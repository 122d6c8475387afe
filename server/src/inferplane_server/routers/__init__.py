"""Routes, one file for each family."""
