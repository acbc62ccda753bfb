"""Claims about the Fisher's estimates: they are those of the Fisher that one finds by enumerating all labels."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, distributions, nn

import varlap
from cases import CASES, LIKELIHOOD_CASES, case
from varlap.curvature import exact_fisher, fisher
from varlap.curvature.differentiable import twice_differentiable
from varlap.errors import ConfigError
from varlap.posterior.batch import Batch, checked_batch
from varlap.streams import Streams, Tape

# ---- the oracle: enumerate the labels -----------------------------------------------------------------------------


@functools.singledispatch
def distribution(likelihood, outputs: Tensor) -> distributions.Distribution:
    """The model's distribution of each position's label, as torch writes it."""
    raise NotImplementedError


@distribution.register
def _(likelihood: varlap.Categorical, outputs):
    return distributions.Categorical(logits=outputs.movedim(1, -1))


@distribution.register
def _(likelihood: varlap.Bernoulli, outputs):
    return distributions.Bernoulli(logits=outputs)


@distribution.register
def _(likelihood: varlap.Gaussian, outputs):
    return distributions.Normal(outputs, likelihood.log_noise.detach().exp())


@distribution.register
def _(likelihood: varlap.Heteroscedastic, outputs):
    mean, log_scale = outputs.chunk(2, 1)
    return distributions.Normal(mean, log_scale.exp())


@distribution.register
def _(likelihood: varlap.Poisson, outputs):
    return distributions.Poisson(outputs.exp())


def support(law: distributions.Distribution) -> tuple[Tensor, Tensor]:
    """Every label of a position and its probability: all of them, the first 60 counts, or the nodes of a quadrature.

    A score of a Gaussian is a polynomial of degree 2 at most, its square of degree 4: eight nodes are exact.
    """
    column = [-1] + [1] * len(law.batch_shape)
    if isinstance(law, distributions.Normal):
        nodes, weights = (torch.tensor(a).reshape(column) for a in np.polynomial.hermite_e.hermegauss(8))
        return law.mean + law.stddev * nodes, (weights / weights.sum()).expand(-1, *law.batch_shape)
    if law.has_enumerate_support:
        labels = law.enumerate_support()
    else:
        labels = torch.arange(60, dtype=torch.float64).reshape(column).expand(-1, *law.batch_shape)
    return labels, law.log_prob(labels).exp()


def item_scores(bnn: varlap.BNN, x, y) -> list[tuple[Tensor, Tensor]]:
    """For each item: the probability of each joint label of its positions, [L], and the gradients for it, [L, W].

    The Jacobian of an item's outputs goes through the whole batch, as batch norm in training mode asks.
    """
    outputs = bnn.outputs(x)
    means = list(bnn.means().values())
    rows = [
        torch.autograd.grad(entry, means, retain_graph=True, allow_unused=True, materialize_grads=True)
        for entry in outputs.flatten()
    ]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    jacobian = jacobian.reshape(len(outputs), -1, jacobian.shape[1])
    found = []
    for item in range(len(outputs)):
        own = outputs[item : item + 1].detach()
        labels, probs = (t.flatten(1) for t in support(distribution(bnn.likelihood, own)))
        counted = torch.ones(labels.shape[1], dtype=torch.bool)
        if isinstance(bnn.likelihood, varlap.Categorical):
            counted = y[item].flatten() != bnn.likelihood.ignored_label
        choices = list(itertools.product(range(len(labels)), repeat=int(counted.sum())))
        choice = torch.zeros(len(choices), len(counted), dtype=torch.long)
        choice[:, counted] = torch.tensor(choices, dtype=torch.long).reshape(len(choices), -1)
        joint = probs.gather(0, choice)[:, counted].prod(1)
        leaf = own.expand(len(choices), *own.shape[1:]).clone().requires_grad_()
        law = distribution(bnn.likelihood, leaf)
        log_probs = law.log_prob(labels.gather(0, choice).reshape(law.batch_shape)).reshape(len(choices), -1)
        (at_outputs,) = torch.autograd.grad(log_probs[:, counted].sum(), leaf)
        assert math.isclose(joint.sum().item(), 1.0, abs_tol=1e-12)
        found.append((joint, at_outputs.flatten(1) @ jacobian[item]))
    return found


def enumerated_fisher(bnn: varlap.BNN, x, y, weights: Tensor | None = None) -> Tensor:
    """Eq. 25 per datum, flat: (1/S) Σᵢ wᵢ Σ_labels p(label | xᵢ) (∂ log p(label | xᵢ)/∂w)²."""
    squares = torch.stack([probs @ scores.square() for probs, scores in item_scores(bnn, x, y)])
    return (squares if weights is None else squares * weights[:, None]).mean(0)


# ---- helpers ------------------------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
BATCH_NORM = next(c for c in CASES if c.name == "batch-norm")
NUM_DRAWS = 256


def flat(diagonal: dict[str, Tensor]) -> Tensor:
    return torch.cat([f.flatten() for f in diagonal.values()])


def batch_of(x, y, weights=None) -> Batch:
    return checked_batch(x, y, weights, num_data=100, step=0)


def estimate(curvature, bnn, x, y, weights=None, step=0) -> Tensor:
    return flat(curvature.estimate(bnn, batch_of(x, y, weights), Streams(0, step), False)[1].diagonal())


def draws(curvature, bnn, x, y, weights=None, num_draws=NUM_DRAWS) -> Tensor:
    """What enters the objective on average over blocks of `every` steps: weight(step) × diagonal."""
    rows, batch = [], batch_of(x, y, weights)
    for block in range(num_draws):
        steps = range(block * curvature.every, (block + 1) * curvature.every)
        terms = [
            curvature.weight(step) * flat(curvature.estimate(bnn, batch, Streams(7, step), False)[1].diagonal())
            for step in steps
            if curvature.weight(step)
        ]
        assert len(terms) == 1
        rows.append(terms[0] / curvature.every)
    return torch.stack(rows)


def assert_unbiased(rows: Tensor, truth: Tensor) -> None:
    """Compare the mean of 256 draws with the truth, in standard errors, for each weight and for all together.

    Squared gradients are about χ²₁, whose skew gives their t-statistic a far heavier tail than the normal's: of 12
    million simulated means of 256 χ²₁, 11 were off by 7 standard errors. So with other seeds one weight raises a false
    alarm with probability 1e-6, all 35 tests of 37 to 89 weights together with less than 2e-3 (Bonferroni). The mean
    over the weights of estimate/truth, of smaller skew, is held to 5: less than 35 × 1e-4, χ²₁'s own rate there.
    """
    moving = truth > 1e-20 * truth.max()  # a bias before batch norm has a gradient of rounding size only
    assert (rows[:, ~moving] < 1e-20).all()
    rows, truth = rows[:, moving], truth[moving]
    per_weight = (rows.mean(0) - truth) / (rows.std(0) / math.sqrt(len(rows)))
    assert per_weight.abs().max() < 7
    ratios = (rows / truth).mean(1)
    assert abs(ratios.mean() - 1) / (ratios.std() / math.sqrt(len(rows))) < 5


# ---- sampled, against the enumeration -----------------------------------------------------------------------------

SETTINGS = {
    "every": (varlap.Fisher(every=3), None),
    "fraction": (varlap.Fisher(fraction=0.6), None),
    "groups": (varlap.Fisher(groups=2), None),
    "all-weighted": (varlap.Fisher(every=2, fraction=0.8, groups=3), WEIGHTS),
    "whole": (varlap.Fisher(gradient="whole"), None),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", [*LIKELIHOOD_CASES, BATCH_NORM], ids=lambda case: case.name)
def test_sampled_fisher_converges_to_the_enumerated_fisher(case, setting):
    bnn, x, y = case.make()
    curvature, weights = SETTINGS[setting]
    assert_unbiased(draws(curvature, bnn, x, y, weights), enumerated_fisher(bnn, x, y, weights))


def test_the_test_of_bias_has_power():
    """What the commonest mistakes give, the observed labels and a wrong batch size, is found out."""
    bnn, x, y = LIKELIHOOD_CASES[0].make()
    truth, rows = enumerated_fisher(bnn, x, y), draws(varlap.Fisher(), bnn, x, y)
    for wrong in (rows * 5 / 4, rows * 4 / 5, draws(varlap.EmpiricalFisher(fraction=0.6), bnn, x, y)):
        with pytest.raises(AssertionError):
            assert_unbiased(wrong, truth)


# ---- exactly unbiased: every label of every item, every order of the items ----------------------------------------


class Scripted(varlap.Categorical):
    """Gives item i, whose observed label is i, the i-th of the labels that were written down for it."""

    def sample(self, outputs, generator, targets=None):
        return self.labels[targets]


def scripted(network: nn.Module) -> tuple[varlap.BNN, Tensor, Tensor]:
    """Three items with three classes: 27 joint labels, 6 orders."""
    bnn = varlap.BNN(network, Scripted()).double().train()
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return bnn, x, torch.arange(3)


def all_draws(curvature, bnn, x, y, weights=None) -> tuple[Tensor, Tensor]:
    """The estimate for each labelling and order, with its probability."""
    probs = bnn.outputs(x).softmax(1).detach()
    chances, rows = [], []
    for order in itertools.permutations(range(3)):
        for labels in itertools.product(range(3), repeat=3):
            bnn.likelihood.labels = torch.tensor(labels)
            tapes = {"labels": Tape(), "subset": Tape(numbers=[torch.tensor(order)])}
            found = curvature.estimate(bnn, batch_of(x, y, weights), Streams(0, 0, tapes=tapes), False)[1]
            rows.append(flat(found.diagonal()))
            chances.append(probs[range(3), labels].prod() / 6)
    return torch.stack(chances), torch.stack(rows)


def small_network(batch_norm: bool) -> nn.Module:
    norm = [nn.BatchNorm1d(4)] if batch_norm else []
    return nn.Sequential(nn.Linear(2, 4), *norm, nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)], ids=["", "weighted"])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["no-norm", "batch-norm"])
@pytest.mark.parametrize("settings", [{}, {"fraction": 0.3}, {"groups": 2}, {"fraction": 0.7, "groups": 2}], ids=str)
def test_expectation_over_all_labels_and_orders_is_exactly_the_enumerated_fisher(settings, batch_norm, weights):
    bnn, x, y = scripted(small_network(batch_norm))
    chances, rows = all_draws(varlap.Fisher(**settings), bnn, x, y, weights)
    torch.testing.assert_close(chances @ rows, enumerated_fisher(bnn, x, y, weights), rtol=1e-12, atol=1e-14)


@pytest.fixture
def small_parts(monkeypatch):
    """Let parts of two items have statistics of their own."""
    monkeypatch.setattr(fisher, "FEWEST_WITH_STATISTICS", 2)


def test_a_part_that_is_normalised_by_itself_has_at_least_sixteen_items():
    x, y = torch.randn(40, 2, dtype=torch.float64), torch.arange(40) % 3
    with_norm, without = (varlap.BNN(small_network(norm).double()).train() for norm in (True, False))
    curvature = varlap.Fisher(fraction=0.1, memory=0.9, batch_norm="part")
    assert sizes_of_calls(curvature, with_norm, x, y) == [16]
    assert sizes_of_calls(curvature, with_norm, x[:10], y[:10]) == [10]
    assert sizes_of_calls(curvature, without, x, y) == [4]


@pytest.mark.usefixtures("small_parts")
def test_a_part_with_statistics_of_its_own_has_the_fisher_of_a_smaller_batch():
    """Fisher(batch_norm="part"): the mean over all parts of the Fisher that each part has alone, another quantity."""
    bnn, x, y = scripted(small_network(batch_norm=True))
    curvature = varlap.Fisher(fraction=0.7, batch_norm="part")  # two items of three
    total, expected = torch.zeros(bnn.num_weights(), dtype=torch.float64), []
    for order in itertools.permutations(range(3)):
        part = list(order[:2])
        probs = bnn.outputs(x[part]).softmax(1).detach()
        expected.append(enumerated_fisher(bnn, x[part], y[part]))
        for labels in itertools.product(range(3), repeat=2):
            bnn.likelihood.labels = torch.zeros(3, dtype=torch.long)
            bnn.likelihood.labels[part] = torch.tensor(labels)
            tapes = {"labels": Tape(), "subset": Tape(numbers=[torch.tensor(order)])}
            with twice_differentiable(bnn.network):
                found = curvature.estimate(bnn, batch_of(x, y), Streams(0, 0, tapes=tapes), False)[1]
            total += probs[range(2), labels].prod() / 6 * flat(found.diagonal())
    torch.testing.assert_close(total, torch.stack(expected).mean(0), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(total, enumerated_fisher(bnn, x, y), rtol=0.01)


@pytest.mark.usefixtures("small_parts")
def test_a_part_with_statistics_of_its_own_has_a_pass_of_its_own_and_moves_no_running_statistics():
    bnn, x, y = BATCH_NORM.make()
    twin, _, _ = BATCH_NORM.make()
    curvature = varlap.Fisher(fraction=0.4, batch_norm="part")
    assert sizes_of_calls(curvature, bnn, x, y) == [5, 2]
    twin.outputs(x)
    for (name, moved), once in zip(bnn.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(moved, once), name
    assert sizes_of_calls(curvature, bnn.eval(), x, y) == [2, 3]


def test_groups_reduce_the_variance_as_the_theory_of_independent_scores_predicts():
    """Var f = [Σᵢ κ₄ᵢ + 2 Σ_g (Σ_{i∈g} vᵢ)²]/S²: the fewer items are squared together, the less of the second term."""
    bnn, x, y = scripted(small_network(batch_norm=True))
    v = torch.stack([probs @ scores.square() for probs, scores in item_scores(bnn, x, y)])
    fourth = torch.stack([probs @ scores.pow(4) for probs, scores in item_scores(bnn, x, y)])
    cumulants = (fourth - 3 * v.square()).sum(0)
    partitions = {1: [[[0, 1, 2]]], 2: [[[0, 1], [2]], [[0, 2], [1]], [[1, 2], [0]]], 3: [[[0], [1], [2]]]}
    means = []
    for groups, equally_likely in partitions.items():
        chances, rows = all_draws(varlap.Fisher(groups=groups), bnn, x, y)
        measured = chances @ (rows - chances @ rows).square()
        squares = torch.stack([sum(v[group].sum(0).square() for group in p) for p in equally_likely]).mean(0)
        torch.testing.assert_close(measured, (cumulants + 2 * squares) / 9, rtol=1e-9, atol=1e-14)
        means.append(measured.mean().item())
    assert means[0] > means[1] > means[2]


@pytest.mark.parametrize(("size", "groups", "expected"), [(9, 8, 8), (5, 2, 2), (3, 7, 3)])
def test_there_are_as_many_groups_as_asked_for_or_as_items(size, groups, expected):
    bnn = varlap.BNN(nn.Linear(2, 3))
    batch = batch_of(torch.ones(size, 2), torch.arange(size) % 3)
    assert len(varlap.Fisher(groups=groups).estimate(bnn, batch, Streams(0, 0), False)[1].groups) == expected


# ---- without sampling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_fisher_equals_the_enumeration(case, weights):
    bnn, x, y = case.make()
    found = estimate(varlap.ExactFisher(), bnn, x, y, weights)
    torch.testing.assert_close(found, enumerated_fisher(bnn, x, y, weights), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_empirical_fisher_is_the_squared_gradient_of_the_observed_labels(case, weights):
    bnn, x, y = case.make()
    values = bnn.likelihood.log_prob(bnn.outputs(x), y)
    mean = (values if weights is None else weights.sqrt() * values).mean()
    grads = torch.autograd.grad(mean, list(bnn.means().values()), allow_unused=True, materialize_grads=True)
    expected = len(values) * torch.cat([g.flatten() for g in grads]).square()  # S ḡ²
    torch.testing.assert_close(estimate(varlap.EmpiricalFisher(), bnn, x, y, weights), expected, rtol=1e-10, atol=1e-14)


def test_empirical_fisher_in_groups_of_one_averages_squares_and_a_fraction_is_that_of_some_subset():
    bnn, x, y = CASES[0].make()
    values = bnn.likelihood.log_prob(bnn.outputs(x), y)
    rows = [torch.autograd.grad(value, list(bnn.means().values()), retain_graph=True) for value in values]
    rows = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(estimate(varlap.EmpiricalFisher(groups=5), bnn, x, y), rows.square().mean(0))
    part = estimate(varlap.EmpiricalFisher(fraction=0.4), bnn, x, y)
    subsets = [rows[list(pair)].sum(0).square() / 2 for pair in itertools.combinations(range(5), 2)]
    assert sum(torch.allclose(part, subset, rtol=1e-10) for subset in subsets) == 1


# ---- how it is computed -------------------------------------------------------------------------------------------


def sizes_of_calls(curvature, bnn, x, y) -> list[int]:
    sizes = []
    counting = bnn.network.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    with counting, twice_differentiable(bnn.network):
        curvature.estimate(bnn, batch_of(x, y), Streams(0, 0), False)
    return sizes


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [({}, [5]), ({"fraction": 0.4}, [2, 3]), ({"groups": 2}, [3, 2]), ({"fraction": 0.6, "groups": 2}, [2, 1, 2])],
    ids=str,
)
def test_parts_are_run_alone_unless_batch_norm_couples_the_items(settings, sizes):
    for kind in (varlap.Fisher, varlap.EmpiricalFisher):
        bnn, x, y = CASES[0].make()
        assert sizes_of_calls(kind(**settings), bnn, x, y) == sizes
        bnn, x, y = BATCH_NORM.make()
        assert sizes_of_calls(kind(**settings), bnn, x, y) == [5]
        assert sizes_of_calls(kind(**settings), bnn.eval(), x, y) == sizes  # its statistics are constants now


def test_batch_norm_without_running_statistics_couples_the_items_in_evaluation_mode_too():
    bnn, x, y = case("", lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))).make()
    assert sizes_of_calls(varlap.Fisher(fraction=0.4), bnn.eval(), x, y) == [5]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_likelihood_is_that_of_the_whole_batch_whatever_part_is_squared(case):
    bnn, x, y = case.make()
    expected = (WEIGHTS * bnn.likelihood.log_prob(bnn.outputs(x), y)).mean()
    curvatures = [varlap.Fisher(), varlap.Fisher(fraction=0.4, groups=2), varlap.EmpiricalFisher(groups=3)]
    for curvature in [*curvatures, varlap.ExactFisher()]:
        value = curvature.estimate(bnn, batch_of(x, y, WEIGHTS), Streams(0, 0), False)[0]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


class Spy(varlap.Categorical):
    """Notes what it drew from."""

    def sample(self, outputs, generator, targets=None):
        drawn = super().sample(outputs, generator, targets)
        self.seen.append((outputs, drawn))
        return drawn


@pytest.mark.parametrize("settings", [{}, {"groups": 2}, {"fraction": 0.4}], ids=str)
def test_labels_are_drawn_from_and_differentiated_through_one_and_the_same_forward_pass(settings):
    bnn, x, y = case("", lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), Spy).make()
    passes, bnn.likelihood.seen = [], []
    with bnn.network.register_forward_hook(lambda module, args, output: passes.append(output)):
        found = varlap.Fisher(**settings).estimate(bnn, batch_of(x, y), Streams(0, 0), False)[1]
    assert len(found.groups) == len(bnn.likelihood.seen) == settings.get("groups", 1)
    for group, (outputs, labels), own in zip(found.groups, bnn.likelihood.seen, passes, strict=False):
        assert torch.equal(outputs, own)
        assert not outputs.requires_grad
        log_probs = distributions.Categorical(logits=own).log_prob(labels)
        expected = torch.autograd.grad(log_probs.sum(), list(bnn.means().values()))
        torch.testing.assert_close(list(group.values()), list(expected), rtol=1e-12, atol=1e-12)


def test_with_a_dropout_network_that_is_certain_each_label_is_what_that_pass_is_certain_of():
    """A kept unit says class 0 and a dropped one class 1, with odds of e^200: another mask is wrong half the time."""
    bnn, _, _ = case("", lambda: nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5), nn.Linear(1, 2)), Spy).make()
    values = [[[1.0]], [0.0], [[100.0], [-100.0]], [-100.0, 100.0]]
    with torch.no_grad():
        for parameter, value in zip(bnn.network.parameters(), values, strict=True):
            parameter.copy_(torch.tensor(value))
    bnn.likelihood.seen = []
    x, y = torch.ones(64, 1, dtype=torch.float64), torch.zeros(64, dtype=torch.long)
    varlap.Fisher().estimate(bnn, batch_of(x, y), Streams(0, 0), False)
    ((outputs, labels),) = bnn.likelihood.seen
    assert 10 < labels.sum() < 54  # both occur
    assert torch.equal(labels, outputs.argmax(1))


def test_observed_labels_play_no_part():
    bnn, x, y = CASES[0].make()
    assert torch.equal(estimate(varlap.Fisher(), bnn, x, y), estimate(varlap.Fisher(), bnn, x, (y + 1) % 3))


@pytest.mark.parametrize("case", [*LIKELIHOOD_CASES, BATCH_NORM], ids=lambda case: case.name)
@pytest.mark.parametrize("settings", [{"fraction": 0.6, "groups": 2}, {"gradient": "whole"}], ids=str)
def test_a_step_repeats_its_draws_and_another_step_has_others_and_the_global_generator_stays(case, settings):
    bnn, x, y = case.make()
    curvature, state = varlap.Fisher(**settings), torch.get_rng_state()
    first, again, other = (estimate(curvature, bnn, x, y, step=step) for step in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_squares_of_a_half_precision_network_are_kept_in_single_precision():
    bnn = varlap.BNN(nn.Linear(2, 3).bfloat16())
    diagonal = (
        varlap.Fisher()
        .estimate(bnn, batch_of(torch.ones(4, 2, dtype=torch.bfloat16), torch.arange(4) % 3), Streams(0, 0), False)[1]
        .diagonal()
    )
    assert {f.dtype for f in diagonal.values()} == {torch.float32}


# ---- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [varlap.Fisher, varlap.EmpiricalFisher])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, r"\(every=0\) must be a whole number of at least 1"),
        ({"every": 1.5}, r"\(every=1.5\) must be a whole number"),
        ({"fraction": 0.0}, r"\(fraction=0.0\) must be in \(0, 1\]: the part of the batch that is used"),
        ({"fraction": 1.5}, r"\(fraction=1.5\) must be in \(0, 1\]"),
        ({"fraction": math.nan}, r"\(fraction=nan\) must be in \(0, 1\]"),
        ({"groups": 0}, r"\(groups=0\) must be a whole number of at least 1"),
        ({"groups": 2.5}, r"\(groups=2.5\) must be a whole number"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_right_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=kind.__name__ + message):
        kind(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient": "hold"}, r"Fisher\(gradient='hold'\): choose 'held' \(the paper's\), 'quiet' or 'whole'"),
        ({"batch_norm": "none"}, r"Fisher\(batch_norm='none'\): choose 'whole' or 'part'"),
        ({"memory": 1.0}, r"Fisher\(memory=1\.0\) must be in \[0, 1\); 0\.9 averages about 10 evaluations"),
        ({"memory": math.nan}, r"Fisher\(memory=nan\) must be in \[0, 1\)"),
    ],
    ids=str,
)
def test_choices_that_do_not_exist_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        varlap.Fisher(**settings)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "heteroscedastic", "poisson", "bernoulli"])
@pytest.mark.parametrize("weighted", [False, True])
def test_exact_fisher_of_all_items_at_once_equals_that_of_one_by_one(likelihood, weighted, monkeypatch):
    """Values and all gradients, those of a learnt noise among them."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64)
    y = {"categorical": torch.arange(6) % 4, "heteroscedastic": torch.randn(6, 2).double()}
    y = y.get(likelihood, torch.randint(0, 2, (6, 4)).double())
    weights = torch.rand(6).double() if weighted else None
    bnn = varlap.BNN(varlap.models.mlp(3, 4, (5,), nn.Tanh).double(), likelihood)
    found = []
    for known in (exact_fisher.VMAPPED, ()):
        monkeypatch.setattr(exact_fisher, "VMAPPED", known)
        bnn.zero_grad()
        terms = varlap.VL(6, beta=0.0, curvature=varlap.ExactFisher())(bnn, x, y, weights=weights)
        terms.loss.backward()
        found.append([terms.curvature, *(p.grad.clone() for p in bnn.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_of_the_exact_fisher_is_checked():
    with pytest.raises(ConfigError, match=r"ExactFisher\(memory=1.5\) must be in \[0, 1\)"):
        varlap.ExactFisher(memory=1.5)
    with pytest.raises(ConfigError, match=r"ExactFisher\(every=0\) must be a whole number"):
        varlap.ExactFisher(every=0)
