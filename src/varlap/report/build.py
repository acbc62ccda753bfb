"""Put a report together and write it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import varlap
from varlap.errors import ConfigError
from varlap.files import finite, replace_file
from varlap.report.html import page
from varlap.report.names import called
from varlap.report.sections import Section
from varlap.report.tables import Table, comparison, markdown_text

PAGE, MARKDOWN, DATA = "report.html", "report.md", "report.json"
_FEW = 4  # names that a title may list


def write_parts(parts: Sequence[Section], out: Path | str, title: str | None = None) -> Path:
    """Write what was read and grouped already; return the path of the page."""
    tables = [comparison(section.methods) for section in parts]
    title = title or _title(parts)
    lead = _lead(parts)
    contents = {
        PAGE: page(title, lead, parts, tables, varlap.__version__),
        MARKDOWN: _markdown(title, lead, parts, tables),
        DATA: json.dumps(as_json(parts, title), indent=1, ensure_ascii=False) + "\n",
    }
    return write_files(out, {name: text.encode(errors="replace") for name, text in contents.items()}) / PAGE


def write_files(out: Path | str, contents: Mapping[str, bytes]) -> Path:
    """Write the files of a report, each whole or not at all; return their folder."""
    out = Path(out).expanduser()
    try:
        for name, content in contents.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(out / name, content)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {out}: {error}; choose another folder") from error
    return out


def as_json(parts: Sequence[Section], title: str | None = None) -> dict[str, Any]:
    """Return the whole report as plain data."""
    return {
        "title": title or _title(parts),
        "sections": [
            {
                "data": section.title,
                "num_items": section.num_items,
                **comparison(section.methods).to_json(),
                "runs": [
                    {
                        "name": method.name,
                        "folder": entry.place or None,
                        "spec": finite(entry.evaluated.spec),
                        "origin": finite(entry.evaluated.origin),
                        "seconds": finite(entry.evaluated.seconds),
                    }
                    for method in section.methods
                    for entry in method.entries
                ],
            }
            for section in parts
        ],
    }


def _title(parts: Sequence[Section]) -> str:
    names = list(dict.fromkeys(method.name for section in parts for method in section.methods))
    methods = _joined(names) if len(names) <= _FEW else f"{len(names)} methods"
    data = list(dict.fromkeys(section.name for section in parts))
    return f"{methods} on {_joined(data) if len(data) <= _FEW else f'{len(data)} data sets'}"


def _lead(parts: Sequence[Section]) -> str:
    """Say in a sentence what was compared."""
    methods = len({method.name for section in parts for method in section.methods})
    runs = sum(len(section.entries) for section in parts)
    models = list(dict.fromkeys(model for section in parts for model in section.named("model")))
    words = [f"{methods} method" if methods == 1 else f"{methods} methods compared"]
    words.append(f"on {len(parts)} test sets" if len(parts) > 1 else f"on {parts[0].name}")
    if len(models) == 1:
        words.append(f"with {called(models[0])}")
    return f"{' '.join(words)}, from {runs} {'evaluation' if runs == 1 else 'evaluations'}."


def _markdown(title: str, lead: str, parts: Sequence[Section], tables: Sequence[Table]) -> str:
    lines = [f"# {markdown_text(title)}", "", markdown_text(lead)]
    for section, table in zip(parts, tables, strict=True):
        items = "" if section.num_items is None else f" ({section.num_items:,} test items)"
        lines += ["", f"## {markdown_text(section.name)}{items}", "", table.to_markdown()]
    lines += ["", "Bold: the best of a column. ±: standard error over runs. Brackets: bootstrap interval.", ""]
    return "\n".join([*lines, f"Pictures, specs and versions are in {PAGE}.", ""])


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
