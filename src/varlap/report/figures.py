"""The pictures of a report, drawn by `varlap.plot` from what evaluations and runs have kept."""

import base64
import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from varlap import plot
from varlap.errors import DataError, MissingExtraError, VarlapError, needs_extra
from varlap.experiments import Evaluated
from varlap.report.sections import Method, Section
from varlap.report.sources import Entry
from varlap.training.records import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST_SVG = 200_000  # bytes; beyond, points are cheaper than lines
_AT_ONCE = 6  # methods in a diagram: as many as there are colours
_SHORT_NAME, _LONGEST_NAME = 13, 40  # letters: two fit beside each other in a legend; one fits in a line
_MOST_IMAGES = 12
_RELIABILITY = (
    "How often a prediction is right, against how sure it is. Calibrated probabilities lie on the diagonal; below it, "
    "a method is too sure of itself. The larger a point, the more items are in its bin: an accurate method has nearly "
    "all at the top right. Points of fewer than ten items are faint."
)
_BROUGHT = {
    "sigma_over_s": "Sigma over s: the width σ of each weight's posterior as a part of the prior's width s; at 1 the "
    "data have said nothing about a weight.",
    "travelling_variances": "Travelling variances: each weight's width as training left it, against the best one for "
    "the means of the weights; on the diagonal it has arrived there, and “ELBO lost” is how much lower the others make "
    "the ELBO, which training maximises, for each training item.",
}
"""what the pictures say that `varlap.experiments.draw_figures` draws"""
_RISK = "The error rate if only the surest items are answered. The lower the curve, the better."
_UNCERTAINTIES = {"entropy": "entropy of the prediction", "mutual_information": "mutual information"}
_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Picture:
    """A picture as it is, with its words.

    >>> Picture(b"<svg/>", "image/svg+xml", "an empty one", "Nothing.").source
    'data:image/svg+xml;base64,PHN2Zy8+'
    """

    content: bytes
    kind: str
    alt: str
    caption: str

    @property
    def source(self) -> str:
        """The picture as an address: as an image, nothing in it is run or loaded, and its names are its own."""
        return f"data:{self.kind};base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True)
class Group:
    """Pictures under one heading, and how to read them."""

    heading: str
    words: str
    pictures: tuple[Picture, ...]
    wide: bool = False
    """whether each takes the whole width of the page"""


def of_section(section: Section) -> list[Group]:
    """Draw all that the evaluations of a section allow; of several seeds the first is drawn.

    >>> kept = {"probs": torch.tensor([[0.9, 0.1], [0.4, 0.6]]), "labels": torch.tensor([0, 1])}
    >>> one = Section("two items", 2, (Method("VL", (Entry(Evaluated("VL", {}, {}, kept)),)),))
    >>> [group.heading for group in of_section(one)]
    ['Can the probabilities be trusted?']
    """
    methods = section.methods
    groups = [
        Group(
            "Can the probabilities be trusted?",
            "",
            (
                *_compared(section, _reliability, "ece", "ECE", "Reliability diagram", _RELIABILITY),
                *_compared(section, plot.risk_coverage, "aurc", "AURC", "Risk against coverage", _RISK),
            ),
        ),
        Group(
            "In and out of distribution",
            "How unsure the predictions are about test items, and about out-of-distribution inputs, which should lie "
            "to the right.",
            tuple(
                picture
                for key, words in _UNCERTAINTIES.items()
                for method in methods
                for picture in _entropies(method, key, words)
            ),
        ),
        Group(
            "Least sure",
            "The test images whose predictions have the highest entropy, with the predicted class and its probability. "
            "Red ones are wrong.",
            tuple(picture for method in methods for picture in _least_sure(method)),
        ),
        Group(
            "Training",
            "The ELBO over the epochs, as the sum of its parts; up is good.",
            tuple(picture for names, entry in _runs(methods) for picture in elbo(entry, names)),
        ),
        Group(
            "Inside the runs",
            " ".join(["Pictures that the runs brought along.", *_words_of_brought(methods)]),
            tuple(picture for names, entry in _runs(methods) for picture in brought(entry, names)),
        ),
    ]
    return [group for group in groups if group.pictures]


def elbo(entry: Entry, name: str) -> list[Picture]:
    """Draw the ELBO of a run, where it has kept its epochs."""
    path = entry.metrics
    rows = [] if path is None else Records(path).rows()
    if path is None or not rows:
        return []
    words = f"{name}: terms of the ELBO over {len(rows)} epochs"
    last = rows[-1].get("elbo")
    alt = f"{words}; at the end the ELBO is {last:.4f} nats per datum" if isinstance(last, float) else words
    return [draw_picture(lambda: plot.elbo_terms(path), str(path), alt, name)]


def brought(entry: Entry, name: str) -> list[Picture]:
    """Take the pictures that lie in the folder of a run."""
    found = []
    for path in entry.pictures:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error}); mend it, or move it out of the folder") from error
        words = f"{name}: {path.stem.replace('_', ' ')}"
        found.append(Picture(content, _TYPES[path.suffix.lower()], words, words))
    return found


def _words_of_brought(methods: Sequence[Method]) -> list[str]:
    """Explain the pictures of runs, each kind once."""
    there = {path.stem for _, entry in _runs(methods) for path in entry.pictures}
    return [words for stem, words in _BROUGHT.items() if stem in there]


def drawn_runs(section: Section) -> set[Path]:
    """Return the runs whose pictures a section shows."""
    return {entry.run for _, entry in _runs(section.methods) if entry.run is not None}


def _runs(methods: Sequence[Method]) -> Iterator[tuple[str, Entry]]:
    """Yield the first run of each method with the names of those that share it: one training, several predictions."""
    names: dict[Path, list[str]] = {}
    for method in methods:
        if method.first.run is not None:
            names.setdefault(method.first.run, []).append(method.name)
    for method in methods:
        run = method.first.run
        if run is not None and names[run][0] == method.name:
            yield ", ".join(names[run]), method.first


def _compared(
    section: Section, draw: Callable[..., "Axes"], key: str, score: str, title: str, caption: str
) -> Iterator[Picture]:
    """Draw several methods in one diagram, on the labels that they share."""
    judged = [(method, both) for method in section.methods if (both := _classes(method.first.evaluated)) is not None]
    # Over splits the labels differ: those of the first method's first split are taken.
    judged = [(method, both) for method, both in judged if torch.equal(both[1], judged[0][1][1])]
    for start in range(0, len(judged), _AT_ONCE):
        part = judged[start : start + _AT_ONCE]
        probs, labels = (
            {_cut(method.name, number): both[0] for number, (method, both) in enumerate(part, 1)},
            part[0][1][1],
        )
        told = [
            method.name + (f" ({score} {value:.4f})" if (value := method.first.evaluated.scores.get(key)) else "")
            for method, _ in part
        ]
        where = ", ".join(_where(method) for method, _ in part)
        yield draw_picture(lambda p=probs, y=labels: draw(p, y), where, f"{title} of {', '.join(told)}", caption)


def _reliability(probs: Mapping[str, Tensor], labels: Tensor) -> "Axes":
    ax = plot.reliability(probs, labels)
    if max(map(len, probs)) > _SHORT_NAME:  # such names would take the room of the diagram itself
        figure, inside = ax.get_figure(root=True), ax.get_legend()
        assert figure is not None
        assert inside is not None
        inside.remove()
        figure.set_size_inches(4.2, 3.4 + 0.2 * len(probs))
        figure.legend(*ax.get_legend_handles_labels(), loc="outside upper left", fontsize="small", frameon=False)
        ax.set_ylim(top=1.05)
    return ax


def _cut(name: str, number: int) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 4]}… {number}"


def _classes(evaluated: Evaluated) -> tuple[Tensor, Tensor] | None:
    """Return probabilities and labels: [N, K, ...] and [N, ...], or of yes-or-no labels [N] and [N]."""
    kept = evaluated.predictions
    if "probs" not in kept or "labels" not in kept:
        return None
    probs, labels = kept["probs"], kept["labels"]
    return (probs.flatten(), labels.flatten()) if probs.shape == labels.shape else (probs, labels)


def _entropies(method: Method, key: str, words: str) -> Iterator[Picture]:
    kept, scores = method.first.evaluated.predictions, method.first.evaluated.scores
    if key not in kept or f"ood_{key}" not in kept:
        return

    def draw() -> "Axes":
        ax = plot.entropy_histogram(kept[key].flatten(), kept[f"ood_{key}"].flatten())
        ax.set_xlabel(f"{words} (nats)")
        return ax

    area = scores.get(f"ood_auroc_{key}")
    alt = f"{method.name}: {words} in and out of distribution" + ("" if area is None else f", AUROC {area:.3f}")
    yield draw_picture(draw, _where(method), alt, f"{method.name}, by {words}")


def _least_sure(method: Method) -> Iterator[Picture]:
    kept = method.first.evaluated.predictions
    if not {"least_sure", "images", "probs", "labels"} <= kept.keys():
        return
    items, probs, labels = kept["least_sure"].long()[:_MOST_IMAGES], kept["probs"], kept["labels"]
    images = kept["images"][:_MOST_IMAGES]
    if probs.ndim != 2 or probs.shape == labels.shape or len(items) == 0:
        return
    if int(items.min()) < 0 or int(items.max()) >= len(probs):
        raise DataError(
            f"{_where(method)} is damaged (least_sure names item {int(items.max())} of {len(probs)}); "
            "make it again by `varlap evaluate`"
        )
    wrong = int((probs[items].argmax(1) != labels[items]).sum())
    alt = f"{method.name}: the {len(items)} least sure test images, {wrong} of them predicted wrongly"
    caption = f"{method.name}: {wrong} of these {len(items)} are wrong"
    yield draw_picture(
        lambda: plot.least_sure(probs[items], images, labels[items], count=_MOST_IMAGES), _where(method), alt, caption
    )


def _where(method: Method) -> str:
    return f"the evaluation in {method.first.place}" if method.first.place else f"the evaluation {method.name!r}"


def draw_picture(draw: Callable[[], "Axes"], where: str, alt: str, caption: str) -> Picture:
    """Draw in matplotlib's own style whatever the user's is, to the same bytes each time."""
    with _plain_style():
        try:
            figure = draw().figure
        except MissingExtraError:
            raise
        except VarlapError as error:
            raise DataError(f"{where} cannot be drawn: {error}") from error
        content = _saved(figure, "svg", {"Date": None, "Creator": None})
        kind = ".svg"
        if len(content) > _LARGEST_SVG:
            content, kind = _saved(figure, "png", {"Software": None}), ".png"
    return Picture(content, _TYPES[kind], alt, caption)


def as_png(draw: Callable[[], "Axes"]) -> bytes:
    """Draw the same as pixels, for where an SVG cannot be shown."""
    with _plain_style():
        return _saved(draw().figure, "png", {"Software": None})


def _saved(figure: object, form: str, metadata: Mapping[str, None]) -> bytes:
    with io.BytesIO() as file:
        figure.savefig(file, format=form, metadata=metadata)  # type: ignore[attr-defined]
        return file.getvalue()


@contextlib.contextmanager
def _plain_style() -> Iterator[None]:
    with needs_extra("plot", "varlap.report", "matplotlib"):
        import matplotlib
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "varlap"  # names inside an SVG are drawn at random otherwise
        yield
