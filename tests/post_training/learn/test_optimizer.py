import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wootz.models import lora
from wootz.models.families import llama
from wootz.models.params import init_params
from wootz.post_training.learn.optimizer import adamw, learning_rate_schedule


def applied_rates(schedule, updates):
  """The rate of each update as an optimizer applies it: plain descent on a gradient of 1."""
  optimizer = optax.sgd(schedule)
  params, rates = jnp.zeros(()), []
  state = optimizer.init(params)
  for _ in range(updates):
    change, state = optimizer.update(jnp.ones(()), state, params)
    rates.append(-float(change))
  return np.array(rates)


def test_op_3a_warm_up_has_all_its_steps():
  """OP-3 a: peak 1, warm-up 4."""
  rates = applied_rates(learning_rate_schedule("constant", peak=1.0, warmup_updates=4, total_updates=10), 6)
  np.testing.assert_allclose(rates, [0, 0.25, 0.5, 0.75, 1, 1], atol=1e-7)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_op_3b_without_warm_up_the_first_update_moves_by_the_peak(kind):
  """OP-3 b."""
  schedule = learning_rate_schedule(kind, peak=1e-3, warmup_updates=0, total_updates=1)
  np.testing.assert_allclose(applied_rates(schedule, 1), 1e-3, rtol=1e-6)


@pytest.mark.parametrize(("total", "warmup"), [(90, 9), (45, 4)])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_op_4_the_schedule_ends_with_the_run(total, warmup, kind):
  """OP-4: peak at the update that ends the warm-up, end value at the last update; update by update."""
  schedule = learning_rate_schedule(kind, peak=2.0, warmup_updates=warmup, total_updates=total,
                                    final_fraction=0.1)
  share = np.clip((np.arange(total) - warmup) / (total - 1 - warmup), 0, 1)
  decay = 1 - share if kind == "linear" else (1 + np.cos(np.pi * share)) / 2
  expected = 2.0 * np.minimum(np.arange(total) / warmup, 1) * (0.1 + 0.9 * decay)
  np.testing.assert_allclose(applied_rates(schedule, total), expected, atol=1e-5)


def test_bad_schedules_are_refused():
  with pytest.raises(ValueError, match="'cosin'.*constant, linear, cosine"):
    learning_rate_schedule("cosin", peak=1.0, warmup_updates=0, total_updates=3)
  with pytest.raises(ValueError, match="warm-up of 3 updates does not fit a run of 3"):
    learning_rate_schedule("linear", peak=1.0, warmup_updates=3, total_updates=3)
  with pytest.raises(ValueError, match="max_gradient_norm 0"):
    adamw(optax.constant_schedule(1.0), max_gradient_norm=0.0)


def test_op_1_bfloat16_parameters_do_not_break_adam():
  """OP-1: b2 = .999 is 1.0 in bfloat16; two steps on a gradient of 0.1 each move by about the rate."""
  optimizer = adamw(optax.constant_schedule(0.01), max_gradient_norm=1e9)
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  state = optimizer.init(params)
  for _ in range(2):
    change, state = optimizer.update({"w": jnp.full(3, 0.1, jnp.bfloat16)}, state, params)
    np.testing.assert_allclose(np.asarray(change["w"], np.float32), -0.01, rtol=0.02)
    params = optax.apply_updates(params, change)


def adamw_by_hand(weight, gradients, *, rate, b1, b2, eps, decay):
  """AdamW in float64, from its paper."""
  first = second = np.zeros_like(weight)
  for step, gradient in enumerate(gradients, 1):
    first = b1 * first + (1 - b1) * gradient
    second = b2 * second + (1 - b2) * gradient**2
    direction = first / (1 - b1**step) / (np.sqrt(second / (1 - b2**step)) + eps)
    weight = weight - rate * (direction + decay * weight)
  return weight


def test_adamw_equals_its_formula_and_clips_by_global_norm():
  """Norm weights are not decayed; two leaves of norm 3 and 4 are clipped together to norm 1."""
  constants = {"b1": 0.8, "b2": 0.95, "eps": 1e-3}
  optimizer = adamw(optax.constant_schedule(0.1), max_gradient_norm=1.0, weight_decay=0.5, **constants)
  start = {"layers": {"query": jnp.array([1.0, 2.0]), "mlp_norm": jnp.array([1.0, 2.0])}}
  gradient = {"layers": {"query": jnp.array([3.0, 0.0]), "mlp_norm": jnp.array([0.0, -4.0])}}
  params, state = start, optimizer.init(start)
  for scale in (1.0, 0.1):  # the second is within the norm and stays
    change, state = optimizer.update(jax.tree.map(lambda g, s=scale: s * g, gradient), state, params)
    params = optax.apply_updates(params, change)
  for name, decay in (("query", 0.5), ("mlp_norm", 0.0)):
    direction = np.asarray(gradient["layers"][name], np.float64)
    expected = adamw_by_hand(np.array([1.0, 2.0]), [direction / 5, direction * 0.1], rate=0.1, decay=decay,
                             **constants)
    np.testing.assert_allclose(params["layers"][name], expected, rtol=1e-5)


def test_decay_spares_every_norm_of_a_model_and_nothing_else(tiny_config, tiny_params):
  """With a gradient of zero only decay moves weights. Adapters decay too."""
  optimizer = adamw(optax.constant_schedule(0.1), max_gradient_norm=1.0, weight_decay=0.5)
  adapters = init_params(lora.lora_specs(llama.param_specs(tiny_config), rank=2), jax.random.key(0))
  for params in (tiny_params, adapters):
    flat = jax.tree.map(jnp.zeros_like, params)
    change, _ = jax.jit(optimizer.update)(flat, optimizer.init(params), params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(change):
      name = jax.tree_util.keystr(path)
      is_zero = name.endswith("['up']") and params is adapters  # begins at zero
      assert np.any(leaf) == ("norm" not in name and not is_zero), name
