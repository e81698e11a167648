"""The package list, the direction of imports, and what a built and installed wheel holds."""

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = ("data", "launch", "models", "post_training", "sharding")
# Who may import whom: launch -> post_training -> data, models -> sharding.
ALLOWED = {
  "sharding": set(),
  "models": {"sharding"},
  "data": {"sharding"},
  "post_training": {"data", "models", "sharding"},
  "launch": {"data", "models", "post_training", "sharding"},
}


def sources(top):
  return sorted((ROOT / top).rglob("*.py"))


def imported(path):
  """Dotted names of the project's own modules that a file imports, wherever in it."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("top", TOP)
def test_imports_go_in_one_direction(top):
  for path in sources(top):
    for name in imported(path):
      parts = name.split(".")
      if parts[0] == "wootz" and len(parts) > 1 and parts[1] != top:
        assert parts[1] in ALLOWED[top], f"{path.relative_to(ROOT)} imports {name}"
      assert parts[0] not in TOP, f"{path.relative_to(ROOT)} imports {name}: write wootz.{name}"


def listed_packages():
  return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


def test_the_package_list_is_the_folders():
  folders = {path.parent for top in TOP for path in sources(top)}
  names = {"wootz." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
  assert set(listed_packages()) == names
  for folder in folders:
    assert (folder / "__init__.py").exists(), f"{folder} is a package without __init__.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  folder = tmp_path_factory.mktemp("wheel")
  subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
                  "--wheel-dir", folder, ROOT], check=True)
  return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  data = [path for top in TOP for suffix in ("py", "html", "txt", "txtpb", "jinja", "ipynb")
          for path in (ROOT / top).rglob(f"*.{suffix}")]
  missing = [path for path in data if f"wootz/{path.relative_to(ROOT)}" not in names]
  assert data and not missing
  assert not any(name.startswith(("wootz/tests", "tests")) for name in names)
  assert all(f"wootz/{top}/py.typed" in names for top in TOP)


@pytest.mark.slow
def test_the_installed_wheel_imports_from_anywhere(wheel, tmp_path):
  target = tmp_path / "site"
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target,
                  wheel], check=True)
  code = ("import wootz.launch.train, wootz.data.store, wootz.models.gguf; "
          "print(wootz.launch.train.__file__)")
  done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                        env=os.environ | {"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"})
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().startswith(str(target))
