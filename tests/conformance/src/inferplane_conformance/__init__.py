"""The conformance kit: tests that every platform passes, whoever wrote it."""
