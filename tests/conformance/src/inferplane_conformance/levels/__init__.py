"""The tests, one file for each subject, called ``level_<number>_<subject>.py``."""
