import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wootz.models import attention, layers, transformer

# ---- an implementation of its own, in float64, one sequence, head by head ---------------------------

def reference_logits(params, config, tokens):
  """Logits [T, vocab] of a llama decoder, written from its description."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

  def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

  x = params["embedding"][np.asarray(tokens)]
  for number in range(config.num_layers):
    layer = {name: leaf[number] for name, leaf in params["layers"].items()}
    x = x + _reference_attention(norm(x, layer["attention_norm"]), layer, config)
    normed = norm(x, layer["mlp_norm"])
    gate = normed @ layer["gate"].T
    x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["up"].T)) @ layer["down"].T
  head = params["embedding"] if config.tie_embeddings else params["head"]
  return norm(x, params["final_norm"]) @ head.T


def _reference_attention(x, layer, config):
  length, half = len(x), config.head_dim // 2
  turns = np.exp(1j * np.outer(np.arange(length), config.rope_base ** (-np.arange(half) / half)))

  def rotated(vectors):
    turned = (vectors[:, :half] + 1j * vectors[:, half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=1)

  out = np.zeros_like(x)
  for head in range(config.num_heads):
    shared = head // (config.num_heads // config.num_kv_heads)
    query, key = rotated(x @ layer["query"][head].T), rotated(x @ layer["key"][shared].T)
    value = x @ layer["value"][shared].T
    for t in range(length):
      scores = key[:t + 1] @ query[t] / np.sqrt(config.head_dim)
      weights = np.exp(scores - scores.max())
      out[t] += layer["output"][:, head] @ (weights @ value[:t + 1] / weights.sum())
  return out


def make_tokens(batch, length, vocab=97, seed=1):
  return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("config", "compute_dtype", "remat"))
def full_logits(params, config, tokens, **kwargs):
  batch, width = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(width), (batch, width))
  mask = attention.causal_mask(jnp.full(batch, width), width)
  hidden, _ = transformer.forward(params, config, tokens, positions=positions, mask=mask, **kwargs)
  return transformer.unembed(params, hidden)


forward = jax.jit(transformer.forward, static_argnames="config")
unembed = jax.jit(transformer.unembed)


def empty_cache(config, batch, width, fill=0.0):
  keys = jnp.full((batch, config.num_kv_heads, config.head_dim, width), fill)
  return tuple((keys, keys.swapaxes(2, 3)) for _ in range(config.num_layers))


@pytest.mark.parametrize("facts", [{}, {"tie_embeddings": True, "rope_base": 500.0, "num_kv_heads": 4},
                                   {"num_layers": 3, "head_dim": 16, "num_kv_heads": 1, "norm_eps": 0.1}])
def test_logits_equal_an_independent_float64_forward(tiny_variant, facts):
  config, params = tiny_variant(**facts)
  tokens = make_tokens(2, 11)
  logits = full_logits(params, config, tokens)
  assert logits.dtype == jnp.float32
  for row in range(2):
    np.testing.assert_allclose(logits[row], reference_logits(params, config, tokens[row]), atol=2e-5)


def test_stacked_and_unstacked_layers_give_the_same(tiny_config, tiny_params, tiny_rollout_params):
  tokens = make_tokens(2, 9)
  np.testing.assert_allclose(full_logits(tiny_params, tiny_config, tokens),
                             full_logits(tiny_rollout_params, tiny_config, tokens), atol=1e-5)


def test_remat_changes_neither_value_nor_gradient(tiny_config, tiny_params):
  tokens = make_tokens(2, 7)

  def loss(params, remat):
    return jnp.mean(jnp.sin(full_logits(params, tiny_config, tokens, remat=remat)))

  both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  plain = both(tiny_params, "none")
  for remat in ("elementwise", "full"):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, both(tiny_params, remat))


def test_gradient_equals_finite_differences_of_the_reference(tiny_config, tiny_params):
  """Along a random direction, differences taken in float64."""
  tokens, weights = make_tokens(1, 6), np.random.default_rng(3).normal(size=(6, 97))
  rng = np.random.default_rng(5)
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tiny_params)
  direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)

  def shifted(step):
    moved = jax.tree.map(lambda leaf, d: leaf + step * d, params, direction)
    return np.sum(weights * reference_logits(moved, tiny_config, tokens[0]))

  @jax.jit
  @jax.grad
  def gradient_of(params):
    return jnp.sum(weights * full_logits(params, tiny_config, tokens)[0])

  gradient = gradient_of(tiny_params)
  along = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in
              zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
  expected = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
  assert along == pytest.approx(expected, rel=1e-4)


def test_cached_decode_token_by_token_equals_the_full_forward(tiny_config, tiny_rollout_params):
  """What an earlier text left in the cache does not matter either (the fill)."""
  tokens, width = make_tokens(2, 10), 16
  cache = empty_cache(tiny_config, 2, width, fill=7.0)
  logits = []
  for t in range(10):
    at = jnp.full((2, 1), t)
    hidden, cache = forward(tiny_rollout_params, tiny_config, tokens[:, t:t + 1], positions=at,
                            mask=attention.cache_mask(at, width), cache=cache)
    logits.append(unembed(tiny_rollout_params, hidden[:, 0]))
  np.testing.assert_allclose(np.stack(logits, 1), full_logits(tiny_rollout_params, tiny_config, tokens),
                             atol=1e-5)


def test_the_kept_keys_and_values_are_what_a_cache_is_filled_with(tiny_config, tiny_params,
                                                                    tiny_rollout_params):
  """From per-layer and from stacked weights."""
  tokens, positions = make_tokens(2, 6), jnp.broadcast_to(jnp.arange(6), (2, 6))
  mask = attention.causal_mask(jnp.full(2, 6), 6)
  _, filled = forward(tiny_rollout_params, tiny_config, tokens, positions=positions, mask=mask,
                      cache=empty_cache(tiny_config, 2, 6))
  keep = jax.jit(transformer.forward, static_argnames=("config", "keep"))
  _, kept = keep(tiny_rollout_params, tiny_config, tokens, positions=positions, mask=mask, keep=True)
  _, stacked = keep(tiny_params, tiny_config, tokens, positions=positions, mask=mask, keep=True)
  for layer in range(tiny_config.num_layers):
    for half in range(2):
      np.testing.assert_allclose(kept[layer][half], filled[layer][half], atol=1e-6)
      np.testing.assert_allclose(stacked[half][layer], filled[layer][half], atol=1e-6)


def test_padded_prefill_then_decode_equals_each_row_alone(tiny_config, tiny_params, tiny_rollout_params):
  """Rows of unlike lengths, padded with real ids; their next tokens follow at once."""
  tokens, lengths, width = make_tokens(3, 9), np.array([9, 1, 4]), 16
  cache = empty_cache(tiny_config, 3, width)
  positions = jnp.broadcast_to(jnp.arange(9), (3, 9))
  mask = jnp.pad(attention.causal_mask(jnp.asarray(lengths), 9), ((0, 0), (0, 0), (0, width - 9)))
  hidden, cache = forward(tiny_rollout_params, tiny_config, tokens, positions=positions, mask=mask,
                          cache=cache)
  prefilled = unembed(tiny_rollout_params, hidden)
  more = make_tokens(3, 3, seed=2)
  decoded = []
  for t in range(3):
    at = jnp.asarray(lengths + t)[:, None]
    hidden, cache = forward(tiny_rollout_params, tiny_config, more[:, t:t + 1], positions=at,
                            mask=attention.cache_mask(at, width), cache=cache)
    decoded.append(unembed(tiny_rollout_params, hidden[:, 0]))
  for row, length in enumerate(lengths):
    text = np.concatenate([tokens[row, :length], more[row]])
    expected = reference_logits(tiny_params, tiny_config, text)
    np.testing.assert_allclose(prefilled[row, :length], expected[:length], atol=2e-5)
    np.testing.assert_allclose(np.stack(decoded)[:, row], expected[length:], atol=2e-5)


def test_positions_outside_the_cache_are_not_written(tiny_config, tiny_rollout_params):
  """SV-6: neither behind the last place nor, by wrapping around, before the first."""
  width = 4
  cache = empty_cache(tiny_config, 3, width, fill=5.0)
  positions = jnp.array([[-1, 0], [4, 3], [100, -5]])
  _, written = forward(
    tiny_rollout_params, tiny_config, make_tokens(3, 2), positions=positions,
    mask=attention.cache_mask(positions, width), cache=cache)
  for layer in written:
    for part, others in zip(layer, ((1, 2), (1, 3)), strict=True):
      touched = np.any(np.asarray(part) != 5.0, axis=others)
      np.testing.assert_array_equal(touched, [[True, False, False, False], [False, False, False, True],
                                              [False] * 4])


def test_rows_that_see_nothing_are_finite_in_value_and_gradient(tiny_config, tiny_params):
  tokens, mask = make_tokens(1, 5), jnp.zeros((1, 5, 5), bool)

  def loss(params):
    hidden, _ = transformer.forward(params, tiny_config, tokens, positions=jnp.zeros((1, 5), jnp.int32),
                                    mask=mask)
    return jnp.sum(transformer.unembed(params, hidden) ** 2)

  value, gradient = jax.jit(jax.value_and_grad(loss))(tiny_params)
  assert np.isfinite(value)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_packed_mask_by_hand():
  """One prompt of 2 with completions of 1 and 2, then padding."""
  mask = attention.packed_mask(jnp.array([[1, 1, 1, 1, 1, 0]]), jnp.array([[0, 0, 1, 2, 2, 0]]))
  expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0],
              [1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]
  np.testing.assert_array_equal(mask[0], np.array(expected, bool))


def test_packed_shared_prompt_equals_separate_rows(tiny_config, tiny_params):
  """Two completions behind one copy of their prompt: same logits, and the same gradient."""
  prompt, first, second = make_tokens(3, 4)
  packed = np.concatenate([prompt, first, second, [0, 0]])[None]
  positions = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 0]])
  segments = np.array([[1] * 12 + [0, 0]])
  branches = np.array([[0] * 4 + [1] * 4 + [2] * 4 + [0, 0]])
  apart = np.stack([np.concatenate([prompt, first]), np.concatenate([prompt, second])])

  def shared(params):  # [2, 4, vocab]
    hidden, _ = transformer.forward(params, tiny_config, packed, positions=positions,
                                    mask=attention.packed_mask(segments, branches))
    return transformer.unembed(params, hidden)[0, 4:12].reshape(2, 4, -1)

  def separate(params):
    return full_logits(params, tiny_config, apart)[:, 4:]

  def gradient_and_logits(run):
    def loss(params):
      logits = run(params)
      return jnp.mean(jax.nn.log_softmax(logits)[..., 5]), logits
    return jax.jit(jax.grad(loss, has_aux=True))(tiny_params)

  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
               gradient_and_logits(shared), gradient_and_logits(separate))


@pytest.mark.parametrize("position", [0, 1, 100, 1000, 8191, 32768])
def test_rotary_phases_keep_their_accuracy_far_out(position):
  """PK-3: against float64; base 10^4, head size 128."""
  cos, sin = layers.rotary_angles(jnp.array([[position]]), 128, 1e4)
  phases = position * 1e4 ** (-np.arange(64) / 64.0)
  # float32 holds a phase of 32768 to 0.002: no float32 implementation does better out there.
  tolerance = 1e-3 if position < 10_000 else 4e-3
  np.testing.assert_allclose(cos[0, 0], np.cos(phases), atol=tolerance)
  np.testing.assert_allclose(sin[0, 0], np.sin(phases), atol=tolerance)


def test_bfloat16_activations_stay_near_float32(tiny_config, tiny_params):
  tokens = make_tokens(2, 12)
  exact = full_logits(tiny_params, tiny_config, tokens)
  rough = full_logits(tiny_params, tiny_config, tokens, compute_dtype=jnp.bfloat16)
  assert rough.dtype == jnp.float32
  difference = np.abs(np.asarray(rough - exact))
  assert 0 < difference.max() < 0.05 * np.abs(exact).max()


def test_a_cache_with_stacked_layers_is_refused(tiny_config, tiny_params):
  with pytest.raises(ValueError, match="unstack_layers"):
    transformer.forward(tiny_params, tiny_config, make_tokens(1, 1), positions=jnp.zeros((1, 1), jnp.int32),
                        mask=jnp.ones((1, 1, 4), bool), cache=empty_cache(tiny_config, 1, 4))
