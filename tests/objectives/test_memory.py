"""What an objective remembers: one network's, only of sound steps, and back after a resume."""

import copy
import pickle

import pytest
import torch
from torch import nn

import varlap
from cases import CASES, FAST
from varlap.errors import ConfigError, NetworkError, NonFiniteError, VarlapWarning
from varlap.objectives.running import RunningMean, write


def test_looking_without_gradients_before_the_first_step_leaves_no_memory():
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, curvature=FAST)
    with torch.no_grad():
        objective(bnn, x, y, step=0)
    assert objective(bnn, x, y, step=1).loss.isfinite()


def test_an_input_gets_the_gradient_of_its_own_batch_and_nothing_that_is_remembered():
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, curvature=FAST)
    found, expected = [], []
    for step in range(2):  # the first evaluates the curvature, the second remembers it
        batch = (x + step).requires_grad_()
        found += torch.autograd.grad(objective(bnn, batch, y, step=step).loss, batch)
        expected += torch.autograd.grad(varlap.MAP(100)(bnn, batch, y).loss, batch)
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_one_objective_does_not_remember_two_networks():
    (first, x, y), (second, _, _) = CASES[0].make(), CASES[0].make()
    objective = varlap.VL(100, curvature=FAST)
    objective(first, x, y)
    with pytest.raises(ConfigError, match="remembers the curvature of another network; make one objective for each"):
        objective(second, x, y)
    with torch.no_grad():
        objective(second, x, y)  # looking is allowed
    varlap.VL(100)(first, x, y)
    del first
    with pytest.raises(ConfigError, match="remembers the curvature of another network"):
        objective(second, x, y)  # though the first one is gone


def test_a_copy_or_a_loaded_state_goes_on_with_the_network_it_is_called_with():
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, curvature=FAST)
    expected = [objective(bnn, x, y).curvature for _ in range(3)]
    begun = varlap.VL(100, curvature=FAST)
    begun(bnn, x, y)
    other_bnn, copied = copy.deepcopy((bnn, begun))
    loaded = varlap.VL(100, curvature=FAST)
    loaded.load_state_dict(pickle.loads(pickle.dumps(begun)).state_dict())
    for again in (copied, loaded):
        assert torch.equal(again(other_bnn, x, y).curvature, expected[1])


def test_a_state_of_another_objective_is_refused_and_nothing_is_taken_of_it():
    bnn, x, y = CASES[0].make()
    plain, remembering = varlap.VL(100, curvature=varlap.Fisher()), varlap.VL(100, curvature=FAST)
    plain(bnn, x, y)
    with pytest.raises(ConfigError, match="the state has no 'fisher', which VL needs: it is that of another objective"):
        remembering.load_state_dict(plain.state_dict())
    assert remembering.num_calls == 0


def test_a_memory_that_was_loaded_on_another_device_follows_the_network():
    running = RunningMean(0.9)
    write([(running, running.including({"w": torch.ones(2)})[1])])
    running.move_to(torch.device("meta"))
    assert {tensor.device.type for tensor in running.sums.values()} == {"meta"}


def test_a_point_estimate_that_is_unfrozen_begins_the_memory_of_gradients_anew():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2))
    bnn = varlap.BNN(network, select="2.*")
    network[0].requires_grad_(False)
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    objective = varlap.VL(100, curvature=FAST)
    for _ in range(5):
        objective(bnn, x, y)
    network[0].requires_grad_(True)
    for _ in range(5):
        objective(bnn, x, y).loss.backward()
    assert bool(network[0].weight.grad.abs().sum() > 0)


def test_resumed_closed_form_uses_the_beta_of_the_step_it_stopped_at():
    bnn, x, y = CASES[0].make()
    settings = {"variances": "closed-form", "beta_warmup_steps": 10}
    objective = varlap.VL(100, **settings)
    for step in range(8):
        objective(bnn, x, y, step=step)
    again = varlap.VL(100, **settings)
    again.load_state_dict(objective.state_dict())
    objective.update_variances(bnn)
    expected = bnn.log_sigma["0.weight"].clone()
    again.update_variances(bnn)
    assert torch.equal(bnn.log_sigma["0.weight"], expected)


def test_memory_follows_the_networks_dtype():
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, curvature=FAST)
    objective(bnn.float(), x.float(), y, step=0)
    assert objective(bnn.double(), x, y, step=4).loss.dtype == torch.float64


@pytest.mark.parametrize("curvature", [varlap.Fisher, 4, "fisher"])
def test_what_is_no_curvature_is_refused(curvature):
    for objective in (varlap.VL, varlap.VLHessian):
        with pytest.raises(
            ConfigError, match=r"does not follow varlap.Curvature; pass an object such as varlap.Fisher"
        ):
            objective(100, curvature=curvature)


def test_closed_form_variances_refuse_a_hessian():
    with pytest.raises(ConfigError, match="needs a curvature that is never negative: a Fisher, no Hessian"):
        varlap.VL(100, variances="closed-form", beta_warmup_steps=0, curvature=varlap.Hessian())


def test_a_network_that_was_not_wrapped_or_wrapped_twice_is_refused():
    network = nn.Linear(4, 3)
    with pytest.raises(NetworkError, match=r"needs a BNN, got Linear; wrap it: varlap.BNN\(network\)"):
        varlap.VL(100)(network, torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(NetworkError, match=r"holds, a BNN already; wrap the network itself"):
        varlap.BNN(nn.Sequential(varlap.BNN(network)))


def test_lists_of_inputs_as_torchs_loaders_make_them_are_spread():
    class Two(nn.Linear):
        def forward(self, left, right):
            return super().forward(left + right)

    class OneList(nn.Linear):
        def forward(self, parts, scale=1.0):
            return scale * super().forward(sum(parts))

    pair = [torch.ones(5, 4), torch.ones(5, 4)]
    for network in (Two(4, 3), OneList(4, 3)):
        assert varlap.VL(100)(varlap.BNN(network), pair, torch.arange(5) % 3).loss.isfinite()


def test_closed_form_variances_that_are_never_updated_warn_once():
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, variances="closed-form", beta_warmup_steps=0)
    for _ in range(99):
        objective(bnn, x, y)
    with pytest.warns(VarlapWarning, match=r"call objective.update_variances\(bnn\) after each optimizer.step"):
        objective(bnn, x, y)
    objective(bnn, x, y)
    objective.update_variances(bnn)


def test_weight_decay_on_log_sigma_warns():
    bnn, x, y = CASES[0].make()
    groups = [{"params": list(bnn.network.parameters())}, {"params": list(bnn.log_sigma.parameters()), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    varlap.VL(100)(bnn, x, y).loss.backward()
    with pytest.warns(VarlapWarning, match=r"AdamW decays log σ by weight_decay=0.1.*bnn.parameter_groups"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize(("curvature", "named"), [(None, True), (varlap.Fisher(), False)])
def test_a_nan_beside_a_memory_is_answered_by_a_curvature_without_one(curvature, named):
    bnn, x, y = CASES[0].make()
    with torch.no_grad():
        next(iter(bnn.means().values())).mul_(1e200)
    with pytest.raises(NonFiniteError, match="lower the learning rate") as caught:
        varlap.VL(100, curvature=curvature)(bnn, x, y)
    assert (r"evaluate the curvature in every step, VL(curvature=varlap.Fisher())" in str(caught.value)) == named
