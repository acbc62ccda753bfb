"""Claims about calling an objective: `loss` is as any scalar, draws repeat, and nothing else in the world moves."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import varlap
from cases import CASES, FAST, LIKELIHOOD_CASES
from varlap.errors import NonFiniteError

N, BETA = 20, 0.7

OBJECTIVES = {
    "map": varlap.MAP,
    "vi": varlap.VI,
    "vi-4": lambda n, beta: varlap.VI(n, beta, num_samples=4),
    "vl": lambda n, beta: varlap.VL(n, beta, curvature=varlap.Fisher()),
    "vl-remembered": lambda *args: varlap.VL(*args, curvature=FAST),
    "vl-quiet": lambda n, beta: varlap.VL(n, beta, curvature=varlap.Fisher(gradient="quiet")),
    "vl-whole": lambda n, beta: varlap.VL(n, beta, curvature=varlap.Fisher(gradient="whole")),
    "vl-part": lambda n, beta: varlap.VL(n, beta, curvature=varlap.Fisher(fraction=0.6, groups=2)),
    "vl-exact": lambda n, beta: varlap.VL(n, beta, curvature=varlap.ExactFisher()),
    "vl-empirical": lambda n, beta: varlap.VL(n, beta, curvature=varlap.EmpiricalFisher()),
    "vl-skipped": lambda n, beta: varlap.VL(n, beta, curvature=varlap.Fisher(every=1000)),
    "vl-hessian": varlap.VLHessian,
}
DRAWING = [
    "vi",
    "vi-4",
    "vl",
    "vl-remembered",
    "vl-quiet",
    "vl-whole",
    "vl-part",
    "vl-hessian",
]  # whose values depend on the step

over_objectives = pytest.mark.parametrize("name", OBJECTIVES)


def named_case(name):
    return next(case for case in CASES if case.name == name)


def collected(bnn):
    return {name: p.grad.clone() for name, p in bnn.named_parameters() if p.grad is not None}


def gradients(bnn, objective, x, y, **options):
    bnn.zero_grad()
    objective(bnn, x, y, **options).loss.backward()
    found = collected(bnn)
    bnn.zero_grad()
    return found


def assert_equal(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= tolerance, name


# -- loss is as any scalar ---------------------------------------------------------------------------------------


@over_objectives
def test_gradients_accumulate_over_calls(name):
    bnn, x, y = CASES[0].make()
    objective = OBJECTIVES[name](N, BETA)
    first, second = (gradients(bnn, objective, x, y, step=step) for step in (5, 6))
    for step in (5, 6):
        objective(bnn, x, y, step=step).loss.backward()
    assert_equal(collected(bnn), {key: first[key] + second[key] for key in first})


@over_objectives
def test_a_scaled_loss_scales_every_gradient(name):
    bnn, x, y = CASES[0].make()
    objective = OBJECTIVES[name](N, BETA)
    expected = gradients(bnn, objective, x, y, step=5)
    (1024 * objective(bnn, x, y, step=5).loss).backward()
    assert_equal(collected(bnn), {key: 1024 * value for key, value in expected.items()})


def test_a_gradient_scaler_takes_the_same_step():
    after = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        bnn, x, y = CASES[0].make()
        optimizer = varlap.adam(bnn, lr=1e-2)
        loss = OBJECTIVES["vl"](N, BETA)(bnn, x, y, step=5).loss
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        after.append(torch.cat([p.detach().flatten() for p in bnn.parameters()]))
    before = torch.cat([p.detach().flatten() for p in CASES[0].make()[0].parameters()])
    assert (after[0] - before).abs().min() > 1e-4
    assert torch.equal(*after)


@over_objectives
def test_loss_adds_to_other_losses(name):
    bnn, x, y = CASES[0].make()
    objective = OBJECTIVES[name](N, BETA)
    expected = gradients(bnn, objective, x, y, step=5)
    expected["network.0.weight"] += 3
    other = 3 * bnn.network[0].weight.sum()
    (objective(bnn, x, y, step=5).loss + other).backward()
    assert_equal(collected(bnn), expected)


def test_a_second_backward_doubles_the_gradients_of_a_retained_graph_and_is_refused_without():
    bnn, x, y = CASES[0].make()
    expected = gradients(bnn, OBJECTIVES["vl"](N, BETA), x, y, step=5)
    loss = OBJECTIVES["vl"](N, BETA)(bnn, x, y, step=5).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert_equal(collected(bnn), {key: 2 * value for key, value in expected.items()})
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
    assert_equal(collected(bnn), {key: 2 * value for key, value in expected.items()})


def test_weights_may_move_between_the_call_and_backward():
    """The gradients are those of the call: what happens to the weights in between cannot change them."""
    bnn, x, y = CASES[0].make()
    expected = gradients(bnn, OBJECTIVES["vl"](N, BETA), x, y, step=5)
    loss = OBJECTIVES["vl"](N, BETA)(bnn, x, y, step=5).loss
    with torch.no_grad():
        bnn.network[0].weight.add_(1)
    loss.backward()
    assert_equal(collected(bnn), expected)


@over_objectives
def test_values_without_gradients_are_the_same_and_carry_no_graph(name):
    bnn, x, y = CASES[0].make()
    objective = OBJECTIVES[name](N, BETA)
    expected = objective(bnn, x, y, step=5)
    with torch.no_grad():
        found = objective(bnn, x, y, step=5)
    assert expected.loss.requires_grad
    for field in ("loss", "elbo", "log_likelihood", "curvature", "kl"):
        value = getattr(found, field)
        assert torch.equal(value, getattr(expected, field)), field
        assert not value.requires_grad
    for field in ("elbo", "log_likelihood", "curvature", "kl"):
        assert not getattr(expected, field).requires_grad, field


def test_values_without_gradients_are_the_same_when_the_curvature_is_remembered():
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(N, BETA, curvature=FAST)
    objective(bnn, x, y, step=0)
    for step in (3, 4):
        with torch.no_grad():
            found = objective(bnn, x, y, step=step).loss
        assert found == objective(bnn, x, y, step=step).loss, step


@over_objectives
def test_elbo_is_minus_loss_and_the_sum_of_its_terms(name):
    bnn, x, y = CASES[0].make()
    terms = OBJECTIVES[name](N, BETA)(bnn, x, y, step=4)
    assert torch.equal(terms.elbo, -terms.loss)
    assert torch.equal(terms.elbo, terms.log_likelihood - terms.curvature - BETA * terms.kl)
    assert (terms.curvature != 0) == (name.startswith("vl") and name != "vl-skipped")


# -- which parameters get a gradient -----------------------------------------------------------------------------


def test_map_leaves_log_sigma_without_a_gradient():
    bnn, x, y = CASES[0].make()
    varlap.MAP(N, BETA)(bnn, x, y).loss.backward()
    assert all(log_sigma.grad is None for log_sigma in bnn.log_sigma.values())
    assert all(mean.grad is not None for mean in bnn.means().values())


@over_objectives
def test_unused_parameters_get_the_priors_gradient_alone(name):
    """A Bayesian one is pulled to the prior, a point estimate by nothing; frozen ones have no gradient at all."""
    for beta in (BETA, 0.0):
        bnn, x, y = named_case("shared-frozen-unused").make(select=lambda name, p: "frozen" not in name)
        found = gradients(bnn, OBJECTIVES[name](N, beta), x, y)
        scale = bnn.prior_scale["unused"]
        assert_equal({"": found["network.unused"]}, {"": beta / N * bnn.network.unused.detach() / scale**2}, 1e-15)
        if name != "map":
            expected = beta / N * ((2 * bnn.log_sigma["unused"].detach()).exp() / scale**2 - 1)
            assert_equal({"": found["log_sigma.unused"]}, {"": expected}, 1e-15)
        assert "network.frozen.weight" not in found

    bnn, x, y = named_case("shared-frozen-unused").make(select="head.*")
    found = gradients(bnn, OBJECTIVES[name](N, BETA), x, y)
    assert torch.equal(found["network.unused"], torch.zeros(2, dtype=torch.float64))
    assert found["network.first.weight"].abs().min() > 0


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "map"])
def test_a_frozen_bayesian_mean_gets_no_gradient_but_its_log_sigma_does(name):
    bnn, x, y = CASES[0].make()
    expected = gradients(bnn, OBJECTIVES[name](N, BETA), x, y, step=5)
    del expected["network.0.weight"]
    bnn.network[0].weight.requires_grad_(False)
    found = gradients(bnn, OBJECTIVES[name](N, BETA), x, y, step=5)
    assert not bnn.network[0].weight.requires_grad
    assert found["log_sigma.0.weight"].abs().min() > 0
    assert_equal(found, expected, 1e-15)


# The quiet gradient is that of no single value: only its mean over the labels is.
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "vl-quiet"])
def test_inputs_that_ask_for_it_receive_the_right_gradient(name):
    """Against a central difference in a random direction, for a leaf and for features that another network made."""
    bnn, x, y = next(case for case in CASES if case.name == "dicts").make()
    objective = OBJECTIVES[name](N, BETA)
    bnn.likelihood.sample = lambda outputs, generator, targets: (targets + 1) % 3  # drawn labels that cannot move
    direction = torch.randn(x["left"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x["left"].requires_grad_(True)
    objective(bnn, x, y, step=5).loss.backward()
    claimed = (x["left"].grad * direction).sum()
    assert x["right"].grad is None
    with torch.no_grad():
        above, below = (objective(bnn, x | {"left": x["left"] + h * direction}, y, step=5).loss for h in (1e-5, -1e-5))
    assert abs(claimed - (above - below) / 2e-5) < 1e-6 * x["left"].grad.norm() * direction.norm()

    doubled = x["left"].detach().requires_grad_(True)
    objective(bnn, x | {"left": 2 * (doubled / 2)}, y, step=5).loss.backward()
    assert torch.equal(doubled.grad, x["left"].grad)


# -- the KL ------------------------------------------------------------------------------------------------------


@over_objectives
@pytest.mark.parametrize("num_data", [5, 20, 50_000])
def test_kl_is_divided_by_num_data_and_never_by_the_batch(name, num_data):
    bnn, x, y = CASES[0].make()
    kl = bnn.kl().detach()
    if name == "map":
        kl = sum(0.5 * (mean.detach() / bnn.prior_scale[n]).square().sum() for n, mean in bnn.means().items())
    for size in (1, 3, 5):
        terms = OBJECTIVES[name](num_data, BETA)(bnn, x[:size], y[:size], step=5)
        assert abs(terms.kl - kl / num_data) <= 1e-14 * kl / num_data


@over_objectives
def test_beta_multiplies_the_gradient_of_the_kl_and_nothing_else(name):
    bnn, x, y = CASES[0].make()
    cold, warm = (gradients(bnn, OBJECTIVES[name](N, beta), x, y, step=5) for beta in (0.0, BETA))
    (BETA / N * bnn.kl()).backward()
    prior = collected(bnn)
    for key, gradient in cold.items():
        assert (warm[key] - gradient - prior[key]).abs().max() < 1e-14, key


# -- draws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWING)
def test_a_step_determines_the_draws(name):
    bnn, x, y = named_case("mlp-gaussian").make()  # whose draws are continuous: none is the same by chance

    def loss(step=4, seed=0, **options):
        objective = OBJECTIVES[name](N, BETA)
        objective.seed = seed
        torch.rand(1)  # the caller's generator plays no part
        return objective(bnn, x, y, step=step, **options).loss.item()

    assert loss() == loss()
    assert len({loss(), loss(step=8), loss(micro_batch=1), loss(seed=1), loss(step=8, micro_batch=1)}) == 5


@pytest.mark.parametrize("name", ["map", "vl-exact", "vl-empirical"])
def test_objectives_without_noise_are_the_same_in_every_step(name):
    bnn, x, y = CASES[0].make()
    objective = OBJECTIVES[name](N, BETA)
    assert objective(bnn, x, y, step=5).loss == objective(bnn, x, y, step=6, micro_batch=2).loss


@pytest.mark.parametrize("name", DRAWING)
def test_an_objective_counts_its_own_calls_as_steps(name):
    bnn, x, y = CASES[0].make()
    counting, told = OBJECTIVES[name](N, BETA), OBJECTIVES[name](N, BETA)
    for step in range(4):
        with torch.no_grad():  # a look at the values is no step
            peek = counting(bnn, x, y).loss
        expected = told(bnn, x, y, step=step).loss
        assert counting(bnn, x, y).loss == expected == peek
    assert (counting.num_calls, told.num_calls) == (4, 0)


class Counting(nn.Module):
    """Replaces its buffer by a new tensor at each training pass, instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count = self.count + 1
        return self.layer(x)


class Dropping(nn.Module):
    """Dropout between two linear layers; remembers the mask that it saw last."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.dropout(torch.tanh(self.first(x)))
        self.mask = hidden.detach() != 0
        return self.last(hidden)


@over_objectives
def test_the_callers_generators_are_untouched_and_a_step_determines_the_dropout_mask(name):
    torch.manual_seed(3)
    _, x, y = CASES[0].make()
    bnn = varlap.BNN(Dropping().double())

    def mask(step):
        OBJECTIVES[name](N, BETA)(bnn, x, y, step=step).loss.backward()
        return bnn.network.mask

    first, other = mask(4), mask(8)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    again = mask(4)
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    assert before[0] == after[0]
    assert np.array_equal(before[1][1], after[1][1])
    assert before[1][2:] == after[1][2:]
    assert torch.equal(before[2], after[2])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# -- running statistics ------------------------------------------------------------------------------------------


@over_objectives
def test_running_statistics_move_once_a_call(name):
    """The first call included, which also looks for kinks by a forward pass of its own."""
    bnn, x, y = named_case("batch-norm").make()
    norm, objective = bnn.network[1], OBJECTIVES[name](N, BETA)
    for call in range(3):
        before = norm.running_mean.clone()
        objective(bnn, x, y, step=call).loss.backward()
        assert norm.num_batches_tracked == call + 1
        if not name.startswith("vi"):  # whose forward passes are not at the means
            batch_mean = bnn.network[0](x).detach().mean((0, 2, 3))
            assert (norm.running_mean - (0.9 * before + 0.1 * batch_mean)).abs().max() < 1e-15
        else:
            assert (norm.running_mean - before).abs().min() > 0


def test_running_statistics_of_several_samples_are_those_of_the_first():
    moved = []
    for num_samples in (1, 4):
        bnn, x, y = named_case("batch-norm").make()
        varlap.VI(N, num_samples=num_samples)(bnn, x, y, step=5)
        moved.append(bnn.network[1].running_mean)
    assert torch.equal(*moved)


@over_objectives
def test_running_statistics_stay_in_evaluation_mode_and_after_a_failed_call(name):
    bnn, x, y = named_case("batch-norm").make()
    buffers = {key: buffer.clone() for key, buffer in bnn.network.named_buffers()}
    OBJECTIVES[name](N, BETA)(bnn.eval(), x, y).loss.backward()
    assert_equal(dict(bnn.network.named_buffers()), buffers)
    with torch.no_grad():
        bnn.train().network[-1].bias[0] = torch.inf
    with pytest.raises(NonFiniteError, match="step 7: the"):
        OBJECTIVES[name](N, BETA)(bnn, x, y, step=7)
    assert_equal(dict(bnn.network.named_buffers()), buffers)


@pytest.mark.parametrize(
    "name", sorted(OBJECTIVES.keys() - {"vl-part", "vl-remembered"})
)  # these pass the batch in two parts
def test_buffers_that_a_network_replaces_are_counted_once_too(name):
    bnn, (_, x, y) = varlap.BNN(Counting().double()), CASES[0].make()
    objective = OBJECTIVES[name](N, BETA)
    for call in range(2):
        objective(bnn, x, y, step=call)
        assert bnn.network.count == call + 1


def test_statistics_of_a_part_in_training_mode_stay_after_a_failed_call():
    bnn, x, y = named_case("batch-norm").make()
    bnn.eval().network[1].train()
    buffers = {key: buffer.clone() for key, buffer in bnn.network.named_buffers()}
    with torch.no_grad():
        bnn.network[-1].bias[0] = torch.inf
    with pytest.raises(NonFiniteError):
        varlap.MAP(N)(bnn, x, y)
    assert_equal(dict(bnn.network.named_buffers()), buffers)


# -- weights per item --------------------------------------------------------------------------------------------
# On the whole data, N times the ELBO is Σ wᵢ (log pᵢ − ½ Σ σ² fᵢ) − β KL. So an item of weight 2 is an item that is
# there twice, and one of weight 0 is not there, if N counts what is there; per datum the two differ by N.

ADDITIVE = {  # those whose data term is a sum over items for the same noise
    "map": varlap.MAP,
    "vi": varlap.VI,
    "vl-exact": lambda n, beta: varlap.VL(n, beta, curvature=varlap.ExactFisher()),
    "vl-hessian": varlap.VLHessian,
}


@pytest.mark.parametrize("case", LIKELIHOOD_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ADDITIVE)
@pytest.mark.parametrize("items", [[0, 1, 2, 2, 3, 4], [0, 1, 3, 4], [2, 2, 2, 4]], ids=["twice", "left-out", "both"])
def test_a_weight_counts_how_often_an_item_is_there(case, name, items):
    bnn, x, y = case.make()
    weights = torch.bincount(torch.tensor(items), minlength=len(y)).double()

    def whole(x, y, **options):
        bnn.zero_grad()
        terms = ADDITIVE[name](len(y), BETA)(bnn, x, y, step=5, **options)
        (len(y) * terms.loss).backward()
        return collected(bnn) | {"loss": len(y) * terms.loss.detach()}

    found, expected = whole(x, y, weights=weights), whole(x[items], y[items])
    scale = max(value.abs().max() for value in expected.values())
    assert_equal(found, expected, 1e-13 * scale)
    assert abs(found["loss"] - whole(x, y)["loss"]) > 1e-3  # the weights are felt


def test_weights_enter_the_sampled_fisher_by_their_root():
    """300 draws, three tests: |z| < 4.5 has a false-alarm rate of 2e-5. Without the root f would be Σ w² fᵢ."""
    bnn, x, y = CASES[0].make()
    weights = torch.tensor([0.0, 0.5, 1.0, 2.0, 6.0], dtype=torch.float64)
    with torch.no_grad():
        exact = varlap.VL(N, curvature=varlap.ExactFisher())(bnn, x, y, weights=weights).curvature
        for fisher in (varlap.Fisher(), varlap.Fisher(gradient="whole"), varlap.Fisher(fraction=0.6, groups=2)):
            objective = varlap.VL(N, curvature=fisher)
            draws = torch.stack([objective(bnn, x, y, step=t, weights=weights).curvature for t in range(300)])
            standard_error = draws.std() / len(draws) ** 0.5
            assert abs(draws.mean() - exact) < 4.5 * standard_error
            assert abs(draws.mean() - 2 * exact) > 10 * standard_error


def test_a_copy_of_the_network_gives_the_same_bits():
    bnn, x, y = named_case("batch-norm").make()
    twin = copy.deepcopy(bnn)
    assert_equal(gradients(twin, varlap.VL(N, BETA), x, y), gradients(bnn, varlap.VL(N, BETA), x, y))


@pytest.mark.parametrize("of_likelihood", [False, True], ids=["weight", "noise"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_hook_on_a_parameter_sees_the_final_gradient_once(name, of_likelihood):
    """On the way there it would scale the sampled gradient too, and with it the curvature."""
    results = []
    for hooked in (False, True):
        bnn, x, y = next(case for case in CASES if case.name == "mlp-gaussian").make()
        parameter = bnn.likelihood.log_noise if of_likelihood else next(iter(bnn.means().values()))
        seen = []
        if hooked:
            parameter.register_hook(lambda gradient, seen=seen: seen.append(gradient) or 2 * gradient)
        terms = OBJECTIVES[name](N, BETA)(bnn, x, y, step=0)
        assert not seen
        terms.loss.backward()
        assert len(seen) == hooked
        results.append((terms.elbo.detach(), parameter.grad / (1 + hooked)))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-12, atol=0)


def test_hook_that_the_network_removes_stays_removed():
    class Rehooked(nn.Linear):
        handle = None

        def forward(self, x):
            if self.handle is not None:
                self.handle.remove()
            self.handle = self.weight.register_hook(lambda gradient: gradient)
            return super().forward(x)

    bnn = varlap.BNN(Rehooked(2, 3))
    for _ in range(3):
        varlap.MAP(N)(bnn, torch.ones(4, 2), torch.tensor([0, 1, 2, 0])).loss.backward()
    assert len(bnn.network.weight._backward_hooks) == 1
