"""The page is well-formed, loads nothing, believes no file, and is the same each time."""

import io
import itertools
import json
import re
import shutil
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from varlap import report
from varlap.cli import app
from varlap.cli.report import fitting
from varlap.errors import ConfigError, DataError
from varlap.experiments import Evaluated
from varlap.report.sources import collect

NAUGHTY = '<script>alert("1")</script> & co | _x_'
VOID = {"meta", "link", "img", "br", "hr", "wbr"}


class Parsed(HTMLParser):
    """Tags, their attributes and texts, with a check that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.cells[-1] += data


def test_the_page_is_well_formed_and_loads_nothing(written: Path):
    text = written.read_text()
    parsed = Parsed(text)
    for _, attributes in parsed.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in parsed.tags}
    assert not re.search(r"url\(|@import", text)
    assert text.startswith("<!DOCTYPE html>")
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_picture_has_words_and_all_are_there(written: Path):
    text = written.read_text()
    alts = [attributes["alt"] for tag, attributes in Parsed(text).tags if tag == "img"]
    assert all(alts)
    assert [alt.partition(" (")[0] for alt in alts if "of MAP" in alt] == [
        "Reliability diagram of MAP",
        "Risk against coverage of MAP",
    ]
    for method in ("MAP", "VL"):
        for words in (
            "entropy of the prediction in and out of distribution",
            "mutual information in and out of distribution",
            "the 6 least sure test images",
            "terms of the ELBO over 3 epochs; at the end the ELBO is -0.6667",
            "sigma over s",
        ):
            assert sum(alt.startswith(f"{method}: {words}") for alt in alts) == 1, words
    assert text.count("at 1 the data have said nothing about a weight.") == 1  # once, for all that are of this kind
    assert "“ELBO lost” is" not in text  # of a picture that no run has brought
    # the other seeds' own pictures are with their runs
    assert sum(alt.startswith("VL, seed 1: ") for alt in alts) == 2
    assert text.count("<figure>") == text.count("<figcaption>") == len(alts)


def test_numbers_agree_between_page_markdown_and_json(written: Path):
    data = json.loads((written.parent / "report.json").read_text())
    (section,) = data["sections"]
    assert section["num_items"] == 40
    expected = []
    for row in section["rows"]:
        for column in section["columns"]:
            cell = row["scores"][column["key"]]
            scale = 100 if column["percent"] else 1
            assert float(cell["shown"]) == pytest.approx(
                scale * cell["value"], abs=0.051 if column["percent"] else 5.1e-4
            )
            expected.append(" ".join(filter(None, (cell["shown"], cell["shown_range"]))))
    cells = Parsed(written.read_text()).cells
    assert cells[-len(expected) :] == expected  # the table of all scores
    rows = [line for line in (written.parent / "report.md").read_text().splitlines() if line.startswith("| ")][2:]
    markdown = [cell.replace("*", "") for line in rows for cell in line.strip("| ").split(" | ")[1:]]
    assert markdown == expected


def test_what_files_say_is_escaped(tmp_path: Path, made: Callable[..., Evaluated]):
    one = made(NAUGHTY, data=NAUGHTY, model=NAUGHTY, **{NAUGHTY: [NAUGHTY]})
    one = Evaluated(one.name, {**one.scores, NAUGHTY: 1.0}, one.spec, one.predictions, {NAUGHTY: NAUGHTY}, 1.0)
    one.write(tmp_path / NAUGHTY.replace("/", "") / "a")
    text = report.write(tmp_path, tmp_path / "out", title=NAUGHTY).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    Parsed(text)
    assert "<script" not in (tmp_path / "out" / "report.md").read_text()


def test_the_same_files_give_the_same_bytes_whatever_the_style(written: Path, tmp_path: Path):
    shutil.copytree(written.parent.parent / "runs", tmp_path / "elsewhere" / "runs")
    title = json.loads((written.parent / "report.json").read_text())["title"]
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20}):
        again = report.write(tmp_path / "elsewhere" / "runs", tmp_path / "b", title=title)
        assert matplotlib.rcParams["font.size"] == 20
    for name in ("report.html", "report.md", "report.json"):
        assert (written.parent / name).read_bytes() == (again.parent / name).read_bytes(), name
    assert str(tmp_path) not in again.read_text()


def test_several_test_sets_get_a_section_each(tmp_path: Path, made: Callable[..., Evaluated]):
    regression = Evaluated("VL", {"nll": 1.5, "rmse": 0.5}, {"data": "boats"}, {"targets": torch.ones(3)})
    text = report.write([made("VL"), regression], tmp_path).read_text()
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["toys", "boats"]
    assert [attributes["href"] for tag, attributes in Parsed(text).tags if tag == "a"] == ["#data-1", "#data-2"]


def test_many_methods_share_several_diagrams(tmp_path: Path, made: Callable[..., Evaluated]):
    kept = {name: made("M").predictions[name] for name in ("probs", "labels")}
    evaluated = [Evaluated(f"M{number}", {"nll": 0.5}, {"data": "toys"}, kept) for number in range(8)]
    text = report.write(evaluated, tmp_path).read_text()
    assert text.count('alt="Reliability diagram of') == 2
    assert "<title>8 methods on toys</title>" in text


def test_long_names_leave_room_for_the_diagram(tmp_path: Path, made: Callable[..., Evaluated]):
    kept = {name: made("M").predictions[name] for name in ("probs", "labels")}
    names = [f"{number}: a name that is longer than any diagram is wide, {'and longer ' * 5}" for number in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, where nothing is left of the axes
        report.write([Evaluated(name, {"nll": 0.5}, {}, kept) for name in names], tmp_path)


def test_yes_or_no_labels_are_drawn(tmp_path: Path):
    kept = {"probs": torch.tensor([[0.9, 0.2], [0.4, 0.6]]), "labels": torch.tensor([[1, 0], [1, 1]])}
    assert "Reliability diagram" in report.write(Evaluated("VL", {"nll": 0.5}, {}, kept), tmp_path).read_text()


def test_folders_that_lie_in_each_other_are_read_once(runs: Path):
    assert [entry.place for entry in collect([runs, runs / "vl-0"])] == [
        f"runs/{name}/evaluations/mean" for name in ("map-0", "vl-0", "vl-1", "vl-2")
    ]


def _damaged_scores(folder: Path, **change: object) -> None:
    path = folder / "evaluations" / "mean" / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "evaluations/mean/predictions.safetensors").write_bytes(b"x"), "vl-1/.* is damaged"),
        (lambda run: (run / "evaluations/mean/predictions.safetensors").unlink(), "vl-1/.* holds no evaluation"),
        (lambda run: _damaged_scores(run, scores={"nll": "low"}), r"vl-1/.* is damaged \(nll is no number\)"),
        (lambda run: _damaged_scores(run, spec=None), r"vl-1/.* is damaged \(its spec are no JSON object\)"),
        (lambda run: _damaged_scores(run, name=""), r"vl-1/.* is damaged \(it has no name\)"),
        (lambda run: (run / "spec.json").write_text("{"), r"vl-1/spec.json is damaged"),
        (lambda run: (run / "metrics.jsonl").write_text("x\ny\n"), "vl-1/metrics.jsonl, line 1 is not a JSON object"),
        (lambda run: (run / "metrics.jsonl").write_text("{}\n"), "vl-1/metrics.jsonl.* row 0 has no elbo"),
    ],
)
def test_a_damaged_file_is_named(runs: Path, tmp_path: Path, damage: Callable[[Path], None], message: str):
    damage(runs / "vl-1")
    with pytest.raises((DataError, OSError), match=message):
        report.write(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_predictions_that_do_not_fit_are_named(made: Callable[..., Evaluated], tmp_path: Path):
    def changed(**kept: torch.Tensor) -> Evaluated:
        one = made("VL")
        return Evaluated("VL", one.scores, one.spec, {**one.predictions, **kept})

    for one, message in [
        (changed(labels=torch.zeros(3, dtype=torch.long)), "it has 3 labels for 40 predictions"),
        (changed(labels=torch.full((40,), 9)), r"the evaluation 'VL' cannot be drawn: .*label 9 is out of range"),
        (changed(least_sure=torch.tensor([99])), "least_sure names item 99 of 40"),
    ]:
        with pytest.raises(DataError, match=message):
            report.write(one, tmp_path)


def test_nothing_to_report_says_what_to_run(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"no evaluations below .* \(no scores.json\); write them by `varlap evaluate RUN`"
    ):
        report.write(tmp_path, tmp_path)
    with pytest.raises(DataError, match="is not a folder; give the folder of a run"):
        report.write(tmp_path / "nothing", tmp_path)
    with pytest.raises(DataError, match="there is nothing to report"):
        report.write([], tmp_path)


def test_a_folder_that_cannot_be_written_is_named(runs: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*file.*; choose another folder"):
        report.write(runs, tmp_path / "file")


def test_the_command_prints_the_table_or_one_object(runs: Path, tmp_path: Path):
    result = CliRunner().invoke(app, ["report", str(runs / "vl-0")])
    assert result.exit_code == 0, result.output
    page = (runs / "vl-0" / "report" / "report.html").resolve()
    assert page.as_uri() in result.stdout.replace("\n", "")
    assert "NLL ↓" in result.stdout
    arguments = [
        "report",
        str(runs / "vl-0"),
        str(runs / "map-0"),
        "--out",
        str(tmp_path / "b"),
        "--title",
        "T",
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    (line,) = result.stdout.splitlines()
    answer = json.loads(line)
    assert answer["page"] == str(tmp_path / "b" / "report.html")
    assert answer["title"] == "T"
    assert [row["name"] for row in answer["sections"][0]["rows"]] == ["VL", "MAP"]
    assert {**answer, "page": 0} == {"page": 0, **json.loads((tmp_path / "b" / "report.json").read_text())}


def test_the_terminal_gets_what_fits(runs: Path):
    table = report.compare(runs)["toys"].short()
    printed = {}
    for width in (200, 45, 30):
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(fitting(console, table, "toys"))
        printed[width] = console.file.getvalue()
        assert "…" not in printed[width]
        assert table.rows[0].cells["nll"].shown in printed[width]
    assert "± " in printed[200]
    assert "±" not in printed[45]
    assert "┃ score" in printed[45]
    assert "┃" not in printed[30]


def test_a_mistake_is_one_line_and_status_2(tmp_path: Path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("varlap: there are no evaluations below")


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["report", "--help"])
    assert "Example: varlap report runs" in result.stdout
