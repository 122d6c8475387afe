"""Which request runs next, on which blocks: requests in, plans out, results in, outputs out. Free of torch."""

from inferplane.scheduler.errors import QueueFullError, RequestTooLargeError
from inferplane.scheduler.queue import FcfsPolicy, PriorityPolicy, SchedulerPolicy
from inferplane.scheduler.scheduler import Scheduler
from inferplane.scheduler.stats import SchedulerStats

__all__ = [
    "FcfsPolicy",
    "PriorityPolicy",
    "QueueFullError",
    "RequestTooLargeError",
    "Scheduler",
    "SchedulerPolicy",
    "SchedulerStats",
]
