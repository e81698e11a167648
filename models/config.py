"""The facts of a decoder-only transformer that its forward function needs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and constants of a llama-type decoder, named as in the field's config files."""

  family: str  # a module of wootz.models.families
  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  intermediate_size: int
  rope_base: float
  norm_eps: float
  max_positions: int  # longest sequence the model was trained for
  tie_embeddings: bool

  def __post_init__(self) -> None:
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                       f"{self.num_kv_heads}")
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")
