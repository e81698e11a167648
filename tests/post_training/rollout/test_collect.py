import threading
import time
from collections import Counter

import numpy as np
import pytest

from wootz.data import chat, tokenizer
from wootz.data.records import Grade, Outcome, Task
from wootz.models import transformer
from wootz.post_training.rollout import collect as collecting
from wootz.post_training.rollout import engine
from wootz.post_training.rollout.collect import Sampling
from wootz.post_training.rollout.engine import Sample
from wootz.post_training.sandbox import SandboxUnavailable

END = 256
TEMPLATE = ("{% for message in messages %}{{ message['content'] + '<end>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<turn>' }}{% endif %}")


@pytest.fixture(scope="module")
def byte_tokenizer():
  """One token per byte, then an end and a turn token."""
  return tokenizer.from_gguf_metadata({
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": [],
    "tokenizer.ggml.tokens": [*tokenizer._byte_alphabet(), "<end>", "<turn>"],
    "tokenizer.ggml.token_type": [1] * 256 + [3, 3], "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE})


class Letters:
  """Score: the share of characters below "n". Graders of some tasks break, for a while or for good."""

  name = "letters"

  def __init__(self):
    self.tries = Counter()
    self.lock = threading.Lock()

  def grade(self, task, text):
    with self.lock:
      self.tries[task.id, text] += 1
      tries = self.tries[task.id, text]
    if task.payload.get("raises"):
      raise RuntimeError("grader out of order")
    if tries <= task.payload.get("lost", 0):
      return Grade(Outcome.INFRA_LOST, None, "machine gone")
    score = sum(char < "n" for char in text) / max(len(text), 1)
    return Grade(Outcome.SOLVED if score == 1 else Outcome.PARTIAL, score)


def make_task(id, **payload):
  return Task(id, "letters", "f", "train", ({"role": "user", "content": f"write {id}"},), payload)


TASKS = [make_task("z"), make_task("a"), make_task("m")]
KINDS = [Sampling(3, 1.0, 12), Sampling(1, 0.0, 5)]


@pytest.fixture(scope="module")
def generate(tiny_variant):
  config, params = tiny_variant(vocab_size=258)
  params = transformer.unstack_layers(params)
  return lambda requests: engine.generate(params, config, requests, num_slots=8,
                                          decode_text=lambda ids: "".join(map(chr, ids)))


def collect(generate, byte_tokenizer, tasks=TASKS, kinds=KINDS, *, domain=None, seed=0, update=4, **kwargs):
  return collecting.collect(generate, tasks, domain=domain or Letters(), tokenizer=byte_tokenizer,
                            kinds=lambda task: kinds, seed=seed, update=update, weight_version=9, **kwargs)[0]


def test_trajectories_come_in_order_with_true_contents(generate, byte_tokenizer):
  """By task as given, then sample index through the kinds; ids as fed and sampled, never encoded again."""
  seen = []
  found = collect(generate, byte_tokenizer, on_grade=seen.append)
  assert [(t.task_id, t.sample_index) for t in found] == [(id, i) for id in "zam" for i in range(4)]
  assert sorted(map(id, seen)) == sorted(map(id, found))
  for t in found:
    prompt = chat.render_chat(byte_tokenizer, [{"role": "user", "content": f"write {t.task_id}"}])
    assert t.tokens[:t.prompt_length].tolist() == prompt
    assert t.temperature == (0.0 if t.sample_index == 3 else 1.0)
    completion = t.tokens[t.prompt_length:]
    assert len(completion) <= (5 if t.sample_index == 3 else 12)
    assert (completion[-1] == END) == (t.finish_reason == "stop")
    np.testing.assert_array_equal(t.loss_mask, np.arange(len(t.tokens)) >= len(prompt))
    assert not t.behavior_logprobs[:t.prompt_length].any()
    assert np.all((t.behavior_logprobs < 0) == (t.loss_mask & (t.temperature > 0)))
    assert t.text == byte_tokenizer.decode(completion, skip_control=True)
    assert t.grade.score == pytest.approx(sum(c < "n" for c in t.text) / max(len(t.text), 1))
    assert (t.domain, t.family, t.update, t.weight_version) == ("letters", "f", 4, 9)
    assert t.group == f"4/letters/{t.task_id}"


def test_samples_depend_on_seed_update_task_and_index(generate, byte_tokenizer):
  """Equal again for the same four, whoever else is drawn; different where one of them differs."""
  drawn = lambda found: {(t.task_id, t.sample_index): tuple(t.tokens[t.prompt_length:])  # noqa: E731
                         for t in found if t.temperature > 0}
  first = drawn(collect(generate, byte_tokenizer))
  assert len(set(first.values())) == len(first) == 9
  assert drawn(collect(generate, byte_tokenizer)) == first
  alone = drawn(collect(generate, byte_tokenizer, tasks=TASKS[1:2]))
  assert alone == {key: value for key, value in first.items() if key[0] == "a"}
  for changed in (collect(generate, byte_tokenizer, seed=1), collect(generate, byte_tokenizer, update=5)):
    assert not set(drawn(changed).values()) & set(first.values())


def test_tasks_with_equal_prompts_have_seeds_of_their_own(byte_tokenizer):
  tasks = [Task(id, "letters", "f", "train", TASKS[0].messages, {}) for id in ("one", "two")]
  asked = []

  def record(requests):
    asked.extend(requests)
    return iter(())

  collect(record, byte_tokenizer, tasks=tasks)
  assert [(r.first_sample, r.num_samples) for r in asked] == [(0, 3), (3, 1)] * 2
  assert asked[0].seed == asked[1].seed != asked[2].seed == asked[3].seed
  assert all(r.stop_ids == (END,) for r in asked)


def test_kinds_share_one_prefill_of_the_prompt(generate, byte_tokenizer, monkeypatch):
  prompts, real = [], engine.device.prefill

  def spy(params, tokens, positions, segment_ids, **kwargs):
    prompts.extend(range(segment_ids.max()))
    return real(params, tokens, positions, segment_ids, **kwargs)

  monkeypatch.setattr(engine.device, "prefill", spy)
  collect(generate, byte_tokenizer)
  assert len(prompts) == len(TASKS)


@pytest.mark.parametrize(("lost", "tries", "outcome"), [
  (0, 1, Outcome.PARTIAL), (2, 3, Outcome.PARTIAL), (3, 3, Outcome.INFRA_LOST), (99, 3, Outcome.INFRA_LOST)])
def test_lost_grades_are_tried_three_times(lost, tries, outcome):
  domain, task = Letters(), make_task("x", lost=lost)
  grade = collecting.grade_with_retries(domain, task, "az")
  assert grade.outcome == outcome
  assert grade.score == (0.5 if outcome.has_score else None)
  assert domain.tries[task.id, "az"] == tries


def test_a_grader_that_breaks_is_never_a_zero(generate, byte_tokenizer):
  """Its samples are unscorable, at the first try; the other tasks keep their grades."""
  domain = Letters()
  tasks = [make_task("bad", raises=True), make_task("good"), make_task("gone", lost=99)]
  found = collect(generate, byte_tokenizer, tasks=tasks, kinds=KINDS[:1], domain=domain)
  outcomes = {task.id: {t.grade.outcome for t in found if t.task_id == task.id} for task in tasks}
  assert outcomes["bad"] == {Outcome.UNSCORABLE}
  assert outcomes["gone"] == {Outcome.INFRA_LOST}
  assert outcomes["good"] <= {Outcome.PARTIAL, Outcome.SOLVED}
  assert all(t.grade.score is None for t in found if t.task_id != "good")
  assert "RuntimeError: grader out of order" in found[0].grade.reason
  assert {domain.tries[key] for key in domain.tries if key[0] == "bad"} == {1}


def test_the_grader_reads_neither_control_tokens_nor_what_follows_a_stop_string(byte_tokenizer):
  """LM-2: the record keeps every sampled id all the same."""
  ids = np.array([*byte_tokenizer.encode("ab##cd"), END], np.int32)
  logprobs = np.full(len(ids), -1, np.float32)

  def answer(requests):
    for r in requests:
      stop = "##" if r.stop_strings else None
      yield Sample(r.id, r.first_sample, ids, logprobs, "stop", stop)

  kinds = [Sampling(1, 1.0, 9, stop_strings=("##",)), Sampling(1, 1.0, 9)]
  found = collect(answer, byte_tokenizer, tasks=TASKS[:1], kinds=kinds)
  assert [t.text for t in found] == ["ab", "ab##cd"]
  for t in found:
    assert t.tokens[t.prompt_length:].tolist() == ids.tolist()
    assert t.loss_mask.sum() == len(ids)


def test_what_on_grade_raises_ends_the_rollout(generate, byte_tokenizer):
  def full_disk(trajectory):
    raise OSError("disk full")

  with pytest.raises(OSError, match="disk full"):
    collect(generate, byte_tokenizer, tasks=TASKS[:1], on_grade=full_disk)


def test_a_machine_that_cannot_grade_ends_the_rollout(generate, byte_tokenizer):
  """A missing sandbox is no grade at all: it must not become an unscored sample."""
  class Broken(Letters):
    def grade(self, task, text):
      raise SandboxUnavailable("install bubblewrap")

  with pytest.raises(SandboxUnavailable, match="install bubblewrap"):
    collect(generate, byte_tokenizer, domain=Broken())


def test_what_ends_a_rollout_does_not_wait_for_queued_grades(generate, byte_tokenizer):
  """LA-2: a stop must not be held up by grades that nobody will read."""
  class Slow(Letters):
    def grade(self, task, text):
      time.sleep(0.3)
      return super().grade(task, text)

  def stop(trajectory):
    raise KeyboardInterrupt

  domain = Slow()
  with pytest.raises(KeyboardInterrupt):
    collect(generate, byte_tokenizer, domain=domain, on_grade=stop)
  assert sum(domain.tries.values()) < len(TASKS) * 4
