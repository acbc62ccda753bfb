"""Claims about variances: the closed form and its running Fisher, skipped steps, warm-up, and the convergence gap."""

import copy

import pytest
import torch
from torch import nn

import varlap
from cases import CASES
from varlap.errors import ConfigError

N, BETA = 20, 0.7


def paper_vl(num_data, beta, **options):
    """Curvature on the whole batch in every step."""
    return varlap.VL(num_data, beta, curvature=varlap.Fisher(), **options)


def closed_form(curvature=None, beta=BETA, warmup=0, **options):
    curvature = varlap.ExactFisher() if curvature is None else curvature
    return varlap.VL(N, beta, curvature=curvature, variances="closed-form", beta_warmup_steps=warmup, **options)


def clone(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def exact_fisher(bnn, x, y):
    """f = (1/S) Σᵢ Σ_c (∂ u_c·outputsᵢ)²: for classes, by the probability of each label."""
    means, total = bnn.means(), {name: torch.zeros_like(mean) for name, mean in bnn.means().items()}
    log_probs = bnn.outputs(x).log_softmax(1)
    for item in log_probs:
        for value in item:
            g = torch.autograd.grad(value, list(means.values()), retain_graph=True)
            for name, part in zip(means, g, strict=True):
                total[name] = total[name] + value.exp().detach() * part.square() / len(y)
    return clone(total)


def running_fisher(objective, bnn, beta=BETA):
    """What the closed form takes for f, read off the variances that it sets."""
    bnn = copy.deepcopy(bnn)
    objective.update_variances(bnn)
    return {
        name: ((-2 * log_sigma.detach()).exp() - 1 / bnn.prior_scale[name] ** 2) * beta / N
        for name, log_sigma in bnn.log_sigma.items()
    }


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= tolerance, name


def optimal_log_sigma(bnn, f, beta):
    """σ² = β/(N f + β/s²), weight by weight."""
    return {name: 0.5 * (beta / (N * f[name] + beta / bnn.prior_scale[name] ** 2)).log() for name in bnn.log_sigma}


# -- the running Fisher ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 0.999])
def test_running_mean_of_a_constant_is_that_constant_from_the_first_step_on(decay):
    bnn, x, y = CASES[0].make()
    f = exact_fisher(bnn, x, y)
    objective = closed_form(fisher_decay=decay)
    for _ in range(4):
        objective(bnn, x, y)
        assert_close(running_fisher(objective, bnn), f, 1e-13)
    assert max(tensor.abs().max() for tensor in f.values()) > 1e-2


def test_running_mean_is_the_exponentially_weighted_average():
    bnn, x, y = CASES[0].make()
    objective = closed_form(fisher_decay=0.8)
    parts = [slice(0, 2), slice(2, 3), slice(1, 5), slice(0, 5)]
    fishers = [exact_fisher(bnn, x[part], y[part]) for part in parts]
    for part in parts:
        objective(bnn, x[part], y[part])
    shares = torch.tensor([0.8**3, 0.8**2, 0.8, 1.0], dtype=torch.float64)
    shares /= shares.sum()
    expected = {name: sum(w * f[name] for w, f in zip(shares, fishers, strict=True)) for name in fishers[0]}
    assert_close(running_fisher(objective, bnn), expected, 1e-13)


def test_looking_at_values_does_not_enter_the_running_mean():
    bnn, x, y = CASES[0].make()
    objective = closed_form()
    with torch.no_grad():
        objective(bnn, x, y)
    before = clone(bnn.log_sigma)
    objective.update_variances(bnn)  # nothing is known yet, so nothing moves
    assert_close(clone(bnn.log_sigma), before, 0)


def test_the_weight_of_skipped_steps_never_enters_the_running_mean():
    """Fisher(every=4) sees in steps 0 to 8 what Fisher() sees in steps 0, 4, 8; in the loss it weighs four times."""
    bnn, x, y = CASES[0].make()
    skipping, steady = closed_form(varlap.Fisher(every=4)), closed_form(varlap.Fisher())
    for step in range(9):
        terms = skipping(bnn, x, y, step=step)
        if step % 4 == 0:
            assert abs(terms.curvature - 4 * steady(bnn, x, y, step=step).curvature) < 1e-14
        else:
            assert terms.curvature == 0
    skipping.update_variances(bnn)
    found = clone(bnn.log_sigma)
    steady.update_variances(bnn)
    assert_close(found, clone(bnn.log_sigma), 0)


# -- the closed form ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_update_sets_the_closed_form_where_the_gradient_in_log_sigma_vanishes(case):
    """For one variance that is the optimum of the one; for empirical Bayes, the fixed point with the prior's scale."""
    bnn, x, y = case.make()
    objective = closed_form()
    objective(bnn, x, y)
    for _ in range(300 if case.name == "empirical-bayes" else 1):
        objective.update_variances(bnn)
    varlap.VL(N, BETA, curvature=varlap.ExactFisher())(bnn, x, y).loss.backward()
    for log_sigma in bnn.log_sigma.values():
        assert log_sigma.grad.abs().max() < 1e-12
        assert (log_sigma <= max(bnn.prior_scale[n].log().max() for n in bnn.prior_scale)).all()


def test_one_variance_takes_the_mean_precision_of_all_weights():
    bnn, x, y = next(case for case in CASES if case.name == "one-variance").make()
    objective = closed_form()
    objective(bnn, x, y)
    objective.update_variances(bnn)
    f = exact_fisher(bnn, x, y)
    precisions = torch.cat([(N * f[n] + BETA / bnn.prior_scale[n] ** 2).flatten() for n in f])
    assert len(list(bnn.log_sigma.parameters())) == 1
    (log_sigma,) = bnn.log_sigma.parameters()
    assert abs((2 * log_sigma).exp() - BETA / precisions.mean()) < 1e-14


def test_closed_form_variances_get_no_gradient_and_learnt_ones_are_left_alone_by_the_update():
    bnn, x, y = CASES[0].make()
    closed_form()(bnn, x, y).loss.backward()
    assert all(log_sigma.grad is None for log_sigma in bnn.log_sigma.values())
    assert all(mean.grad is not None for mean in bnn.means().values())
    learnt, before = varlap.VL(N, BETA), clone(bnn.log_sigma)
    learnt(bnn, x, y)
    learnt.update_variances(bnn)
    assert_close(clone(bnn.log_sigma), before, 0)


def test_means_get_the_same_gradient_whether_variances_are_learnt_or_closed_form():
    found = []
    for objective in (closed_form(varlap.Fisher()), paper_vl(N, BETA)):
        bnn, x, y = CASES[0].make()
        objective(bnn, x, y, step=3).loss.backward()
        found.append({name: mean.grad for name, mean in bnn.means().items()})
    assert_close(*found, 0)


# -- skipped steps -----------------------------------------------------------------------------------------------


def test_every_kth_step_with_weight_k_averages_to_every_step():
    """With a fixed batch, the mean over k steps of loss and gradients is that of a step that always has curvature."""
    bnn, x, y = CASES[0].make()

    def loss_and_gradients(every, step):
        bnn.zero_grad()
        loss = varlap.VL(N, BETA, curvature=varlap.Fisher(every=every))(bnn, x, y, step=step).loss
        loss.backward()
        return {name: p.grad.clone() for name, p in bnn.named_parameters()} | {"loss": loss.detach()}

    steps = [loss_and_gradients(3, step) for step in (6, 7, 8)]
    expected = loss_and_gradients(1, 6)
    average = {name: sum(step[name] for step in steps) / 3 for name in expected}
    assert_close(average, expected, 1e-14)
    assert abs(steps[0]["loss"] - steps[1]["loss"]) > 1e-3


@pytest.mark.parametrize("kind", [varlap.Fisher, varlap.EmpiricalFisher, varlap.Hessian])
def test_skipped_steps_have_no_curvature_and_the_others_k_times_theirs(kind):
    bnn, x, y = CASES[0].make()
    objective_type = varlap.VLHessian if kind is varlap.Hessian else varlap.VL
    values = [
        [objective_type(N, curvature=kind(every=every))(bnn, x, y, step=step).curvature for step in range(7)]
        for every in (1, 3)
    ]
    for step in range(7):
        assert abs(values[1][step] - (3 * values[0][step] if step % 3 == 0 else 0)) < 1e-13
    assert values[0][0] != 0


def loss_gradients(bnn, objective, x, y, step):
    bnn.zero_grad()
    terms = objective(bnn, x, y, step=step)
    terms.loss.backward()
    found = {name: p.grad.clone() for name, p in bnn.named_parameters() if p.grad is not None}
    return found | {"curvature": terms.curvature, "loss": terms.loss.detach()}


@pytest.mark.parametrize("name", ["mlp-categorical", "mlp-gaussian", "subset"])
def test_memory_serves_the_average_of_past_evaluations_in_every_step_with_weight_one(name):
    """With weights that stay, penalty and gradients are the weighted averages of what was evaluated in steps before.

    The first evaluation serves at once.
    """
    bnn, x, y = next(case for case in CASES if case.name == name).make()
    skipped = varlap.VL(N, BETA, curvature=varlap.Fisher(every=1000))
    without = loss_gradients(bnn, skipped, x, y, step=1)
    remembering = varlap.VL(N, BETA, curvature=varlap.Fisher(every=2, memory=0.6))
    evaluations = []
    for step in range(6):
        served = evaluations.copy()
        if step % 2 == 0:
            evaluated = loss_gradients(bnn, paper_vl(N, BETA), x, y, step)
            evaluations.append({key: value - without[key] for key, value in evaluated.items()})
        served = served or evaluations
        shares = [0.6 ** (len(served) - 1 - age) for age in range(len(served))]
        expected = {
            key: base + sum(w * e[key] for w, e in zip(shares, served, strict=True)) / sum(shares)
            for key, base in without.items()
        }
        assert_close(loss_gradients(bnn, remembering, x, y, step), expected, 1e-13)
    assert evaluations[0]["curvature"] > 1e-3


@pytest.mark.parametrize("step", [0, 1, 3])
def test_memory_begins_in_the_first_step_whatever_its_number(step):
    """A loop may count from one, or go on from elsewhere; later evaluations keep to their turn."""
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(N, BETA, curvature=varlap.Fisher(every=4, memory=0.5))
    first = objective(bnn, x, y, step=step).curvature
    assert torch.equal(first, paper_vl(N, BETA)(bnn, x, y, step=step).curvature)
    assert first > 0
    assert objective(bnn, x, y, step=5).curvature == first
    objective(bnn, x, y, step=8)
    assert objective(bnn, x, y, step=9).curvature != first


# -- warm-up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [varlap.MAP, varlap.VI, paper_vl, varlap.VLHessian])
def test_beta_ramps_up_linearly_and_the_loss_uses_it(kind):
    bnn, x, y = CASES[0].make()
    objective = kind(N, BETA, beta_warmup_steps=4)
    for step, share in enumerate([0.25, 0.5, 0.75, 1.0, 1.0, 1.0]):
        terms = objective(bnn, x, y)
        assert abs(terms.beta - share * BETA) < 1e-15
        assert torch.equal(terms.loss, kind(N, terms.beta)(bnn, x, y, step=step).loss)


def test_closed_form_uses_the_beta_of_the_step():
    bnn, x, y = CASES[0].make()
    objective, f = closed_form(warmup=4), exact_fisher(bnn, x, y)
    for share in (0.25, 0.5, 0.75, 1.0, 1.0):
        objective(bnn, x, y)
        objective.update_variances(bnn)
        assert_close(clone(bnn.log_sigma), optimal_log_sigma(bnn, f, share * BETA), 1e-12)


# -- resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0.0, 0.8])
@pytest.mark.parametrize("variances", ["learnt", "closed-form"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(variances, memory):
    def start():
        bnn, x, y = CASES[0].make()
        fisher = varlap.Fisher(every=2, fraction=0.6, memory=memory)
        objective = varlap.VL(N, BETA, curvature=fisher, variances=variances, beta_warmup_steps=5)
        return bnn, objective, varlap.adam(bnn, lr=1e-2), x, y

    def run(bnn, objective, optimizer, x, y, num_steps):
        for _ in range(num_steps):
            optimizer.zero_grad()
            objective(bnn, x, y).loss.backward()
            optimizer.step()
            objective.update_variances(bnn)

    bnn, objective, optimizer, x, y = start()
    run(bnn, objective, optimizer, x, y, 3)
    states = [copy.deepcopy(part.state_dict()) for part in (bnn, objective, optimizer)]
    run(bnn, objective, optimizer, x, y, 4)

    resumed = start()
    with torch.no_grad():
        resumed[0].network[0].weight.add_(1)
    for part, state in zip(resumed[:3], states, strict=True):
        part.load_state_dict(state)
    run(*resumed, 4)
    assert_close(clone(resumed[0].state_dict()), clone(bnn.state_dict()), 0)
    assert resumed[1].num_calls == objective.num_calls == 7


def test_a_loaded_state_is_not_shared_with_the_objective_it_came_from():
    bnn, x, y = CASES[0].make()
    first, second = closed_form(), closed_form()
    first(bnn, x, y)
    second.load_state_dict(first.state_dict())
    before = running_fisher(second, bnn)
    first(bnn, x[:2], y[:2])
    assert_close(running_fisher(second, bnn), before, 0)


# -- the gap -----------------------------------------------------------------------------------------------------


def nothing(bnn):
    return {name: torch.zeros_like(mean) for name, mean in bnn.means().items()}


def test_gap_gives_the_papers_numbers_three_to_move_and_four_possible():
    """Section 5.1: log σ starts at log s − 3, and 39,000 steps at 1e-4 can move it by 3.9; half that is not enough."""
    bnn = varlap.BNN(nn.Linear(4, 3).double())
    settings = {"num_data": 50_000, "beta": 1.0, "steps_left": 39_000}
    gap = varlap.variance_gap(bnn, nothing(bnn), log_sigma_lr=1e-4, **settings)
    assert abs(gap.median_distance - 3) < 1e-12
    assert abs(gap.largest_distance - 3) < 1e-12
    assert abs(gap.reach - 3.9) < 1e-12
    assert (gap.can_converge, gap.share_out_of_reach) == (True, 0)
    gap = varlap.variance_gap(bnn, nothing(bnn), log_sigma_lr=5e-5, **settings)
    assert abs(gap.reach - 1.95) < 1e-12
    assert (gap.can_converge, gap.share_out_of_reach) == (False, 1)


def test_reach_of_a_schedule_is_the_sum_of_its_learning_rates():
    bnn = varlap.BNN(nn.Linear(4, 3).double())
    schedule = [1e-3 * (1 - t / 1000) for t in range(1000)]
    gap = varlap.variance_gap(bnn, nothing(bnn), num_data=100, beta=1.0, log_sigma_lr=schedule)
    assert abs(gap.reach - 0.5005) < 1e-12


def test_share_out_of_reach_counts_the_weights_that_are_too_far():
    bnn = varlap.BNN(nn.Linear(4, 3).double())
    with torch.no_grad():
        bnn.log_sigma["weight"].copy_(bnn.prior_scale["weight"].log())  # already there: f is 0
        bnn.log_sigma["bias"][0] -= 4
    gap = varlap.variance_gap(bnn, nothing(bnn), num_data=100, beta=1.0, log_sigma_lr=0.1, steps_left=40)
    assert abs(gap.share_out_of_reach - 1 / 15) < 1e-15  # one bias is 7 away, two are 3, twelve weights 0
    assert abs(gap.median_distance) < 1e-15
    assert abs(gap.largest_distance - 7) < 1e-12


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_elbo_lost_is_what_the_objective_gains_by_the_best_variances(beta):
    torch.manual_seed(0)
    x = torch.randn(12, 3, dtype=torch.float64)
    y = torch.randn(12, 2, dtype=torch.float64)
    bnn = varlap.BNN(nn.Linear(3, 2).double(), varlap.Gaussian(noise=0.6, learnt=False).double())
    f = varlap.fisher_diagonal(bnn, (x, y))
    settings = {"num_data": 12, "beta": beta, "log_sigma_lr": 1e-3, "steps_left": 100}
    objective = varlap.VL(12, beta, curvature=varlap.ExactFisher())
    gap, before = varlap.variance_gap(bnn, f, **settings), objective(bnn, x, y).elbo
    varlap.laplace(bnn, (x, y), beta)
    after = objective(bnn, x, y).elbo
    assert after - before > 1e-3
    assert abs(gap.elbo_lost - (after - before)) < 1e-12
    gap = varlap.variance_gap(bnn, f, **settings)
    assert abs(gap.elbo_lost) < 1e-14
    assert gap.largest_distance < 1e-14


def test_one_variance_at_its_optimum_has_no_gap():
    bnn, x, y = next(case for case in CASES if case.name == "one-variance").make()
    f = varlap.laplace(bnn, (x, y), BETA, num_data=N)
    gap = varlap.variance_gap(bnn, f, num_data=N, beta=BETA, log_sigma_lr=1e-3, steps_left=0)
    assert abs(gap.elbo_lost) < 1e-12
    assert gap.can_converge


# -- messages ----------------------------------------------------------------------------------------------------


def test_closed_form_without_a_warm_up_says_what_to_pass():
    with pytest.raises(ConfigError, match=r"needs beta_warmup_steps, about 30 % of all training steps.*pass 0 if"):
        varlap.VL(N, variances="closed-form")


def test_closed_form_without_beta_or_with_an_impossible_decay_is_refused():
    with pytest.raises(ConfigError, match=r"beta=0\): the closed form needs a positive beta"):
        closed_form(beta=0.0)
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\).*0\.99 averages"):
        closed_form(fisher_decay=1.0)
    with pytest.raises(ConfigError, match=r"variances='fixed'\): choose 'learnt' or 'closed-form'"):
        varlap.VL(N, variances="fixed")
    with pytest.raises(ConfigError, match=r"beta_warmup_steps=-1\) must be a number that is not negative"):
        closed_form(warmup=-1)


def test_gap_without_steps_or_beta_says_what_is_missing():
    bnn = varlap.BNN(nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="needs steps_left with one learning rate, or a learning rate for each step"):
        varlap.variance_gap(bnn, nothing(bnn), num_data=100, beta=1.0, log_sigma_lr=1e-3)
    with pytest.raises(ConfigError, match=r"variance_gap\(beta=0\.0\) must be positive"):
        varlap.variance_gap(bnn, nothing(bnn), num_data=100, beta=0.0, log_sigma_lr=1e-3, steps_left=10)
