"""The page: one file that opens from disk, on a phone or on paper, and loads nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from varlap.files import finite
from varlap.report import figures
from varlap.report.figures import Group, Picture
from varlap.report.names import called
from varlap.report.sections import Section
from varlap.report.sources import Entry, flat
from varlap.report.tables import Column, Table

_LONG = 120  # characters; a longer value gets lines of its own

# Whatever a file has smuggled in, a browser loads and runs nothing.
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<link rel="icon" href="data:,">
<style>
$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="lead">$lead</p>
$contents</header>
<main>
$main</main>
<footer>
<p>Made by varlap $version from the runs' own files; nothing was trained for it. The numbers are also in
<code>report.json</code> and <code>report.md</code>.</p>
</footer>
</body>
</html>
""")


def page(title: str, lead: str, sections: Sequence[Section], tables: Sequence[Table], version: str) -> str:
    """Return the whole page.

    >>> from varlap.experiments import Evaluated
    >>> from varlap.report.sections import Method
    >>> from varlap.report.tables import comparison
    >>> one = Section("digits", 2, (Method("<VL>", (Entry(Evaluated("<VL>", {"nll": 0.25}, {}, {})),)),))
    >>> text = page("A title", "One method.", [one], [comparison(one.methods)], "1.0")
    >>> "&lt;VL&gt;" in text, "<VL>" in text
    (True, False)
    """
    parts = [(section.name, _section(section, table)) for section, table in zip(sections, tables, strict=True)]
    return document(title, lead, parts, version)


def document(title: str, lead: str, parts: Sequence[tuple[str, str]], version: str) -> str:
    """Return a page of parts, each with its heading and its HTML.

    >>> "<h2>a &amp; b</h2>" in document("A title", "Words.", [("a & b", "<p>c</p>")], "1.0")
    True
    """
    headings = [escape(heading) for heading, _ in parts]
    main = "".join(
        f'<section id="data-{number}">\n<h2>{heading}</h2>\n{body}</section>\n'
        for number, (heading, (_, body)) in enumerate(zip(headings, parts, strict=True), start=1)
    )
    return _PAGE.substitute(
        title=escape(title),
        style=files("varlap.report").joinpath("page.css").read_text(encoding="utf-8"),
        lead=escape(lead),
        contents=_contents(headings) if len(headings) > 1 else "",
        main=main,
        version=escape(version),
    )


def _contents(headings: Sequence[str]) -> str:
    links = "".join(
        f'<li><a href="#data-{number}">{heading}</a></li>\n' for number, heading in enumerate(headings, start=1)
    )
    return f'<nav aria-label="Parts"><ul>\n{links}</ul></nav>\n'


def _section(section: Section, table: Table) -> str:
    short = table.short()
    parts = [
        _facts(section),
        "<h3>Comparison</h3>\n",
        scrolled(short.to_html(f"Scores on {section.title}"), f"Scores on {section.title}"),
        note(_note(table)),
    ]
    if len(short.columns) < len(table.columns):
        words = f"All scores on {section.title}"
        parts.append(f"<details>\n<summary>All {len(table.columns)} scores</summary>\n")
        parts.append(f"{scrolled(table.to_html(words), words)}</details>\n")
    parts.append(_glossary(table.columns))
    groups = figures.of_section(section)
    if groups and len(section.entries) > len(section.methods):
        parts.append(note("Of a method with several runs, the first is drawn below."))
    parts += map(pictures, groups)
    shown = figures.drawn_runs(section)
    parts.append(f"<h3>Runs</h3>\n{note('What decided each result, and where it was computed.')}")
    parts += [_run(method.name, entry, shown) for method in section.methods for entry in method.entries]
    return "".join(parts)


def _facts(section: Section) -> str:
    """Say what was compared: data, model, methods, hardware."""
    origins = [entry.evaluated.origin for entry in section.entries]
    items = "" if section.num_items is None else f" ({section.num_items:,} test items)"
    found = {
        "Data": section.name + items,
        "Out of distribution": ", ".join(map(called, section.named("ood"))),
        "Model": ", ".join(map(called, section.named("model", "network"))),
        "Methods": str(len(section.methods)),
        "Runs": str(len(section.entries)) if len(section.entries) > len(section.methods) else "",
        "Hardware": ", ".join(dict.fromkeys(str(one["hardware"]) for one in origins if one.get("hardware"))),
    }
    return facts(found)


def facts(found: Mapping[str, str]) -> str:
    """Return a row of cards; one that has nothing to say is left out."""
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_cut(value))}</dd></div>\n" for name, value in found.items() if value
    )
    return f'<dl class="facts">\n{rows}</dl>\n'


def _note(table: Table) -> str:
    cells = [cell for row in table.rows for cell in row.cells.values()]
    words = []
    if any(cell.best for cell in cells):
        words.append("Bold marks the best of a column.")
    if any(cell.standard_error is not None for cell in cells):
        words.append("Of several runs: the mean ± its standard error over them.")
    if any(cell.shown_range.startswith("[") for cell in cells):
        words.append("Brackets hold the bootstrap interval over the test items.")
    if len(table.rows) > 1 and any(cell.shown_range for cell in cells):
        words.append("A difference that is small against these may be chance.")
    return " ".join(words)


def _glossary(columns: Sequence[Column]) -> str:
    rows = "".join(
        f"<div><dt>{escape(column.heading)}</dt><dd>{escape(column.meaning)}</dd></div>\n"
        for column in columns
        if column.meaning
    )
    return f'<details>\n<summary>What the scores mean</summary>\n<dl class="spec">\n{rows}</dl>\n</details>\n'


def note(words: str) -> str:
    """Return a paragraph in smaller print."""
    return f'<p class="note">{escape(words)}</p>\n'


def scrolled(inside: str, label: str) -> str:
    """Put what may be wide in a box that scrolls by itself, by keys too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">\n{inside}\n</div>\n'


def pictures(group: Group) -> str:
    """Return pictures beside each other under their heading."""
    shown = "".join(map(_figure, group.pictures))
    words = note(group.words) if group.words else ""
    in_pairs = len(group.pictures) in (1, 2, 4)  # else in threes
    kind = " wide" if group.wide else " pairs" if in_pairs else ""
    return f'<h3>{escape(group.heading)}</h3>\n{words}<div class="pictures{kind}">\n{shown}</div>\n'


def _figure(picture: Picture) -> str:
    return (
        f'<figure>\n<img src="{escape(picture.source)}" alt="{escape(picture.alt)}">\n'
        f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>\n"
    )


def _run(name: str, entry: Entry, shown: set[Any]) -> str:
    """Return a run's spec, versions and hardware, and its own pictures where they are not above."""
    evaluated = entry.evaluated
    drawn = {name: evaluated.spec[name] for name in ("seed", "split") if evaluated.spec.get(name) is not None}
    words = ", ".join([name, *(f"{key} {value}" for key, value in drawn.items())])
    origin: dict[str, Any] = {"folder": entry.place} if entry.place else {}
    origin |= evaluated.origin
    if evaluated.seconds is not None:
        origin["seconds to train"] = round(evaluated.seconds, 2)
    parts = [
        f"<details>\n<summary>{escape(words)}</summary>\n",
        listed("Evaluation", evaluated.spec),
        listed("Versions and hardware", origin),
        f"<details>\n<summary>How it was trained</summary>\n{_list(entry.run_spec)}</details>\n"
        if entry.run_spec
        else "",
    ]
    if entry.run is not None and entry.run not in shown:
        own = "".join(map(_figure, [*figures.elbo(entry, words), *figures.brought(entry, words)]))
        parts.append(f'<div class="pictures">\n{own}</div>\n' if own else "")
    return "".join(parts) + "</details>\n"


def listed(heading: str, spec: Mapping[str, Any]) -> str:
    """Return a spec as a list under a heading."""
    return f"<h4>{escape(heading)}</h4>\n{_list(spec)}" if spec else ""


def _list(spec: Mapping[str, Any]) -> str:
    rows = []
    for name, value in flat(spec).items():
        text = value if isinstance(value, str) else str(finite(value))
        if "\n" in text or len(text) > _LONG:
            inside = f'<pre tabindex="0">{escape(text)}</pre>'
            rows.append(f'<div class="long"><dt>{_breakable(name)}</dt><dd>{inside}</dd></div>\n')
        else:
            rows.append(f"<div><dt>{_breakable(name)}</dt><dd>{escape(text)}</dd></div>\n")
    return f'<dl class="spec">\n{"".join(rows)}</dl>\n'


def _breakable(name: str) -> str:
    """Let a dotted name break where a reader would."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"
