"""What of a plugin's package a first token needs: the modules that its platform imports when no kernel is asked for.

    python -m inferplane_conformance.source.first_token PLATFORM:INDEX

prints a JSON list of their files. Ops, attention and products are then the core's references; the device is set up
where there is one.
"""

from __future__ import annotations

import json
import sys

from inferplane_conformance.subject import Subject


def load_platform(subject: Subject) -> None:
    """Everything that one rank with the references for kernels asks of the plugin."""
    subject.defaults("float32")
    subject.platform.worker_class()
    if subject.absence is None:
        _ = subject.runtime


def loaded_files(subject: Subject) -> list[str]:
    assert subject.package is not None
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted(file for file in files if file and file.startswith(f"{subject.package}/"))


def main() -> None:
    subject = Subject(sys.argv[1])
    load_platform(subject)
    print(json.dumps(loaded_files(subject)))


if __name__ == "__main__":
    main()
