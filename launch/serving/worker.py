"""The server's one thread that owns the model: takes all waiting requests into one batch, and again."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

from absl import logging

from wootz.post_training.rollout.collect import Generate
from wootz.post_training.rollout.engine import Request, Sample

# Told a sample as it ends; None when there is nothing more; an exception when the batch broke.
Listener = Callable[[Sample | Exception | None], None]


class QueueFull(RuntimeError):
  """As many requests are waiting as the server holds; to be tried again later."""


@dataclasses.dataclass
class Job:
  """What one HTTP request asks of the engine. Ids of its requests are unique within it."""

  requests: Sequence[Request]
  listener: Listener  # called in the worker's thread
  cancelled: bool = False  # set by whoever no longer listens


class Worker:
  """Batches what waits and runs it on the engine.

  The engine takes no newcomers into a batch that runs, so a request waits for the batch before it to end.
  A sample depends on its own seed and settings only, so batching changes no answer.

  Args:
    generate: the engine with its weights.
    max_waiting: jobs that may wait; more raise QueueFull.
  """

  def __init__(self, generate: Generate, *, max_waiting: int = 256) -> None:
    self._generate = generate
    self._waiting: queue.Queue[Job | None] = queue.Queue(max_waiting)
    self._thread = threading.Thread(target=self._run, name="wootz-engine", daemon=True)
    self._thread.start()

  @property
  def alive(self) -> bool:
    return self._thread.is_alive()

  def submit(self, job: Job) -> None:
    """Puts a job in line. Raises QueueFull."""
    try:
      self._waiting.put_nowait(job)
    except queue.Full:
      raise QueueFull(f"{self._waiting.maxsize} requests are waiting: try again later") from None

  def close(self) -> None:
    """Lets the batches that wait end, then the thread."""
    self._waiting.put(None)
    self._thread.join()

  def _run(self) -> None:
    while (first := self._waiting.get()) is not None:
      jobs, last = [first], False
      while not last and not self._waiting.empty():
        job = self._waiting.get_nowait()
        last = job is None
        jobs += [] if job is None else [job]
      self._run_batch([job for job in jobs if not job.cancelled])
      if last:
        return

  def _run_batch(self, jobs: Sequence[Job]) -> None:
    """One engine call for all jobs. What breaks in it is told to each of them; the worker lives on."""
    owners, requests = {}, []
    for number, job in enumerate(jobs):
      for request in job.requests:
        name = f"{number}/{request.id}"
        owners[name] = job, request.id
        requests.append(dataclasses.replace(request, id=name))
    try:
      for sample in self._generate(requests):
        job, own_id = owners[sample.request_id]
        job.listener(dataclasses.replace(sample, request_id=own_id))
        if all(job.cancelled for job in jobs):
          break  # nobody listens: leave the rest of the batch
      result = None
    except Exception as error:  # whatever it is, those who wait must hear of it
      logging.exception("a batch of %d requests broke", len(requests))
      result = error
    for job in jobs:
      job.listener(result)
