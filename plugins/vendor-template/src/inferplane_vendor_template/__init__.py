"""A template of a platform plugin, and the command that fills it in."""
