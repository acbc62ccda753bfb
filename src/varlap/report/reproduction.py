"""The page of `varlap reproduce`: the paper's tables and figures from a store of results, beside its own numbers."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import Any

import varlap
from varlap.errors import DataError
from varlap.experiments import Result, RunSpec, Store
from varlap.experiments.final_line import recorded
from varlap.files import finite
from varlap.report import names
from varlap.report.build import DATA, MARKDOWN, PAGE, write_files
from varlap.report.figures import Group
from varlap.report.html import document, facts, listed, note, pictures, scrolled
from varlap.report.sweep_figures import Drawn, figure_1, figure_2, over_epochs
from varlap.report.sweep_glance import at_a_glance
from varlap.report.sweep_notes import (
    at_an_end,
    how_beta_was_chosen,
    how_it_was_timed,
    what_diverged,
    what_is_best,
    what_is_missing,
    which_multiplier,
)
from varlap.report.sweep_tables import (
    papers_times,
    table_1,
    table_2,
    table_of_all_trainings,
    table_of_all_ways,
    table_of_multipliers,
    table_of_runs,
)
from varlap.report.sweeps import Sweep, sweeps
from varlap.report.tables import Table, markdown_text

TABLE_1 = "Table 1"
TABLE_2 = "Table 2"
TIMES = "Time per epoch"
FIGURE_2_NUMBERS = "Figure 2 in numbers"
ALL_WAYS = "Every way of predicting"
_IN_SHORT, _OTHERS = "All trainings in short", "The other trainings"
_OF_ALL_TRAININGS = (
    "Test NLL, each row at the β that its own notes explain. Bold: the best of a training. The paper's VL, of 200 "
    "epochs, stands beside trainings as long, of its network, on all images."
)
_OF_ALL_WAYS = (
    "Temperature scaling: held-out images choose the temperature. Linearised: 10 draws of the network that is linear "
    "in its weights, with a diagonal posterior, for MAP Laplace's; held-out images choose its variances. OOD AUROC: "
    "in-distribution images against out-of-distribution images, by predictive entropy or by mutual information; where "
    "the latter images differ between rows, no row is the best, and a row whose runs differ in them has no value."
)
NOTED = (ALL_WAYS, TABLE_1, TABLE_2, TIMES, FIGURE_2_NUMBERS)
"""the headings of the tables that cannot be understood without their notes"""
_VERSIONS = ("varlap", "commit", "torch", "python", "hardware", "date")
_NOT_SHARED = ("method", "beta", "seed", "log_sigma_lr_multiplier")


def write_reproduction(store: Store | Path | str, out: Path | str, asked: Collection[RunSpec] = ()) -> Path:
    """Write `report.html`, `report.md`, `report.json` and the figures from all results of a store; nothing is trained.

    The page opens with what was asked for, its result in a sentence; other trainings are folded away.

    Runs that differ in method, β, seed and the speed of log σ alone are a part of the page. Each part has what its runs
    allow: Table 1 where images were held out to choose β by, Figure 1 where a method has several β, Figure 2 where it
    has several multipliers (alone, where all runs are for it), Table 2 or the times of others where a run came to its
    end. Runs that diverged are named.

    Returns:
        The path of the page.

    >>> import tempfile
    >>> from varlap.experiments import Result, RunSpec
    >>> store, scores = Store(tempfile.mkdtemp()), {"mean": {"nll": 0.25, "accuracy": 0.92, "ece": 0.02}}
    >>> store.put(Result(RunSpec("cifar10", "vl", 0.1), scores, scores, {}, 9.0, ({"elbo": -0.5, "seconds": 9.0},)))
    >>> page = write_reproduction(store, store.folder / "report").read_text()
    >>> "paper&#x27;s NLL" in page, "<td>0.23</td>" in page
    (True, True)
    """
    return write_sweeps(read_sweeps(store, asked), out)


def write_sweeps(parts: Sequence[Sweep], out: Path | str, title: str | None = None) -> Path:
    """Write what was read and grouped already, the first of it open; return the path of the page."""
    title = title or _title(parts)
    number = sum(len(_runs(part)) for part in parts)
    beside = ", beside the numbers of arXiv 2103.00222" if any(part.papers_scores for part in parts) else ""
    lead = f"{number} run{'s' * (number > 1)} of `varlap reproduce`{beside}."
    files: dict[str, bytes] = {}
    bodies, texts = [], []
    for part in parts:
        groups = _figures(part, part.file_name)
        for _, drawn in groups:
            files |= {name: content for each in drawn for name, content in each.files.items()}
        bodies.append((part.title, _html(part, groups)))
        texts.append(_markdown(part, groups))
    sections = bodies[:1]
    if (summary := table_of_all_trainings(parts)) is not None:
        sections.append((_IN_SHORT, scrolled(summary.to_html(_IN_SHORT), _IN_SHORT) + note(_OF_ALL_TRAININGS)))
        texts.insert(1, f"## {_IN_SHORT}\n\n{summary.to_markdown()}\n\n{_OF_ALL_TRAININGS}\n")
    if others := bodies[1:]:
        folded = (f"<details>\n<summary>{escape(name)}</summary>\n{body}</details>\n" for name, body in others)
        sections.append((_OTHERS, "".join(folded)))
    heading = f"# {markdown_text(title)}\n\n{lead}\n"
    files |= {
        PAGE: document(title, lead.replace("`", ""), sections, varlap.__version__).encode(errors="replace"),
        MARKDOWN: "\n".join([heading, *texts]).encode(errors="replace"),
        DATA: (json.dumps(as_json(parts, title), indent=1, ensure_ascii=False) + "\n").encode(),
    }
    return write_files(out, files) / PAGE


def read_sweeps(store: Store | Path | str, asked: Collection[RunSpec] = ()) -> list[Sweep]:
    """Read all results of a store, and group them: first one that was asked for, else the final or the longest one.

    >>> read_sweeps("no-such-folder")
    Traceback (most recent call last):
    varlap.errors.DataError: there are no results in no-such-folder; `varlap reproduce table-1 --out FOLDER` makes some
    """
    store = store if isinstance(store, Store) else Store(store)
    found = sweeps(store, recorded(store))
    if not found:
        raise DataError(f"there are no results in {store.folder}; `varlap reproduce table-1 --out FOLDER` makes some")
    trainings = {dataclasses.replace(spec, linearised=True) for spec in asked}

    def rank(part: Sweep) -> tuple[bool, bool, bool, int]:
        is_asked = any(dataclasses.replace(run.spec, linearised=True) in trainings for run in _runs(part))
        return is_asked, bool(part.choices()), part.final is not None, part.spec.epochs

    main = max(found, key=rank)
    return [main, *(part for part in found if part is not main)]


def _title(parts: Sequence[Sweep]) -> str:
    data = dict.fromkeys(names.called(part.spec.data) for part in parts)
    return f"Variational Laplace, reproduced: {', '.join(data)}"


def as_json(parts: Sequence[Sweep], title: str | None = None) -> dict[str, Any]:
    """Return the whole report as plain data."""
    summary = table_of_all_trainings(parts)
    return {
        "title": title or _title(parts),
        "summary": None if summary is None else summary.to_json(),
        "sections": [
            {
                "data": part.spec.data,
                "title": part.title,
                "settings": shared(part),
                "result": remark(part) or None,
                "beta": how_beta_was_chosen(part) if TABLE_1 in tables(part) else None,
                "tables": {name: table.to_json() for name, (table, _) in tables(part).items()},
                "notes": {name: words for name, (_, words) in tables(part).items()},
                "runs": [
                    {
                        "spec": dataclasses.asdict(run.spec),
                        "origin": finite(run.origin),
                        "ood": run.ood,
                        "failure": run.failure,
                    }
                    for run in _runs(part)
                ],
            }
            for part in parts
        ],
    }


def tables(part: Sweep) -> dict[str, tuple[Table, str]]:
    """Return the tables of a part with their notes, by heading."""
    found: dict[str, tuple[Table, str]] = {}
    if not part.is_figure_2:
        first, all_ways = table_1(part), table_of_all_ways(part)
        if first is not None and all_ways is not None:
            found[ALL_WAYS] = all_ways, f"{at_an_end(part)} {_OF_ALL_WAYS}".strip()
            found[TABLE_1] = first, how_beta_was_chosen(part)
        if (times := table_2(part)).rows:
            found[TABLE_2 if papers_times(part) else TIMES] = times, how_it_was_timed(part)
    if (numbers := table_of_multipliers(part)) is not None:
        words = [
            f"× is the multiplier of log σ's learning rate: × 1 is {_rate_at_one(part)}, × 10 the paper's.",
            "ELBO: tempered, per datum, of the last epoch; by another β it is another quantity.",
            "VL's is its approximation around the mean network, VI's is estimated with drawn weights: compare each "
            "with itself.",
            "Scores by the mean network.",
            what_diverged(part),
        ]
        found[FIGURE_2_NUMBERS] = numbers, " ".join(filter(None, words))
    return {heading: (table, f"{words}{_error(table)}") for heading, (table, words) in found.items()}


def _error(table: Table) -> str:
    """Say what stands after a mean over seeds, where a table has some."""
    of_several = any(cell.standard_error is not None for row in table.rows for cell in row.cells.values())
    return " ±: the standard error over the runs of a row." if of_several else ""


def _rate_at_one(part: Sweep) -> str:
    return "the means' rate" if part.spec.optimizer == "Adam" else "Adam's usual rate"


def remark(part: Sweep) -> str:
    """Return what a part begins with: its result, or what is missing where no table's note would say it."""
    return "" if part.is_figure_2 else what_is_best(part) or what_is_missing(part)


def shared(part: Sweep) -> dict[str, Any]:
    """Return the settings that all runs of a part share."""
    both_ways = len({run.spec.linearised for run in _runs(part)}) > 1
    own = (*_NOT_SHARED, "linearised") if both_ways else _NOT_SHARED
    return {name: value for name, value in dataclasses.asdict(part.spec).items() if name not in own}


def _runs(part: Sweep) -> tuple[Result, ...]:
    return *part.results, *part.diverged


def _figures(part: Sweep, prefix: str) -> list[tuple[Group, list[Drawn]]]:
    found = [] if part.is_figure_2 else _of_chosen_beta(part, prefix)
    for beta, drawn in figure_2(part, prefix).items():
        words = (
            "Does training stop before the variances have converged? The tempered ELBO over the epochs, and what is "
            f"reached in the end, for log σ that learn at {_rate_at_one(part)} or faster."
        )
        found.append((_group(f"Figure 2, β = {beta:g}", words, drawn), drawn))
    return found


def _of_chosen_beta(part: Sweep, prefix: str) -> list[tuple[Group, list[Drawn]]]:
    found = []
    if drawn := at_a_glance(part, prefix):
        words = "The better a row, the further left its NLL and its ECE, and the further right its accuracy."
        found.append((dataclasses.replace(_group("At a glance", words, drawn), wide=True), drawn))
    if table_1(part) is not None and (drawn := figure_1(part, prefix)):
        words = "How well each method does over β. The log-likelihood is the mean over test images, in nats."
        found.append((_group("Figure 1", f"{words} {which_multiplier(part)}".strip(), drawn), drawn))
    if drawn := over_epochs(part, prefix):
        words = "Who overfits? What each method's chosen run says of images it learns from, and of images it does not."
        found.append((_group("Over the epochs", words, drawn), drawn))
    return found


def _group(heading: str, words: str, drawn: Sequence[Drawn]) -> Group:
    return Group(heading, words, tuple(each.picture for each in drawn))


def _html(part: Sweep, groups: Sequence[tuple[Group, list[Drawn]]]) -> str:
    """Return a part with its result first, then the picture of it, then the tables and the other figures."""
    origins = [run.origin for run in _runs(part)]
    body = [f"<p>{escape(words)}</p>\n"] if (words := remark(part)) else []
    body += [pictures(group) for group, _ in groups if group.wide]
    for heading, (table, words) in tables(part).items():
        body.append(f"<h3>{heading}</h3>\n{scrolled(table.to_html(f'{heading}, {part.title}'), heading)}{note(words)}")
    body += [pictures(group) for group, _ in groups if not group.wide]
    runs = table_of_runs(part)
    body.append(f"<h3>Runs</h3>\n{_facts(part)}<details>\n<summary>Every run, by its mean network</summary>\n")
    body.append(f"{scrolled(runs.to_html(f'Runs of {part.title}'), 'Runs')}</details>\n")
    versions = {name: _different(origins, name) for name in _VERSIONS}
    body.append("<details>\n<summary>Settings, versions and hardware</summary>\n")
    body.append(listed("Settings that all runs share", shared(part)) + listed("Versions and hardware", versions))
    return "".join(body) + "</details>\n"


def _facts(part: Sweep) -> str:
    spec = part.spec
    trained = [names.setting(key, getattr(spec, key)) for key in ("optimizer", "lr", "schedule", "batch_size")]
    return facts(
        {
            "Network": names.called(spec.model),
            "Training": ", ".join(trained),
            "Held out": f"{spec.validation:.0%} of the training images" if spec.validation else "no images",
            "Runs": f"{len(_runs(part))}{f', of which {len(part.diverged)} diverged' if part.diverged else ''}",
            "Hardware": _different([run.origin for run in _runs(part)], "hardware"),
        }
    )


def _different(origins: Sequence[Any], name: str) -> str:
    return ", ".join(dict.fromkeys(str(one.get(name, "?")) for one in origins))


def _markdown(part: Sweep, groups: Sequence[tuple[Group, list[Drawn]]]) -> str:
    lines = [f"## {markdown_text(part.title)}", "", *([markdown_text(words), ""] if (words := remark(part)) else [])]
    lines += _markdown_pictures([one for one in groups if one[0].wide])
    for heading, (table, words) in tables(part).items():
        lines += [f"### {heading}", "", table.to_markdown(), "", markdown_text(words), ""]
    return "\n".join(lines + _markdown_pictures([one for one in groups if not one[0].wide]))


def _markdown_pictures(groups: Sequence[tuple[Group, list[Drawn]]]) -> list[str]:
    lines = []
    for group, drawn in groups:
        lines += [f"### {group.heading}", ""]
        lines += [f"![{markdown_text(each.picture.alt)}](figures/{each.name}.png)" for each in drawn]
        lines.append("")
    return lines
