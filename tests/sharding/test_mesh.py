"""Sizes of the mesh, which need no devices."""

import pytest

from wootz.sharding import mesh as meshes


@pytest.mark.parametrize("axes, devices, expected", [
    ({"fsdp": 8}, 8, [1, 8, 1, 1, 1]), ({"fsdp": -1, "tensor": 2}, 8, [1, 4, 1, 1, 2]),
    ({}, 1, [1] * 5), ({"data": -1}, 1, [1] * 5), ({"tensor": 2, "data": 3}, 6, [3, 1, 1, 1, 2])])
def test_sizes(axes, devices, expected):
  assert list(meshes.mesh_shape(axes, devices).values()) == expected


@pytest.mark.parametrize("axes, message", [
    ({"fsdp": 3}, "fsdp=3 needs 3 devices, there are 8"),
    ({"fsdp": -1, "tensor": 3}, "a multiple of 3 devices, there are 8"),
    ({"tensr": 2}, "'tensr'.*did you mean 'tensor'"), ({"fsdp": 0}, "fsdp=0"),
    ({"fsdp": -1, "data": -1}, "data and fsdp are both -1"), ({}, "needs 1 devices, there are 8")])
def test_wrong_sizes_are_named(axes, message):
  with pytest.raises(ValueError, match=message):
    meshes.mesh_shape(axes, 8)


def test_text_form():
  assert meshes.parse_mesh("fsdp=4, tensor=-1") == {"fsdp": 4, "tensor": -1}
  assert meshes.parse_mesh("fsdp_tensor") == {"fsdp": -1, "tensor": 8}
  assert meshes.format_mesh({"fsdp": 4, "tensor": 2}) == "fsdp=4,tensor=2"
  for wrong in ("", "tensor", "fsdp=x", "fsdp=2,fsdp=4"):
    with pytest.raises(ValueError, match="is not a new axis=size.*hybrid"):
      meshes.parse_mesh(wrong)


def test_presets_are_valid_on_sixteen_devices():
  assert all(meshes.mesh_shape(axes, 16) for axes in meshes.PRESETS.values())
