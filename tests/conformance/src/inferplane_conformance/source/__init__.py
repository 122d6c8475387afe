"""Rules for a plugin's source: read, not run, but for the comparison of the core before and after."""
