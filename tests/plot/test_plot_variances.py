"""Plots of variances and of the ELBO against values set by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import varlap
from varlap import plot
from varlap.errors import ConfigError, DataError, NonFiniteError
from varlap.training.records import Records


def layers_of(ax):
    """Return each layer's baseline, edges and heights by its name."""
    rows = {tick: label.get_text() for tick, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)}
    found = {}
    for patch in ax.patches:
        data = patch.get_data()
        baseline = float(np.ravel(data.baseline)[0])
        found[rows[baseline]] = (baseline, data.edges, data.values - baseline)
    return found


def set_ratio(bnn, name, ratios):
    with torch.no_grad():
        bnn.log_sigma[name].copy_((torch.as_tensor(ratios) * bnn.prior_scale[name]).log())


def test_histograms_hold_the_ratios_of_each_layer():
    bnn = varlap.BNN(nn.Linear(3, 1))
    set_ratio(bnn, "weight", [[0.1, 0.1, 0.5]])
    set_ratio(bnn, "bias", [1.0])
    ax = plot.sigma_over_s(bnn)
    found = layers_of(ax)
    assert list(found) == ["weight", "bias"]
    assert found["weight"][0] > found["bias"][0], "the first layer is on top"
    for name, ratio, height in (("weight", 0.1, 1.0), ("weight", 0.5, 0.5), ("bias", 1.0, 1.0)):
        _, edges, heights = found[name]
        bin_of = np.searchsorted(edges, ratio * (1 + 1e-6)) - 1  # float32 may put it a hair beside
        assert heights[bin_of] / heights.max() == pytest.approx(height)
    assert np.count_nonzero(found["weight"][2]) == 2
    assert [heights.max() for _, _, heights in found.values()] == pytest.approx([0.85, 0.85]), "each has its own height"
    assert ax.get_xscale() == "log"
    medians = [line.get_xdata()[0] for line in ax.lines if line.get_color() == plot.style.RED]
    assert medians == pytest.approx([0.1, 1.0])


def test_prior_and_start_are_marked():
    ax = plot.sigma_over_s(varlap.BNN(nn.Linear(3, 1)))
    marks = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"]
    assert marks == pytest.approx([math.exp(-3), 1.0])
    assert [text.get_text() for text in ax.texts] == ["start", "prior"]
    left, right = ax.get_xlim()
    assert left < math.exp(-3)
    assert right > 1


def test_one_variance_for_all_is_drawn_for_each_layer():
    bnn = varlap.BNN(nn.Linear(4, 2), variances="one")
    medians = [line.get_xdata()[0] for line in plot.sigma_over_s(bnn).lines if line.get_color() == plot.style.RED]
    shared = bnn.log_sigma["bias"].item()
    assert medians == pytest.approx([math.exp(shared) / bnn.prior_scale[name].item() for name in ("weight", "bias")])


def named(network):
    return [label.get_text() for label in plot.sigma_over_s(varlap.BNN(network)).get_yticklabels()]


def test_many_tensors_become_at_most_twelve_rows():
    assert named(nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)]))[:2] == ["0.weight", "0.bias"]
    assert named(nn.Sequential(*[nn.Linear(2, 2) for _ in range(7)])) == list("0123456")
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(7)])
    assert named(blocks) == list("0123456")
    many = named(nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)]))
    assert len(many) == 12
    assert many[0] == "0 … 2"
    assert many[-1] == "28 … 29"


def test_grouping_loses_no_weight():
    bnn = varlap.BNN(nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)]))
    with torch.no_grad():
        bnn.log_sigma["29.bias"][:] = 2.0
    (_, edges, heights) = layers_of(plot.sigma_over_s(bnn))["28 … 29"]
    beyond = edges[1:] > 1.5
    assert heights[beyond].max() / heights.max() == pytest.approx(2 / 10)  # two biases of twelve weights


def test_long_names_are_shortened_in_the_middle():
    inner = nn.Module()
    inner.attention_output_projection = nn.Linear(2, 2)
    (first, _) = named(inner)
    assert len(first) == 22
    assert first.startswith("attention")
    assert first.endswith("tion.weight")
    assert "…" in first


def test_variances_that_are_not_finite_are_named():
    bnn = varlap.BNN(nn.Linear(2, 2))
    with torch.no_grad():
        bnn.log_sigma["bias"][0] = -math.inf
    with pytest.raises(NonFiniteError, match="σ/s of 'bias'"):
        plot.sigma_over_s(bnn)


@pytest.fixture
def travelling():
    bnn = varlap.BNN(nn.Linear(2, 1).double(), "gaussian", prior=varlap.OneScalePrior(2.0))
    with torch.no_grad():
        bnn.log_sigma["weight"].copy_(torch.tensor([[-2.0, -1.0]]) + math.log(2.0))
    # σ*² = β/(N f + β/s²), so log σ*/s = −½ log(1 + N f s²/β): 0, −½ log 5 and −½ log 401
    fisher = {"weight": torch.tensor([[0.0, 0.01]]).double(), "bias": torch.tensor([1.0]).double()}
    return bnn, fisher, 10, 0.1


# The last has all but arrived.
BEST, NOW = [0.0, -0.5 * math.log(5), -0.5 * math.log(401)], [-2.0, -1.0, -3.0]


def test_every_variance_is_drawn_against_its_optimum(travelling):
    ax = plot.travelling_variances(*travelling, log_sigma_lr=0.01, steps_left=150)
    found = {
        one.get_label(): one.get_offsets() for one in ax.collections if one.get_label().split()[0] in ("can", "out")
    }
    assert sorted(found["can arrive"].tolist()) == [pytest.approx([BEST[2], NOW[2]]), pytest.approx([BEST[1], NOW[1]])]
    assert found["out of reach"].tolist() == [pytest.approx([BEST[0], NOW[0]])]


def test_band_is_as_wide_as_the_reach(travelling):
    for rates, steps in ((0.01, 50), ([0.02] * 20 + [0.01] * 10, None)):
        ax = plot.travelling_variances(*travelling, log_sigma_lr=rates, steps_left=steps)
        (band,) = [one for one in ax.collections if one.get_label().startswith("within reach")]
        assert band.get_label() == "within reach (±0.5)"
        corners = band.get_paths()[0].vertices
        assert np.abs(corners[:, 1] - corners[:, 0]) == pytest.approx(0.5)
        low, high = ax.get_xlim()
        assert (corners[:, 0].min(), corners[:, 0].max()) == pytest.approx((low, high))


def test_words_say_what_variance_gap_says(travelling):
    bnn, fisher, num_data, beta = travelling
    gap = varlap.variance_gap(bnn, fisher, num_data=num_data, beta=beta, log_sigma_lr=0.01, steps_left=50)
    ax = plot.travelling_variances(*travelling, log_sigma_lr=0.01, steps_left=50)
    assert ax.texts[0].get_text() == f"33% out of reach\nELBO lost: {gap.elbo_lost:.2g} nats a datum"
    ax = plot.travelling_variances(*travelling)
    assert ax.texts[0].get_text().startswith("67% off by more than 0.03")
    assert not any(one.get_label().startswith("within") for one in ax.collections), "no steps, no reach"


def test_large_networks_are_drawn_in_part_always_the_same():
    bnn = varlap.BNN(nn.Linear(100, 100))
    fisher = {name: torch.rand(mean.shape) for name, mean in bnn.means().items()}
    before = torch.get_rng_state()
    first, second = (plot.travelling_variances(bnn, fisher, 100, 1.0).collections[-1].get_offsets() for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert len(first) == 5_000
    assert np.array_equal(first, second)


def test_one_rate_needs_the_number_of_steps(travelling):
    with pytest.raises(ConfigError, match="needs steps_left with one learning rate"):
        plot.travelling_variances(*travelling, log_sigma_lr=0.01)


EPOCHS = [
    {"epoch": 0, "elbo": -3.0, "log_likelihood": -2.0, "curvature": 0.25, "kl": 7.5},
    {"epoch": 1, "elbo": -2.0, "log_likelihood": -1.0, "curvature": 0.5, "kl": 5.0},
    {"epoch": 2, "elbo": -1.5, "log_likelihood": -0.75, "curvature": 0.5, "kl": 2.5},
]


def lines_of(ax):
    return {line.get_label(): line.get_ydata().tolist() for line in ax.lines}


def test_parts_add_up_to_the_elbo_at_every_epoch():
    ax = plot.elbo_terms(varlap.History(varlap.FitSettings(epochs=3), EPOCHS))
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3]
    drawn = lines_of(ax)
    assert drawn == {
        "ELBO": [-3.0, -2.0, -1.5],
        "log-likelihood": [-2.0, -1.0, -0.75],
        "−curvature": [-0.25, -0.5, -0.5],
        "−β·KL": [-0.75, -0.5, -0.25],  # β = 0.1
    }
    assert np.sum([values for name, values in drawn.items() if name != "ELBO"], 0) == pytest.approx(drawn["ELBO"])


def test_folder_of_a_run_is_drawn_as_its_history(tmp_path):
    bnn, x = varlap.BNN(nn.Linear(2, 2)), torch.randn(20, 2)
    data = x, (x[:, 0] > 0).long()
    objective = varlap.VL(20, beta=0.5)
    history = varlap.fit(bnn, objective, data, epochs=3, out=tmp_path / "run", progress="none")
    from_folder = lines_of(plot.elbo_terms(tmp_path / "run"))
    assert from_folder == lines_of(plot.elbo_terms(history))
    assert from_folder == lines_of(plot.elbo_terms(str(tmp_path / "run" / "metrics.jsonl")))
    assert from_folder["−β·KL"] == pytest.approx([-0.5 * row["kl"] for row in history.epochs], rel=1e-5)


def test_curvature_is_left_out_where_there_is_none():
    rows = [{**row, "curvature": 0.0} for row in EPOCHS]
    assert list(lines_of(plot.elbo_terms(rows))) == ["ELBO", "log-likelihood", "−β·KL"]


def test_what_is_no_history_is_named(tmp_path):
    with pytest.raises(ConfigError, match="the history has no epochs yet"):
        plot.elbo_terms([])
    with pytest.raises(DataError, match=r"nothing is not there; give the folder of a run"):
        plot.elbo_terms(tmp_path / "nothing")
    Records(tmp_path / "metrics.jsonl").append({"step": 1, "elbo": 2.0})
    with pytest.raises(ConfigError, match=r"metrics.jsonl: row 0 has no log_likelihood and no curvature"):
        plot.elbo_terms(tmp_path)
