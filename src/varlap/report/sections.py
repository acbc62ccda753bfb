"""What may be compared: methods on the same test set, and runs of a method that differ by chance alone."""

import hashlib
import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from varlap.experiments import Evaluated
from varlap.files import finite
from varlap.report.names import called
from varlap.report.sources import Entry, flat

CHANCE = ("seed", "split")  # what may differ between the runs that are averaged
_FITTED = ("temperature",)  # and what a run may have found by itself
_MOST_DIFFERENCES = 3  # that fit in a name


@dataclass(frozen=True)
class Method:
    """A row of the table: one run, or several of different seeds.

    >>> vl = Entry(Evaluated("VL", {"nll": 0.3}, {"seed": 0}, {}))
    >>> Method("VL", (vl,)).first.evaluated.scores
    {'nll': 0.3}
    """

    name: str
    entries: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        """The run that is drawn."""
        return self.entries[0]


@dataclass(frozen=True)
class Section:
    """The methods on one test set."""

    title: str
    num_items: int | None
    methods: tuple[Method, ...]

    @property
    def name(self) -> str:
        """The title as people say it."""
        data, comma, rest = self.title.partition(",")
        return called(data) + comma + rest

    @property
    def entries(self) -> list[Entry]:
        """All runs, method by method."""
        return [entry for method in self.methods for entry in method.entries]

    def named(self, *keys: str) -> list[str]:
        """Return the different values that the runs' specs have under the first of these names, in order.

        >>> runs = tuple(Entry(Evaluated("VL", {}, {"model": "mlp", "seed": seed}, {})) for seed in (0, 1))
        >>> Section("digits", 450, (Method("VL", runs),)).named("model")
        ['mlp']
        """
        found = []
        for entry in self.entries:
            label = entry.run_spec.get("label")
            for spec in (entry.evaluated.spec, label if isinstance(label, Mapping) else {}):
                value = next((spec[key] for key in keys if spec.get(key) is not None), None)
                if value is not None:
                    found.append(_text(value))
                    break
        return list(dict.fromkeys(found))


def sections(entries: Sequence[Entry]) -> list[Section]:
    """Group evaluations by their test set: the data's name, and the labels themselves.

    Runs whose spec has a `split` are compared over their different test sets.

    >>> def on(data, *labels):
    ...     return Entry(Evaluated("VL", {}, {"data": data}, {"labels": torch.tensor(labels)}))
    >>> [(part.title, part.num_items) for part in sections([on("a", 0, 1), on("b", 1), on("a", 1)])]
    [('a', 2), ('b', 1), ('a, test set 2', 1)]
    """
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((_data(entry.evaluated), _fingerprint(entry.evaluated)), []).append(entry)
    found: list[Section] = []
    count: dict[str, int] = {}
    for (data, _), group in groups.items():
        count[data] = count.get(data, 0) + 1
        title = data if count[data] == 1 else f"{data}, test set {count[data]}"
        found.append(Section(title, _num_items(group[0].evaluated), tuple(_methods(group))))
    return found


def _data(evaluated: Evaluated) -> str:
    data = evaluated.spec.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("name"), str):
        data = data["name"]
    return "test data" if data in (None, "") else _text(data)


def _fingerprint(evaluated: Evaluated) -> str:
    truth = _truth(evaluated)
    if evaluated.spec.get("split") is not None:
        return "split"
    if truth is None:
        return ""
    whole = truth.double().contiguous()
    return f"{tuple(whole.shape)} {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}"


def _truth(evaluated: Evaluated) -> torch.Tensor | None:
    return evaluated.predictions.get("labels", evaluated.predictions.get("targets"))


def _num_items(evaluated: Evaluated) -> int | None:
    truth = _truth(evaluated)
    return None if truth is None else len(truth)


def _methods(entries: Sequence[Entry]) -> list[Method]:
    """Return the rows in the order of their first run."""
    rows = _by_chance(entries, [(*CHANCE, *_FITTED), CHANCE])
    same: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        same.setdefault(row[0].evaluated.name, []).append(number)
    names: dict[int, str] = {}
    for name, numbers in same.items():
        told = _told_apart(name, [rows[number] for number in numbers])
        names |= dict(zip(numbers, told, strict=True))
    taken: set[str] = set()
    for number in range(len(rows)):  # someone may have called a method what another one is called by now
        while names[number] in taken:
            names[number] += "′"
        taken.add(names[number])
    return [Method(names[number], tuple(row)) for number, row in enumerate(rows)]


def _by_chance(entries: Sequence[Entry], ignored: Sequence[Sequence[str]]) -> list[list[Entry]]:
    """Part evaluations no further than it takes for each part to hold a seed once."""
    if ignored:
        parts = _split(entries, ignored[0])
        return [row for part in parts for row in ([part] if _differ(part) else _by_chance(part, ignored[1:]))]
    by_source: dict[int, list[Entry]] = {}
    for entry in entries:  # the same experiment again, in another folder?
        by_source.setdefault(entry.source, []).append(entry)
    return [row for part in by_source.values() for row in ([part] if _differ(part) else [[one] for one in part])]


def _split(entries: Sequence[Entry], ignored: Sequence[str]) -> list[list[Entry]]:
    """Group by name and spec, less what is ignored."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        spec = {name: value for name, value in entry.evaluated.spec.items() if name not in ignored}
        key = json.dumps([entry.evaluated.name, finite(spec)], sort_keys=True)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _differ(entries: Sequence[Entry]) -> bool:
    drawn = [json.dumps([finite(entry.evaluated.spec.get(name)) for name in CHANCE]) for entry in entries]
    return len(set(drawn)) == len(drawn)


def _told_apart(name: str, rows: Sequence[Sequence[Entry]]) -> list[str]:
    """Add to a name what differs between the specs of the rows that share it, or else where they lie.

    That a prediction averages draws is said of a row alone, too.
    """
    specs = [flat(row[0].evaluated.spec) for row in rows]
    draws = any(spec.get("how") in ("sampled", "linearised") and spec["how"] not in name for spec in specs)
    if len(rows) == 1 and not draws:
        return [name]
    keys = [
        key
        for key in dict.fromkeys(key for spec in specs for key in spec)
        if key not in CHANCE and (len({_text(spec.get(key)) for spec in specs}) > 1 or (key == "how" and draws))
    ]
    words = [_words(spec, keys) for spec in specs]
    if len(set(words)) < len(words):
        places = [os.path.commonpath([entry.place for entry in row]) if row[0].place else "" for row in rows]
        words = (
            places
            if all(places) and len(set(places)) == len(places)
            else [str(number) for number in range(1, len(rows) + 1)]
        )
    return [f"{name} ({word})" for word in words]


def _words(spec: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Say what a row has under some keys of its spec, the way of predicting as a table would."""
    told = []
    if "how" in keys or "num_samples" in keys:
        told.append(" ".join(_text(spec[key]) for key in ("num_samples", "how") if spec.get(key) is not None))
    told += [
        f"no {key}" if spec.get(key) is None else f"{key} {_text(spec[key])}"
        for key in keys
        if key not in ("how", "num_samples")
    ]
    return ", ".join(told[:_MOST_DIFFERENCES])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(finite(value), sort_keys=True, ensure_ascii=False)
