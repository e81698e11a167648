import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wootz.data import packing
from wootz.models import attention, transformer
from wootz.post_training.learn.logprobs import target_logprobs, token_logprobs


@pytest.mark.parametrize("chunk", [1, 3, 7, 128])
def test_chunks_change_neither_value_nor_gradient(chunk):
  """Against plain log_softmax over everything at once; 7 tokens, so that the last chunk is short."""
  rng = np.random.default_rng(0)
  params = {"embedding": jnp.asarray(rng.normal(size=(11, 5)), jnp.float32)}
  hidden = jnp.asarray(rng.normal(size=(2, 7, 5)), jnp.float32)
  targets = rng.integers(0, 11, (2, 7))
  weights = rng.normal(size=(2, 7)).astype(np.float32)

  def plain(params, hidden):
    logprobs = jax.nn.log_softmax(hidden @ params["embedding"].T / 0.7)
    chosen = jnp.sum(jax.nn.one_hot(targets, 11) * logprobs, axis=-1)
    return jnp.sum(weights * chosen), (chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1))

  def chunked(params, hidden):
    chosen, entropy = token_logprobs(params, hidden, targets, jnp.ones(targets.shape, bool), temperature=0.7,
                                     chunk=chunk)
    # The entropies must carry no gradient, whatever is done with them.
    return jnp.sum(weights * chosen) + 0 * jnp.sum(entropy), (chosen, entropy)

  results = [jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(params, hidden)
             for run in (plain, chunked)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


def test_entropies_carry_no_gradient():
  params, hidden = {"embedding": jnp.eye(4)}, jnp.ones((1, 3, 4)) * jnp.arange(4)
  targets, mask = jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool)
  gradient = jax.grad(lambda h: jnp.sum(token_logprobs(params, h, targets, mask)[1]))(hidden)
  assert not np.any(gradient)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_targets_are_scored_at_their_predecessors(tiny_config, tiny_params, tiny_trajectory, share_prompt):
  """LM-1: the first answer token is scored from the prompt's last, in packed rows as in plain ones."""
  rng = np.random.default_rng(2)
  groups, texts = [], []
  for number, (prompt_length, lengths) in enumerate([(3, (4, 1, 6)), (1, (2, 5))]):
    prompt = rng.integers(0, 97, prompt_length)
    completions = [rng.integers(0, 97, length) for length in lengths]
    groups.append([(tiny_trajectory(prompt, c, task_id=str(number), sample_index=i), 1.0)
                   for i, c in enumerate(completions)])
    texts += [(prompt, c) for c in completions]
  rows = packing.pack_groups(groups, row_length=20, share_prompt=share_prompt)
  logprobs, _ = jax.jit(lambda params, rows: target_logprobs(params, tiny_config, rows, temperature=0.9))(
    tiny_params, rows)
  assert np.isfinite(logprobs).all()
  sequence = np.take_along_axis(rows.sequence_ids, rows.target_index, axis=1)

  @jax.jit
  def plain(tokens):
    hidden, _ = transformer.forward(tiny_params, tiny_config, tokens, positions=jnp.arange(9)[None],
                                    mask=attention.causal_mask(jnp.array([9]), 9))
    return jax.nn.log_softmax(transformer.unembed(tiny_params, hidden)[0] / 0.9)

  for id, (prompt, completion) in enumerate(texts, 1):
    text = np.concatenate([prompt, completion])
    expected = np.asarray(plain(np.pad(text, (0, 9 - len(text)))[None]))
    places = np.arange(len(prompt), len(text))
    np.testing.assert_allclose(np.asarray(logprobs)[(sequence == id) & rows.target_mask],
                               expected[places - 1, text[places]], atol=1e-5)


def test_chunks_without_targets_are_skipped_and_change_nothing():
  """Also OP (maxtext#4959): the gradient of 2 loss is twice the gradient."""
  rng = np.random.default_rng(2)
  params = {"embedding": jnp.asarray(rng.normal(size=(11, 5)), jnp.float32)}
  hidden = jnp.asarray(rng.normal(size=(1, 8, 5)), jnp.float32)
  targets, mask = rng.integers(0, 11, (1, 8)), np.arange(8)[None] < 3

  def loss(hidden, targets, mask, scale):
    return scale * jnp.sum(jnp.where(mask, token_logprobs(params, hidden, targets, mask, chunk=2)[0], 0.0))

  value, gradient = jax.value_and_grad(loss)(hidden, targets, mask, 1.0)
  short, short_gradient = jax.value_and_grad(loss)(hidden[:, :3], targets[:, :3], mask[:, :3], 1.0)
  np.testing.assert_allclose(value, short, rtol=1e-6)
  np.testing.assert_allclose(gradient[:, :3], short_gradient, rtol=1e-5)
  assert not np.any(gradient[:, 3:])
  np.testing.assert_allclose(jax.grad(loss)(hidden, targets, mask, 2.0), 2 * gradient, rtol=1e-6)
