"""Settings as they are typed: --set NAME=VALUE."""

import tomllib
from collections.abc import Iterable, Mapping
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


def with_settings(
    options: Mapping[str, tuple[str, Any]], pairs: Iterable[str], elsewhere: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings that options and --set change, by name; each may be given once.

    Args:
        options: of each setting that an option changes, what was typed and what it means.
        pairs: what was typed after each --set.
        elsewhere: what has another place than --set, and which.

    >>> with_settings({"epochs": ("--epochs 3", 3)}, ["lr=0.1"], {})
    {'epochs': 3, 'lr': 0.1}
    """
    changes = {name: value for name, (_, value) in options.items()}
    for pair in pairs:
        name, value = setting_of(pair)
        if name in elsewhere:
            raise ConfigError(f"--set {pair}: {elsewhere[name]}")
        if name in changes:
            other = options[name][0] if name in options else f"another --set {name}"
            raise ConfigError(f"--set {pair} and {other} are about the same setting; give one of them")
        changes[name] = value
    return changes


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
