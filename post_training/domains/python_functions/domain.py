"""The domain `python_functions`: write one short function, judged by hidden tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from wootz.data.records import Grade, Task
from wootz.post_training.domains.base import check_split
from wootz.post_training.domains.python_functions.grader import grade_completion
from wootz.post_training.domains.python_functions.tasks import DOMAIN, build_tasks
from wootz.post_training.sandbox import Sandbox


@dataclasses.dataclass(frozen=True)
class PythonFunctions:
  """See wootz.post_training.domains.base.Domain. Holds no state."""

  name: str = DOMAIN

  def tasks(self, split: str) -> Sequence[Task]:
    check_split(split)
    return build_tasks()[split]

  def check(self) -> None:
    with Sandbox():
      pass  # opening one raises SandboxUnavailable with the remedy

  def grade(self, task: Task, completion_text: str) -> Grade:
    return grade_completion(task, completion_text)
