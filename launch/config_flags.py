"""Reads a config file and the `--config.section.key=value` overrides, beside absl's own flags.

    CONFIG = config_flags.ConfigFlag(default="quickstart")

    def main(_):
      train(CONFIG.value)

    app.run(main, flags_parser=CONFIG.parse)
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import pathlib
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from absl import app, flags

from wootz.launch import config as config_lib
from wootz.launch import configs
from wootz.launch.config import Config, ConfigError

flags.disclaim_key_flags()  # so that --helpshort shows the flag under the program that defines it

_OVERRIDE = re.compile(r"--?config\.([^=\s]*)(?:=(.*))?", re.DOTALL)
_WORDS = {"true": True, "1": True, "false": False, "0": False}


def load_config(name: str) -> Config:
  """The `Config` of a config file.

  `name` is a path, from the current directory or from the installed package
  ("launch/configs/quickstart.py"), or the bare name of a shipped config ("quickstart").
  Raises ConfigError naming the file and what is wrong with it.
  """
  path = _find(name)
  spec = importlib.util.spec_from_file_location(f"wootz_config_{path.stem}", path)
  assert spec is not None and spec.loader is not None  # a .py file always has one
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not callable(getattr(module, "get_config", None)):
    raise ConfigError(f"config file {path} has no function get_config()")
  config = module.get_config()
  if not isinstance(config, Config):
    raise ConfigError(f"get_config() of {path} returned {type(config).__name__}, not "
                      "wootz.launch.config.Config")
  return config


def _find(name: str) -> pathlib.Path:
  shipped = pathlib.Path(configs.__file__).parent
  package_root = shipped.parent.parent
  candidates = (pathlib.Path(name), package_root / name, shipped / f"{name}.py")
  for path in candidates:
    if path.suffix == ".py" and path.is_file():
      return path
  names = sorted(path.stem for path in shipped.glob("*.py") if path.stem != "__init__")
  raise ConfigError(f"no config file {name!r}: give the path of a .py file, or one of "
                    f"{', '.join(names)}")


def parse_value(text: str, hint: Any) -> Any:
  """`text` as a value of the annotation `hint`. Raises ValueError where it is none."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin in (types.UnionType, typing.Union):
    inner = next(argument for argument in arguments if argument is not types.NoneType)
    return None if text.lower() == "none" else parse_value(text, inner)
  if origin is tuple:
    items = [item.strip() for item in text.split(",")]
    return tuple(parse_value(item, arguments[0]) for item in items if item)
  if hint is bool:
    if text.lower() not in _WORDS:
      raise ValueError(f"expected true or false, got {text!r}")
    return _WORDS[text.lower()]
  try:
    return config_lib.conform(text if origin is Literal else hint(text), hint)
  except (TypeError, ValueError):
    raise ValueError(f"expected {config_lib.type_name(hint)}, got {text!r}") from None


def parse_overrides(config: Config, overrides: Mapping[str, str | None]) -> Config:
  """`config` with dotted keys replaced by values read from text, all at once.

  None, for a key that came without a value, means true and suits only a bool. Raises ConfigError
  for an unknown key (naming the nearest), a value of the wrong type (naming key, expected type and
  value), and for whatever the sections refuse.
  """
  hints = {key: hint for key, hint, _ in config_lib.leaves(config)}
  changes: dict[str, dict[str, Any]] = {}
  for key, text in overrides.items():
    if key not in hints:
      raise ConfigError(_unknown_key(key, hints))
    if text is None and hints[key] is not bool:
      raise ConfigError(f"--config.{key}: expected {config_lib.type_name(hints[key])}, got nothing")
    try:
      value = True if text is None else parse_value(text, hints[key])
    except ValueError as error:
      raise ConfigError(f"--config.{key}: {error}") from None
    section, _, name = key.partition(".")
    changes.setdefault(section, {})[name] = value
  sections = {section: dataclasses.replace(getattr(config, section), **values)
              for section, values in changes.items()}
  return dataclasses.replace(config, **sections)


def _unknown_key(key: str, known: Iterable[str]) -> str:
  if inside := [name for name in known if name.startswith(f"{key}.")]:
    return f"--config.{key} is a section: set one of its keys, for example --config.{inside[0]}"
  # The whole key and its last part both count: people leave out or guess the section.
  last = key.rpartition(".")[2]
  nearest = max(known, key=lambda name: max(
    difflib.SequenceMatcher(None, key, name).ratio(),
    difflib.SequenceMatcher(None, last, name.rpartition(".")[2]).ratio() - 0.05))
  return f"unknown key --config.{key}: did you mean --config.{nearest}?"


def split_overrides(argv: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
  """(overrides by dotted key, all other arguments).

  Both `--config.key=value` and `--config.key value` are read; a key with nothing after it has
  the value None. Raises ConfigError for a key that is given twice: one of the two would be ignored.
  """
  overrides: dict[str, str | None] = {}
  others: list[str] = []
  arguments = list(argv)
  while arguments:
    argument = arguments.pop(0)
    if argument == "--":
      return overrides, [*others, argument, *arguments]
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
      others.append(argument)
      continue
    key, text = match.groups()
    if text is None:
      follows = arguments and not arguments[0].startswith("--")
      text = arguments.pop(0) if follows else None
    if key in overrides:
      raise ConfigError(f"--config.{key} is given twice: {overrides[key]!r} and {text!r}")
    overrides[key] = text
  return overrides, others


def describe_keys(config: Config) -> str:
  """One line per key, for --helpshort: key, type, default and the comment of its declaration."""
  comments = {f"{name}.{field}": comment for name, section in config_lib.field_types(Config).items()
              for field, comment in _comments(section).items()}
  return "\n".join(
    f"--config.{key}={_as_text(value)} ({config_lib.type_name(hint)}) {comments.get(key, '')}"
    for key, hint, value in config_lib.leaves(config))


def _as_text(value: Any) -> str:
  return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _comments(section: type) -> dict[str, str]:
  """Field name -> the comment on the line that declares it; empty where no source is at hand."""
  try:
    source = inspect.getsource(section)
  except OSError:
    return {}
  return dict(re.findall(r"^  (\w+): .*?  # (.*)$", source, re.MULTILINE))


class ConfigFlag:
  """The absl flag --config together with its overrides; `parse` is a `flags_parser` of absl."""

  def __init__(self, default: str | None = None) -> None:
    self._value: Config | None = None
    flags.DEFINE_string(
      "config", default, "Config file: a path, or the bare name of one in launch/configs. Its "
      "settings can be overridden one by one (shown with the defaults of the type, which the file "
      "may replace):\n" + describe_keys(Config()), required=default is None)

  @property
  def value(self) -> Config:
    """The configuration of this invocation; RuntimeError before `parse`."""
    if self._value is None:
      raise RuntimeError("read before parsing: start with app.run(main, flags_parser=flag.parse)")
    return self._value

  def parse(self, argv: Sequence[str]) -> list[str]:
    """Parses the command line; returns what absl leaves. Says what is wrong and exits with 1."""
    try:
      overrides, others = split_overrides(argv)
      rest = app.parse_flags_with_usage(others)
      if rest[1:]:
        raise ConfigError(f"unexpected argument {rest[1]!r}: settings are --config.key=value")
      self._value = parse_overrides(load_config(flags.FLAGS.config), overrides)
    except ConfigError as error:
      sys.stderr.write(f"FATAL Configuration error:\n{error}\n"
                       "Pass --helpshort to see the settings.\n")
      sys.exit(1)
    return rest
