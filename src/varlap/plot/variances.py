"""What the posterior's variances are, and whether they have arrived."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from varlap.errors import NonFiniteError
from varlap.plot import style
from varlap.plot.inputs import as_tensor
from varlap.posterior import BNN
from varlap.posterior.bnn import LOG_SIGMA_START
from varlap.posterior.mean_field import optimal_log_sigmas
from varlap.posthoc.variance_gap import TOLERANCE, variance_gap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LAYERS = 12
MOST_POINTS = 5_000
_NUM_BINS = 80
_HEIGHT = 0.85  # of a layer's histogram, where the next one begins at 1
_LONGEST_NAME = 22


@torch.no_grad()
def sigma_over_s(bnn: BNN, *, ax: "Axes | None" = None) -> "Axes":
    """Draw how σ/s is distributed over the weights of each layer, with its median, the first layer on top.

    At 1 a weight's posterior is as wide as its prior: the data said nothing about it. Training starts at exp(−3). Each
    histogram has its own height. Networks with more than 12 parameter tensors are drawn by module, by block, or by
    neighbouring layers, whichever gives 12 rows at most.

    Args:
        bnn: the network with its posterior.
        ax: where to draw; a new figure if None.

    >>> ax = sigma_over_s(BNN(torch.nn.Linear(4, 3)))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['weight', 'bias']
    """
    logs = {}
    for name, mean in bnn.means().items():
        log_ratio = as_tensor((bnn.log_sigma[name] - bnn.prior_scale[name].log()).expand(mean.shape)).flatten()
        if not log_ratio.isfinite().all():
            raise NonFiniteError(f"σ/s of {name!r} holds a zero, a NaN or an Inf in its logarithm; nothing was drawn")
        logs[name] = log_ratio
    layers = {title: torch.cat([logs[name] for name in names]) for title, names in _grouped(list(logs)).items()}
    ax = style.axes_for(ax, "sigma_over_s", size=(4.2, max(2.2, 1.2 + 0.28 * len(layers))))
    low = min(LOG_SIGMA_START, *(float(values.min()) for values in layers.values())) - 0.3
    high = max(0.0, *(float(values.max()) for values in layers.values())) + 0.3
    edges = np.linspace(low, high, _NUM_BINS + 1)
    for row, values in enumerate(layers.values()):
        baseline = len(layers) - 1 - row
        counts, _ = np.histogram(values.numpy(), edges)
        heights = baseline + _HEIGHT * counts / counts.max()
        ax.stairs(heights, np.exp(edges), baseline=baseline, fill=True, color=style.BLUE, alpha=0.7)
        median = math.exp(float(values.median()))
        ax.plot([median, median], [baseline, baseline + _HEIGHT], color=style.RED, linewidth=1.5)
    ax.set_xscale("log")
    ax.set_xlim(math.exp(low), math.exp(high))
    ax.set_ylim(-0.1, len(layers) + 0.55)
    for position, word in ((math.exp(LOG_SIGMA_START), "start"), (1.0, "prior")):
        ax.axvline(position, color=style.GREY, linestyle="--", linewidth=1, zorder=0)
        beside = position * math.exp(-0.012 * (high - low))
        ax.text(beside, len(layers) + 0.5, word, ha="right", va="top", fontsize=style.SMALL)
    ax.set_yticks(range(len(layers) - 1, -1, -1), [_shortened(name) for name in layers], fontsize=style.SMALL)
    ax.tick_params(axis="y", length=0)
    style.tidy(ax, "σ/s, posterior's width over prior's (red: median)", "")
    ax.spines["left"].set_visible(False)
    return ax


@torch.no_grad()
def travelling_variances(
    bnn: BNN,
    fisher: Mapping[str, Tensor],
    num_data: int,
    beta: float,
    *,
    log_sigma_lr: float | Sequence[float] | None = None,
    steps_left: int | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw each log σ against its optimum, and how far the optimizer can still take it (paper, section 5.1).

    On the diagonal the variances have converged. Adam moves a log σ by about its learning rate a step at most, so
    weights outside the shaded band will not arrive: training stops early for them. Both axes are relative to the prior,
    so that all layers start on one line, at −3. Of more than 5,000 weights some are chosen at random, always the same.

    Args:
        bnn: the network with its posterior.
        fisher: curvature per datum by name, from `varlap.fisher_diagonal`.
        num_data: N, the number of training items.
        beta: the objective's β.
        log_sigma_lr: the learning rate of log σ, or one for each step left; if None the training is over.
        steps_left: how many steps are left, if there is one learning rate.
        ax: where to draw; a new figure if None.

    >>> bnn = BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> nothing = {name: torch.zeros_like(mean) for name, mean in bnn.means().items()}
    >>> ax = travelling_variances(bnn, nothing, 50_000, 1.0, log_sigma_lr=1e-4, steps_left=10_000)
    >>> print(ax.texts[0].get_text())  # without curvature the optimum is the prior: 3 to go, and 1 possible
    100% out of reach
    ELBO lost: 0.00015 nats a datum
    """
    if log_sigma_lr is None:
        log_sigma_lr, steps_left = 0.0, 0
    fisher = {name: f.to(bnn.device) for name, f in fisher.items()}
    gap = variance_gap(bnn, fisher, num_data=num_data, beta=beta, log_sigma_lr=log_sigma_lr, steps_left=steps_left)
    optimum = optimal_log_sigmas(bnn.log_sigma, fisher, bnn.prior_scale, num_data, beta)
    both: tuple[list[Tensor], list[Tensor]] = [], []
    for name, mean in bnn.means().items():
        for values, log_sigma in zip(both, (optimum[name], bnn.log_sigma[name]), strict=True):
            values.append(as_tensor((log_sigma - bnn.prior_scale[name].log()).expand(mean.shape)).flatten())
    best, now = torch.cat(both[0]), torch.cat(both[1])
    low = float(torch.minimum(best, now).min().clamp(max=LOG_SIGMA_START)) - 0.4
    high = float(torch.maximum(best, now).max().clamp(min=0.0)) + 0.4
    if len(best) > MOST_POINTS:
        chosen = torch.randperm(len(best), generator=torch.Generator().manual_seed(0))[:MOST_POINTS]
        best, now = best[chosen], now[chosen]
    ax = style.axes_for(ax, "travelling_variances", size=(4.2, 3.8))
    ends = np.array([low, high])
    if gap.reach > 0:
        label = f"within reach (±{gap.reach:.2g})"
        ax.fill_between(ends, ends - gap.reach, ends + gap.reach, color=style.GREY, alpha=0.2, linewidth=0, label=label)
    ax.plot(ends, ends, color=style.GREY, linewidth=1, label="converged")
    ax.axhline(LOG_SIGMA_START, color=style.GREY, linestyle=":", linewidth=1, label="start")
    far = (now - best).abs() > gap.reach + TOLERANCE
    arrives, stays = ("can arrive", "out of reach") if gap.reach > 0 else ("arrived", f"off by more than {TOLERANCE}")
    for points, colour, label in ((~far, style.BLUE, arrives), (far, style.RED, stays)):
        if points.any():
            x, y = best[points].numpy(), now[points].numpy()
            ax.scatter(x, y, s=6, color=colour, alpha=0.4, linewidths=0, label=label, rasterized=True)
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    style.tidy(ax, "log(σ/s) at its optimum", "log(σ/s) now")
    style.note(ax, f"{gap.share_out_of_reach:.0%} {stays}\nELBO lost: {gap.elbo_lost:.2g} nats a datum")
    style.legend(ax, "lower right", markerscale=2)
    return ax


def _grouped(names: list[str]) -> dict[str, list[str]]:
    """Group parameter names by ever shorter beginnings until there are few enough, then by neighbours."""
    groups: dict[str, list[str]] = {}
    for depth in range(max(name.count(".") for name in names) + 1, 0, -1):
        groups = {}
        for name in names:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(groups) <= MOST_LAYERS:
            return groups
    titles = list(groups)
    merged = {}
    for part in np.array_split(np.arange(len(titles)), MOST_LAYERS):
        first, last = titles[part[0]], titles[part[-1]]
        title = first if first == last else f"{first} … {last}"
        merged[title] = [name for index in part for name in groups[titles[index]]]
    return merged


def _shortened(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    end = _LONGEST_NAME // 2
    return f"{name[: _LONGEST_NAME - end - 1]}…{name[-end:]}"
