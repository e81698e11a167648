import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wootz.models import attention, layers, lora, transformer
from wootz.models.families import llama
from wootz.models.params import init_params

TOKENS = np.random.default_rng(1).integers(0, 97, (2, 8)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="config")
def logits(params, config):
  positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
  hidden, _ = transformer.forward(params, config, TOKENS, positions=positions,
                                  mask=attention.causal_mask(jnp.array([8, 8]), 8))
  return transformer.unembed(params, hidden)


def make_adapters(config, *, random_up, targets=lora.TARGETS, rank=3):
  specs = lora.lora_specs(llama.param_specs(config), rank=rank, targets=targets)
  adapters = jax.jit(lambda key: init_params(specs, key))(jax.random.key(7))
  if random_up:
    rng = np.random.default_rng(2)
    for weights in adapters.values():
      weights["up"] = jnp.asarray(rng.normal(size=weights["up"].shape) * 0.1, jnp.float32)
  return adapters


def test_fresh_adapters_change_nothing(tiny_config, tiny_params):
  adapters = make_adapters(tiny_config, random_up=False)
  assert all(np.any(weights["down"] != 0) for weights in adapters.values())
  for join in (lora.attach, lora.merge):
    np.testing.assert_array_equal(logits(join(tiny_params, adapters, alpha=6.0), tiny_config),
                                  logits(tiny_params, tiny_config))


@pytest.mark.parametrize("targets", [lora.TARGETS, ("query",), ("output", "down")])
def test_attached_equals_merged(tiny_config, tiny_params, targets):
  adapters = make_adapters(tiny_config, random_up=True, targets=targets)
  attached = logits(lora.attach(tiny_params, adapters, alpha=6.0), tiny_config)
  np.testing.assert_allclose(attached, logits(lora.merge(tiny_params, adapters, alpha=6.0), tiny_config),
                             atol=2e-5)
  assert np.abs(attached - logits(tiny_params, tiny_config)).max() > 1e-2


def test_merged_weights_by_hand():
  """W + alpha / rank * up down with rank 2, alpha 4; the "output" weight is [hidden, heads, head_dim]."""
  params = {"layers": {"output": jnp.zeros((1, 2, 2, 2))}}
  adapters = {"output": {"down": jnp.array([[[1.0, 2, 3, 4], [0, 1, 0, 1]]]),
                         "up": jnp.array([[[1.0, 0], [1, -1]]])}}
  merged = lora.merge(params, adapters, alpha=4.0)["layers"]["output"]
  np.testing.assert_allclose(merged[0], [[[2, 4], [6, 8]], [[2, 2], [6, 6]]])


def test_only_adapters_get_a_gradient(tiny_config, tiny_params):
  adapters = make_adapters(tiny_config, random_up=True)

  def loss(params, adapters):
    return jnp.mean(jnp.sin(logits(lora.attach(params, adapters, alpha=6.0), tiny_config)))

  base, trained = jax.jit(jax.grad(loss, argnums=(0, 1)))(tiny_params, adapters)
  for name in lora.TARGETS:
    assert not np.any(base["layers"][name]), name
    assert np.any(trained[name]["down"]) and np.any(trained[name]["up"]), name


def test_gradient_equals_finite_differences():
  """d sum(w * linear(x)) / d up, in closed form: scale * outer(sum_t w_t, down x_t)."""
  rng = np.random.default_rng(4)
  x, weights = rng.normal(size=(5, 6)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
  base, down, up = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 6), (2, 6), (4, 2)))

  def loss(down, up):
    return jnp.sum(weights * layers.linear(x, layers.LoraWeight(base, down, up, scale=1.5)))

  expected = 1.5 * weights.T @ (x @ down.T), 1.5 * (weights @ up).T @ x
  got_down, got_up = jax.grad(loss, argnums=(0, 1))(down, up)
  np.testing.assert_allclose(got_up, expected[0], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(got_down, expected[1], rtol=1e-4, atol=1e-5)
  step = 1e-2
  nudge = np.zeros_like(up)
  nudge[1, 0] = step
  slope = (loss(down, up + nudge) - loss(down, up - nudge)) / (2 * step)
  assert float(got_up[1, 0]) == pytest.approx(float(slope), rel=1e-2)


def test_unknown_targets_and_ranks_are_refused(tiny_config):
  specs = llama.param_specs(tiny_config)
  with pytest.raises(ValueError, match=r"\['qury'\].*query"):
    lora.lora_specs(specs, rank=2, targets=("key", "qury"))
  with pytest.raises(ValueError, match="attention_norm"):
    lora.lora_specs(specs, rank=2, targets=("attention_norm",))
  with pytest.raises(ValueError, match="rank 0"):
    lora.lora_specs(specs, rank=0)
