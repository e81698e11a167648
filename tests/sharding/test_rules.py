"""The rule table: what it says, and what it refuses."""

import pytest
from jax.sharding import PartitionSpec

from wootz.sharding import rules


def test_partition_spec_follows_the_table():
  assert rules.partition_spec(("vocab", "embed")) == PartitionSpec("tensor", "fsdp")
  tokens = rules.partition_spec(("batch", "length", None))
  assert tokens == PartitionSpec(("data", "fsdp"), "seq", None)


def test_misspelt_axis_names_the_nearest():
  with pytest.raises(ValueError, match="'hads'.*did you mean 'heads'"):
    rules.partition_spec(("hads", "embed"))


def test_two_dimensions_on_one_mesh_axis_are_refused():
  with pytest.raises(ValueError, match=r"tensor would split two dimensions of \('heads', 'mlp'\)"):
    rules.partition_spec(("heads", "mlp"))
  with pytest.raises(ValueError, match="fsdp would split two"):
    rules.partition_spec(("batch", "embed"))


@pytest.mark.parametrize("table, changes, message", [
    ({"embed": "fspd"}, {}, "'embed' names mesh axis 'fspd'.*did you mean 'fsdp'"),
    ({"batch": ("data", "data")}, {}, "data would split two dimensions of the rule for 'batch'"),
    ({"embed": "fsdp"}, {"embd": None}, "'embd'.*did you mean 'embed'")])
def test_faulty_table_is_refused_when_read(table, changes, message):
  with pytest.raises(ValueError, match=message):
    rules.make_rules(table, **changes)


def test_changed_table_leaves_the_shared_one_alone():
  changed = rules.make_rules(rules.RULES, vocab=None)
  assert rules.partition_spec(("vocab", "embed"), changed) == PartitionSpec(None, "fsdp")
  assert rules.RULES["vocab"] == "tensor"
  with pytest.raises(TypeError):
    changed["vocab"] = "tensor"


def test_shape_and_axes_must_agree():
  with pytest.raises(ValueError, match="2 dimensions.*name 1"):
    rules.check_divisible((2, 3), ("embed",), PartitionSpec("fsdp"), {"fsdp": 1})
