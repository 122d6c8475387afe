"""What a worker is told and what it answers, for plugins that bring a `Worker` of their own."""

from inferplane.plan import NewRequest, StepPlan, StepResult
from inferplane.request import PositionLogprobs, SamplingParams, TokenLogprob

__all__ = ["NewRequest", "PositionLogprobs", "SamplingParams", "StepPlan", "StepResult", "TokenLogprob"]
