"""Tiny models that the tests of several folders share."""

import dataclasses
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

from wootz.data.records import Grade, Outcome, Trajectory
from wootz.models import transformer
from wootz.models.config import ModelConfig
from wootz.models.families import llama
from wootz.models.params import init_params

_CONFIG = ModelConfig(
  family="llama", vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
  intermediate_size=48, rope_base=10000.0, norm_eps=1e-5, max_positions=128, tie_embeddings=False)


def _init(config, seed=0):
  """Random parameters, norm weights included: ones would hide a norm that is left out."""
  # Under jit: one compilation instead of one for every shape.
  params = jax.jit(lambda key: init_params(llama.param_specs(config), key))(jax.random.key(seed))
  rng = np.random.default_rng(seed)

  def shake(path, leaf):
    if "norm" not in jax.tree_util.keystr(path):
      return leaf
    return leaf * rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(shake, params)


@pytest.fixture(scope="session")
def tiny_config():
  return _CONFIG


@pytest.fixture(scope="session")
def tiny_variant():
  """(config, stacked parameters) of the tiny model with other facts."""
  def make(seed=0, **facts):
    config = dataclasses.replace(_CONFIG, **facts)
    return config, _init(config, seed)
  return make


@pytest.fixture(scope="session")
def tiny_params():
  """float32, layers stacked: the learner's layout."""
  return _init(_CONFIG)


@pytest.fixture(scope="session")
def tiny_rollout_params(tiny_params):
  """The same in the sampler's layout."""
  return transformer.unstack_layers(tiny_params)


def _trajectory(prompt, completion, logprobs=None, *, task_id="a", sample_index=0, score=0.5, update=0,
                domain="d", temperature=1.0):
  """A trajectory of one turn; a score of None is a grade lost to the infrastructure."""
  prompt, completion = np.asarray(prompt, np.int32), np.asarray(completion, np.int32)
  logprobs = np.full(len(completion), -1.0) if logprobs is None else logprobs
  if score is None:
    grade = Grade(Outcome.INFRA_LOST, None)
  else:
    grade = Grade(Outcome.PARTIAL, score)
  return Trajectory(
    task_id=task_id, domain=domain, family="f", update=update, weight_version=update,
    sample_index=sample_index, prompt_length=len(prompt), tokens=np.concatenate([prompt, completion]),
    loss_mask=np.arange(len(prompt) + len(completion)) >= len(prompt),
    behavior_logprobs=np.concatenate([np.zeros(len(prompt)), logprobs]).astype(np.float32),
    temperature=temperature, finish_reason="length", text="", grade=grade)


@pytest.fixture(scope="session")
def tiny_trajectory():
  return _trajectory
