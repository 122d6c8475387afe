"""Executors: where the ranks of a model live, and how plans reach them. Importing this does not import torch."""

from inferplane.executor.base import Executor, WorkerDiedError, make_executor

__all__ = ["Executor", "WorkerDiedError", "make_executor"]
