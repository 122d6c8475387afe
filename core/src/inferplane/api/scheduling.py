"""The order of waiting requests, for plugins that bring one through the ``scheduler_policies`` hook."""

from inferplane.request import EngineRequest, SamplingParams
from inferplane.scheduler import SchedulerPolicy

__all__ = ["EngineRequest", "SamplingParams", "SchedulerPolicy"]
