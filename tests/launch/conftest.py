"""A tiny model whose behaviour is known by hand, written as a GGUF file.

Its vocabulary has one token that spells the reference solutions of a few tasks, SOLUTION, and its
weights make a Markov chain of it: after the prompt it says SOLUTION with probability 3/4 at temperature
1, else the end token; after SOLUTION it always ends. So greedily it solves each of those tasks, at
temperature 1 it solves three samples of four, and an answer is one or two tokens long.
"""

import math

import gguf
import numpy as np
import pytest

from wootz.data.records import Grade, Outcome, Trajectory
from wootz.launch import config as config_lib
from wootz.launch.rollout import draw_tasks
from wootz.post_training.domains.base import get_domain

HIDDEN, HEADS, HEAD_DIM, INNER = 16, 2, 8, 16
WINDOW = 256  # tokens
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
TEMPLATE = ("{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")


def byte_words():
  """GPT-2's printable spelling of the 256 bytes."""
  plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in plain]
  return [chr(byte) for byte in plain] + [chr(0x100 + place) for place in range(len(others))]


def write_model(path, solution):
  """The tiny model that says `solution`; returns `path`."""
  words = [*byte_words(), "ab", "<|start|>", "<|end|>", solution]
  kinds = [NORMAL] * 257 + [CONTROL, CONTROL, USER_DEFINED]
  start, end, says = 257, 258, 259
  embedding, head = np.zeros((260, HIDDEN), np.float32), np.zeros((260, HIDDEN), np.float32)
  embedding[:, 0], embedding[says] = 1, np.eye(HIDDEN)[1]
  # After the norm a unit vector has the length sqrt(HIDDEN); logits: others 0, in nats.
  logits_prompt, logits_solution = np.zeros(260), np.zeros(260)
  logits_prompt[says], logits_prompt[end], logits_solution[end] = 30 + math.log(3), 30, 30
  head[:, 0], head[:, 1] = logits_prompt / math.sqrt(HIDDEN), logits_solution / math.sqrt(HIDDEN)
  shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER)}
  tensors = {"token_embd.weight": embedding, "output.weight": head,
             "output_norm.weight": np.ones(HIDDEN, np.float32),
             "blk.0.attn_norm.weight": np.ones(HIDDEN, np.float32),
             "blk.0.ffn_norm.weight": np.ones(HIDDEN, np.float32),
             **{f"blk.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}}
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_context_length(WINDOW)
  writer.add_embedding_length(HIDDEN)
  writer.add_block_count(1)
  writer.add_feed_forward_length(INNER)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(HEADS)
  writer.add_rope_dimension_count(HEAD_DIM)
  writer.add_layer_norm_rms_eps(1e-12)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("gpt-2")
  writer.add_token_list(words)
  writer.add_token_types(kinds)
  writer.add_token_merges(["a b"])
  writer.add_bos_token_id(start)
  writer.add_eos_token_id(end)
  writer.add_chat_template(TEMPLATE)
  for name, tensor in tensors.items():
    writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture(scope="session")
def graded_sample():
  """Makes a graded trajectory of `tokens` sampled tokens behind a prompt of one."""
  def make(task, sample, outcome, score, *, tokens=3, finish="stop"):
    count = tokens + 1
    return Trajectory(
      task_id=task, domain="d", family=task.split("/")[0], update=0, weight_version=0, sample_index=sample,
      prompt_length=1, tokens=np.zeros(count, np.int32), loss_mask=np.arange(count) > 0,
      behavior_logprobs=np.zeros(count, np.float32), temperature=1.0, finish_reason=finish, text="",
      grade=Grade(Outcome(outcome), score))
  return make


@pytest.fixture(scope="session")
def tiny_launch_config():
  """Two training tasks of eight samples; two held-out tasks and one of an unseen family."""
  return config_lib.Config(
    rollout=config_lib.RolloutSection(tasks_per_update=2, samples_per_task=8, max_new_tokens=8, slots=8),
    evaluation=config_lib.EvaluationSection(
      held_out_tasks=2, unseen_tasks=1, samples_per_task=2, pass_at=(1, 2), max_new_tokens=8),
    learner=config_lib.LearnerSection(row_length=256))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, tiny_launch_config):
  """Path of the model that can solve all tasks of `tiny_launch_config`."""
  domain = get_domain("python_functions")
  tasks = [*draw_tasks(tiny_launch_config, 2), *domain.tasks("held_out")[:2],
           *domain.tasks("unseen_family")[:1]]
  assert len({task.payload["function"] for task in tasks}) == len(tasks)  # or one would hide another
  return str(write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf",
                         "\n".join(task.payload["reference"] for task in tasks)))
