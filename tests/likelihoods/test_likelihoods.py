"""Claims about likelihoods: densities and draws are those of torch's laws, scores are their derivatives."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from laws import BUILT_IN, DOUBLE, generator, over_likelihoods
from torch import Tensor, distributions

import varlap
from varlap.errors import ConfigError
from varlap.streams import Tape

SHAPES = {"vectors": (), "images": (2, 3)}


over_shapes = pytest.mark.parametrize("positions", SHAPES.values(), ids=SHAPES)


def make(name: str, positions=(), size: int = 5, dtype=DOUBLE):
    """A likelihood, outputs of so many items, targets drawn by torch, and the law that they were drawn from."""
    build, channels, law = BUILT_IN[name]
    likelihood = build().to(dtype)
    outputs = torch.randn(size, channels, *positions, generator=generator(1), dtype=DOUBLE).to(dtype)
    torch.manual_seed(2)
    return likelihood, outputs, law(likelihood, outputs).sample(), law(likelihood, outputs)


# -- the density -----------------------------------------------------------------------------------------------------


@over_shapes
@over_likelihoods
def test_log_prob_of_an_item_is_the_sum_over_its_positions_of_torchs(name, positions):
    likelihood, outputs, targets, law = make(name, positions)
    found = likelihood.log_prob(outputs, targets)
    assert found.shape == (5,)
    torch.testing.assert_close(found, law.log_prob(targets).reshape(5, -1).sum(1), rtol=1e-12, atol=1e-12)


def test_gaussian_with_a_noise_for_each_column():
    likelihood = varlap.Gaussian(num_outputs=3).double()
    with torch.no_grad():
        likelihood.log_noise.copy_(torch.tensor([-1.0, 0.0, 0.5]))
    outputs, targets = torch.randn(5, 3, dtype=DOUBLE), torch.randn(5, 3, dtype=DOUBLE)
    law = distributions.Normal(outputs, likelihood.log_noise.exp())
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), law.log_prob(targets).sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(likelihood.predict(outputs).variance, law.variance, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["bernoulli", "gaussian", "poisson"])
def test_one_output_per_item_needs_no_second_dimension(name):
    likelihood, outputs, targets, law = make(name)
    found = likelihood.log_prob(outputs[:, 0], targets[:, 0])
    torch.testing.assert_close(found, law.log_prob(targets)[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_extreme_logits_give_finite_values_scores_and_gradients(name, dtype):
    likelihood = BUILT_IN[name][0]()
    rows = [[1e4, -1e4, 0.0, 3.0], [-1e4, -1e4, -1e4, 1e4], [200.0, -200.0, -800.0, 800.0]]
    outputs = torch.tensor(rows, dtype=dtype, requires_grad=True)
    for target in range(2):
        targets = torch.full((3,), target) if name == "categorical" else torch.full_like(outputs, target)
        log_probs = likelihood.log_prob(outputs, targets)
        scores = likelihood.score(outputs, torch.ones_like(outputs))
        for value in (log_probs, scores):
            assert value.isfinite().all()
            assert torch.autograd.grad(value.sum(), outputs)[0].isfinite().all()
    drawn = likelihood.sample(outputs, generator())
    expected = torch.tensor([0, 3, 3]) if name == "categorical" else (outputs > 0).to(dtype)
    certain = torch.ones(3, dtype=torch.bool) if name == "categorical" else outputs.abs() > 100
    assert torch.equal(drawn[certain], expected[certain])


def test_extreme_rates_give_counts():
    """e^10000 is no number, but a draw must not come out negative, as torch's overflowing counts do."""
    for dtype in (torch.float32, DOUBLE):
        outputs = torch.tensor([[-1e4, 40.0, 50.0, 1e4]], dtype=dtype)
        drawn = varlap.Poisson().sample(outputs, generator())
        assert drawn[0, 0] == 0
        assert drawn.isfinite().all()
        assert (drawn[0, 1:] > 1e17).all()
        finite = varlap.Poisson().log_prob(outputs[:, :1], torch.tensor([[3.0]]))
        assert finite.item() == pytest.approx(-3e4 - math.log(6))


# -- the draws -------------------------------------------------------------------------------------------------------


NUM_ROWS = 20_000


def errors_of_frequency(name: str, drawn: Tensor, law: distributions.Distribution) -> Tensor:
    """How often the draws, [rows, ...], fall into cells of known probability, in standard errors √(p (1 − p)/rows)."""
    if name in ("categorical", "bernoulli", "poisson"):
        values = torch.arange({"categorical": 4, "bernoulli": 2, "poisson": 8}[name])
        cells = [(drawn == value, law.log_prob(torch.full_like(drawn[:1], value)).exp()) for value in values]
    else:
        levels = torch.tensor([0.02, 0.2, 0.5, 0.8, 0.98], dtype=DOUBLE)
        cells = [(drawn.double() < law.icdf(level), level) for level in levels]
    errors = [(hit.double().mean(0) - p) / (p * (1 - p) / len(drawn)).sqrt() for hit, p in cells]
    return torch.stack([error.flatten() for error in errors])


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16, torch.float16], ids=str)
@over_shapes
@over_likelihoods
def test_drawn_labels_have_the_frequencies_of_the_law(name, positions, dtype):
    """20,000 draws for each of up to 24 outputs, 2 to 8 cells each; 5 standard errors.

    A binomial of 20,000 is close to normal where its cell has a chance of 0.02 or more, as nearly all have here: the
    4,000 cells of all 48 tests together raise a false alarm with probability 3e-3 with other seeds (Bonferroni).
    """
    likelihood, outputs, _, _ = make(name, positions, size=1, dtype=dtype)
    rows = outputs.expand(NUM_ROWS, *outputs.shape[1:])
    drawn = likelihood.sample(rows, generator(3))
    law = BUILT_IN[name][2](likelihood.double(), outputs.double())
    if name == "poisson":
        law = distributions.Poisson(outputs.exp().double())  # rounded to half precision, as in its log_prob
    if dtype in (torch.bfloat16, torch.float16) and drawn.is_floating_point() and name not in ("bernoulli", "poisson"):
        # Draws on a grid of half precision: the levels move by its spacing, 1/256 of a value. Compare the moments.
        n, z = NUM_ROWS, (drawn.double() - law.mean) / law.stddev
        assert z.mean(0).abs().max() < 5 / math.sqrt(n) + 0.01
        assert (z.square().mean(0) - 1).abs().max() < 5 * math.sqrt(2 / n) + 0.02
        return
    assert errors_of_frequency(name, drawn, law).abs().max() < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rare_answers_are_drawn_from_half_precision_outputs_too(dtype):
    """p = 0.9985 would round to 1 in bfloat16. 100,000 draws hold 150 ± 12 noes: within 5 standard errors, 6e-7."""
    logits = torch.full((100_000, 1), 6.5, dtype=dtype)
    noes = int((varlap.Bernoulli().sample(logits, generator()) == 0).sum())
    p = 1 - torch.tensor(6.5, dtype=DOUBLE).sigmoid().item()
    assert abs(noes - 1e5 * p) < 5 * math.sqrt(1e5 * p)
    both = varlap.Categorical().sample(torch.cat([logits, torch.zeros_like(logits)], 1), generator())
    assert abs(int(both.sum()) - 1e5 * p) < 5 * math.sqrt(1e5 * p)


@over_likelihoods
def test_positions_and_items_are_drawn_independently(name):
    """The 20,000 products of any two centred entries average to 0 within 5 standard errors: 15 pairs × 6 × 6e-7."""
    likelihood, outputs, _, _ = make(name, positions=(2,), size=2)
    rows = outputs.expand(NUM_ROWS, *outputs.shape).flatten(0, 1)
    drawn = likelihood.sample(rows, generator(4)).double().reshape(NUM_ROWS, -1)
    drawn = drawn[:, :: max(1, drawn.shape[1] // 6)]
    centred = (drawn - drawn.mean(0)) / drawn.std(0)
    for i, j in itertools.combinations(range(centred.shape[1]), 2):
        assert abs((centred[:, i] * centred[:, j]).mean()) < 5 / math.sqrt(NUM_ROWS)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16, torch.float16], ids=str)
@over_shapes
@over_likelihoods
def test_a_draw_has_the_shape_and_type_of_targets_and_can_be_repeated(name, positions, dtype):
    likelihood, outputs, targets, _ = make(name, positions, dtype=dtype)
    state = torch.get_rng_state()
    first, again, other = (likelihood.sample(outputs, generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == targets.shape
    assert first.dtype == (torch.int64 if name == "categorical" else dtype)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    likelihood.check(outputs, first)
    assert likelihood.log_prob(outputs, first).isfinite().all()


@over_likelihoods
def test_a_draw_is_fixed_for_the_network_and_follows_only_a_learnt_noise(name):
    likelihood, outputs, _, _ = make(name)
    drawn = likelihood.sample(outputs.detach(), generator())
    assert drawn.requires_grad == (name == "gaussian")
    if name == "gaussian":
        (gradient,) = torch.autograd.grad(drawn.sum(), likelihood.log_noise)
        torch.testing.assert_close(
            gradient, (drawn - outputs).sum().detach(), rtol=1e-12, atol=0
        )  # d(noise ε) = noise ε


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impossible", [0, 1, 3])
def test_classes_of_probability_zero_are_never_drawn(impossible, dtype):
    outputs = torch.randn(5, 4, generator=generator(), dtype=torch.float32).to(dtype)
    outputs[:, impossible] = -math.inf
    drawn = varlap.Categorical().sample(outputs.repeat(20_000, 1), generator())
    assert set(drawn.unique().tolist()) == {0, 1, 2, 3} - {impossible}
    # The ends of the unit interval, where rounding could reach over: 0, and the last number before 1.
    last = 1 - torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    for level in (0.0, last):
        tape = Tape(numbers=[torch.full((5,), level, dtype=torch.promote_types(dtype, torch.float32))])
        assert impossible not in varlap.Categorical().sample(outputs, tape)


def test_the_last_number_before_one_never_reaches_beyond_the_last_possible_class():
    """10,000 random rows, whose cumulative sums end just above or below 1, with 12 impossible classes at the end."""
    outputs = 3 * torch.randn(10_000, 40, generator=generator())
    outputs[:, 28:] = -math.inf
    tape = Tape(numbers=[torch.full((10_000,), 1 - 2.0**-24)])
    assert varlap.Categorical().sample(outputs, tape).max() < 28


def test_answers_of_probability_zero_and_one_are_certain():
    outputs = torch.tensor([[math.inf, -math.inf]]).expand(1_000, 2)
    assert torch.equal(varlap.Bernoulli().sample(outputs, generator()), torch.tensor([[1.0, 0.0]]).expand(1_000, 2))


# -- ignored labels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored_label", [-100, 255, -1])
def test_ignored_positions_count_for_nothing_and_stay_ignored_in_a_draw(ignored_label):
    likelihood = varlap.Categorical(ignored_label=ignored_label)
    outputs = torch.randn(3, 4, 2, 2, generator=generator(), dtype=DOUBLE, requires_grad=True)
    targets = torch.arange(12).reshape(3, 2, 2) % 4
    ignored = torch.zeros(3, 2, 2, dtype=torch.bool)
    ignored[0, 0, 1] = ignored[2] = True
    law = distributions.Categorical(logits=outputs.movedim(1, -1))
    expected = (law.log_prob(targets) * ~ignored).flatten(1).sum(1)
    marked = targets.masked_fill(ignored, ignored_label)
    log_probs = likelihood.log_prob(outputs, marked)
    torch.testing.assert_close(log_probs, expected, rtol=1e-12, atol=1e-12)
    assert log_probs[2] == 0
    (gradient,) = torch.autograd.grad(log_probs.sum(), outputs)
    assert (gradient.movedim(1, -1)[ignored] == 0).all()
    likelihood.check(outputs, marked)
    drawn = likelihood.sample(outputs, generator(), marked)
    assert torch.equal(drawn == ignored_label, ignored)
    assert torch.equal(drawn[~ignored], likelihood.sample(outputs, generator())[~ignored])  # the rest is not moved
    score = likelihood.score(outputs, torch.ones_like(outputs), marked).movedim(1, -1)
    assert (score[ignored] == 0).all()
    assert (score[~ignored] != 0).any()


# -- the score -------------------------------------------------------------------------------------------------------


def support(law: distributions.Distribution) -> tuple[Tensor, Tensor]:
    """All labels of each position with their probabilities, or a quadrature that is exact for polynomials."""
    column = [-1] + [1] * len(law.batch_shape)
    if isinstance(law, distributions.Normal):
        nodes, weights = (torch.tensor(a).reshape(column) for a in np.polynomial.hermite_e.hermegauss(6))
        return law.mean + law.stddev * nodes, (weights / weights.sum()).expand(-1, *law.batch_shape)
    values = law.enumerate_support() if law.has_enumerate_support else torch.arange(100, dtype=DOUBLE).reshape(column)
    values = values.expand(-1, *law.batch_shape)
    return values, law.log_prob(values).exp()


def enumerated_output_fisher(name: str, likelihood, outputs: Tensor) -> Tensor:
    """E[s sᵀ] of one item, for s = ∂ log p(y | outputs)/∂outputs, position by position (they are independent)."""
    law = BUILT_IN[name][2]
    values, probs = (t.detach().flatten(1) for t in support(law(likelihood, outputs)))
    fisher = torch.zeros(outputs.numel(), outputs.numel(), dtype=DOUBLE)
    for position in range(values.shape[1]):
        for value, p in zip(values[:, position], probs[:, position], strict=True):
            leaf = outputs.clone().requires_grad_()
            own = law(likelihood, leaf)
            log_prob = own.log_prob(value.expand(own.batch_shape)).flatten()[position]
            score = torch.autograd.grad(log_prob, leaf)[0].flatten()
            fisher += p * torch.outer(score, score)
    return fisher


@pytest.mark.parametrize("positions", [(), (2, 1)], ids=["vectors", "images"])
@over_likelihoods
def test_covariance_of_the_score_is_the_fisher_found_by_enumeration(name, positions):
    likelihood, outputs, _, _ = make(name, positions, size=1)
    units = torch.eye(outputs.numel(), dtype=DOUBLE).reshape(-1, *outputs.shape)
    columns = torch.stack([likelihood.score(outputs, unit).flatten() for unit in units]).detach()
    expected = enumerated_output_fisher(name, likelihood, outputs)
    torch.testing.assert_close(columns.T @ columns, expected, rtol=1e-10, atol=1e-10)


@over_shapes
@over_likelihoods
def test_score_is_linear_in_the_noise(name, positions):
    likelihood, outputs, targets, _ = make(name, positions)
    one, two = (torch.randn(outputs.shape, generator=generator(seed), dtype=DOUBLE) for seed in (1, 2))
    score = functools.partial(likelihood.score, outputs, targets=targets)
    torch.testing.assert_close(score(2 * one - 3 * two), 2 * score(one) - 3 * score(two), rtol=1e-12, atol=1e-12)
    assert score(one).shape == outputs.shape


@over_likelihoods
def test_score_can_be_differentiated_in_the_outputs(name):
    likelihood, outputs, _, _ = make(name)
    noise = torch.randn(outputs.shape, generator=generator(1), dtype=DOUBLE)
    assert torch.autograd.gradcheck(lambda o: likelihood.score(o, noise) + 0 * o, (outputs.requires_grad_(),))


def test_score_of_a_class_whose_probability_is_zero_has_a_finite_derivative():
    outputs = torch.tensor([[0.0, -1e3, 1.0], [0.0, -math.inf, 1.0]], dtype=DOUBLE, requires_grad=True)
    score = varlap.Categorical().score(outputs, torch.ones_like(outputs))
    assert (score[:, 1] < 1e-100).all()
    (gradient,) = torch.autograd.grad(score.square().sum(), outputs)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


# -- predictions -----------------------------------------------------------------------------------------------------


@over_shapes
@over_likelihoods
def test_a_prediction_is_the_laws_probabilities_or_its_mean_and_variance(name, positions):
    likelihood, outputs, targets, law = make(name, positions)
    prediction = likelihood.predict(outputs)
    if name in ("categorical", "bernoulli"):
        assert prediction.mean is prediction.variance is None
        assert prediction.probs.shape == outputs.shape
        expected = law.probs.movedim(-1, 1) if name == "categorical" else law.probs
        torch.testing.assert_close(prediction.probs, expected, rtol=1e-12, atol=1e-12)
    else:
        assert prediction.probs is None
        assert prediction.mean.shape == prediction.variance.shape == targets.shape
        torch.testing.assert_close(prediction.mean, law.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(prediction.variance, law.variance, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", [0.01, 0.5, 0.95, 1 - 1e-12, math.nextafter(1, 0)])
def test_an_interval_leaves_the_rest_of_its_level_in_the_normals_two_tails(level):
    mean, variance = torch.tensor([3.0], dtype=DOUBLE), torch.tensor([4.0], dtype=DOUBLE)
    low, high = varlap.Prediction(mean=mean, variance=variance).interval(level)
    for distance in (low - mean, mean - high):
        tail = torch.special.ndtr(distance / variance.sqrt()).item()
        assert 2 * tail == pytest.approx(1 - level, rel=1e-9)
    assert varlap.metrics.width(variance, level) == pytest.approx((high - low).item(), rel=1e-12)


@pytest.mark.parametrize(
    "ways", [{}, {"how": "sampled"}, {"how": "linearised"}, {"how": "linearised", "closed_form": True}]
)
def test_an_interval_of_counts_does_not_go_below_zero(ways):
    bnn = varlap.BNN(torch.nn.Linear(2, 1), "poisson")
    with varlap.errors.without_warnings():
        prediction = bnn.predict(torch.randn(20, 2), **ways)
    low, high = prediction.interval(0.99)
    assert (prediction.mean - (high - prediction.mean) < 0).any()  # by the normal distribution alone
    assert low.min() == 0
    assert (low <= prediction.mean).all()


@pytest.mark.parametrize("level", [0, 1, 95])
def test_a_level_that_is_no_probability_is_refused(level):
    prediction = varlap.Prediction(mean=torch.zeros(1), variance=torch.ones(1))
    with pytest.raises(ConfigError, match=rf"level={level} must be between 0 and 1; 0.95 is usual"):
        prediction.interval(level)


def test_a_prediction_of_classes_has_no_interval():
    with pytest.raises(ConfigError, match=r"no variance: std and interval are for regression; see \.entropy"):
        varlap.Prediction(probs=torch.ones(1, 1)).interval()
