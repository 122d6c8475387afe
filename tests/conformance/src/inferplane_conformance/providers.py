"""Which implementations of an op a platform has to answer for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from inferplane.plugins import Decision
    from inferplane_conformance.subject import Subject


def op_decision(subject: Subject, op: str, dtype: torch.dtype) -> Decision:
    """Who offered the op, who won, and why the others did not."""
    decisions = subject.plugins.op_decisions(subject.device, dtype)
    return next(each for each in decisions if each.subject == f"op {op}")


def op_implementations(subject: Subject, op: str, dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """By who brings them: the platform's own that support the type, and the one that won."""
    decision = op_decision(subject, op, dtype)
    own = [
        each for each in decision.candidates if each.reason is None and each.plugin == subject.device.platform
    ]
    return {each.name: each.implementation for each in (*own, decision.chosen)}
