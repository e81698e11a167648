"""Building blocks shared by every family: linear maps, norms, rotary positions, the gated MLP."""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp

_FEW_ROWS = 32


@flax.struct.dataclass
class LoraWeight:
  """A frozen weight with a trainable low-rank update: base + scale * up @ down (arXiv 2106.09685)."""

  base: jax.Array  # any shape; flattened to [out, in] as the call needs
  down: jax.Array  # float32 [rank, in]
  up: jax.Array  # float32 [out, rank]
  scale: float = flax.struct.field(pytree_node=False)


def linear(x: jax.Array, weight: jax.Array | LoraWeight) -> jax.Array:
  """x [..., in] times a weight stored [out, in], in x's dtype; gives [..., out].

  A weight of more dimensions is flattened: leading ones are outputs as long as the rest matches `in`.
  """
  if isinstance(weight, LoraWeight):
    frozen = linear(x, jax.lax.stop_gradient(weight.base))
    return frozen + weight.scale * linear(linear(x, weight.down), weight.up)
  return multiply(x, weight.reshape(-1, x.shape[-1]).astype(x.dtype))


def multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
  """x [..., in] by matrix [out, in]: [..., out].

  Written in the form that XLA's CPU kernels are quick at, and that is nothing special elsewhere.
  """
  # As one matrix: with more dimensions the weight gradient contracts over two, and XLA copies its
  # operands against their layout first.
  flat = x.reshape(-1, x.shape[-1])
  if 1 < flat.shape[0] <= _FEW_ROWS:
    # A few rows, as in a decode step: the weights come first, since the first operand is the one that is
    # cut over threads. Without the barrier XLA would turn the product back.
    product = jax.lax.optimization_barrier(jnp.einsum("oi,ri->or", matrix, flat)).T
  else:
    product = jnp.einsum("ri,oi->ro", flat, matrix)
  return product.reshape(*x.shape[:-1], matrix.shape[0])


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """Root-mean-square norm over the last dimension (arXiv 1910.07467), computed in float32."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
  return (wide * inverse * weight).astype(x.dtype)


def rotary_angles(positions: jax.Array, head_dim: int, base: float) -> tuple[jax.Array, jax.Array]:
  """Cosine and sine of the rotary phases (arXiv 2104.09864); positions [B, T] give two [B, T, head_dim/2].

  Frequencies and phases are float32: in bfloat16 a phase is wrong by radians after 1,000 positions.
  """
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = jnp.exp(-math.log(base) * exponents)
  phases = positions.astype(jnp.float32)[..., None] * frequencies
  return jnp.cos(phases), jnp.sin(phases)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns pairs (i, i + head_dim/2) of x [B, T, heads, head_dim] by the angles of `rotary_angles`."""
  cos, sin = (part[:, :, None, :].astype(x.dtype) for part in angles)
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gated_mlp(x: jax.Array, gate, up, down) -> jax.Array:
  """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x)."""
  return linear(swiglu(linear(x, gate), linear(x, up)), down)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """silu(gate) * up, elementwise.

  Its derivative is written out to end in a barrier: XLA would else compute it inside the transposition
  that the weight gradients need, element by element against the layout. That took a sixth of a CPU's
  time for a training step.
  """
  return jax.nn.silu(gate) * up


def _swiglu_forward(gate, up):
  return swiglu(gate, up), (gate, up)


def _swiglu_backward(saved, cotangent):
  gate, up = saved
  sigmoid = jax.nn.sigmoid(gate)
  silu = gate * sigmoid
  to_gate = cotangent * up * (sigmoid + silu * (1 - sigmoid))
  return jax.lax.optimization_barrier((to_gate, cotangent * silu))


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
