"""A setting as it is typed: --set NAME=VALUE."""

import tomllib
from typing import Any

from varlap.errors import ConfigError


def setting_of(pair: str) -> tuple[str, Any]:
    """Return name and value.

    >>> setting_of("lr=0.1"), setting_of("model=mlp"), setting_of("clip_norm=none")
    (('lr', 0.1), ('model', 'mlp'), ('clip_norm', None))
    """
    name, equals, text = pair.partition("=")
    if not equals:
        raise ConfigError(f"--set {pair}: give NAME=VALUE, such as --set batch_size=64")
    if name == "recipe":
        raise ConfigError(f"--set {pair}: a recipe is a set of settings; choose it by --recipe {text}")
    return name, _value(pair, text)


def _value(pair: str, text: str) -> Any:
    """Read a value as TOML does; what is no value there is a word, and "none" is no value at all."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text[:1] not in ("[", "{"):
            return text
    kind, example = ("list", "['map', 'vl']") if text[0] == "[" else ("table", "{map = [0.1], vl = [0.01]}")
    closed = all(text.count(left) == text.count(right) for left, right in ("[]", "{}"))
    why = f"write it as in {example}" if closed else "a bracket is not closed"
    raise ConfigError(f"--set {pair} cannot be read as a {kind}: {why}")
