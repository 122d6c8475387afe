"""Measurements that users can repeat. Each prints one JSON object a case with ``--json``."""
