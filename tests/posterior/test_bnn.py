"""Claims about wrapping: the network stays what it was, saves, copies and moves as one, and is asked for its mean."""

import copy
import math

import pytest
import torch
from networks_and_batches import assert_same, batch, by_name, generator, mlp, snapshot
from torch import nn

import varlap
from varlap.errors import ConfigError, NetworkError

# -- wrapping --------------------------------------------------------------------------------------------------------


def test_log_sigma_starts_three_below_the_log_of_the_prior_scale():
    bnn = varlap.BNN(nn.Linear(8, 3).double())
    torch.testing.assert_close(
        bnn.log_sigma["weight"].detach(), torch.full((3, 8), 0.5 * math.log(2 / 8) - 3, dtype=torch.float64)
    )
    torch.testing.assert_close(bnn.log_sigma["bias"].detach(), torch.full((3,), -3.0, dtype=torch.float64))


def test_means_are_the_networks_own_parameters_and_only_log_sigma_is_new_memory():
    network = mlp()
    own = dict(network.named_parameters())
    pointers = {name: p.data_ptr() for name, p in own.items()}
    bnn = varlap.BNN(network)
    assert bnn.network is network
    assert list(bnn.means()) == list(own)
    for name, mean in bnn.means().items():
        assert mean is own[name]
        assert mean.data_ptr() == pointers[name]
    new = {p.data_ptr(): p.numel() for p in bnn.parameters() if p.data_ptr() not in pointers.values()}
    assert sum(new.values()) == bnn.num_weights() == sum(p.numel() for p in own.values())
    assert sum(b.numel() for b in bnn.buffers()) == len(own)  # one prior scale for each tensor, no more


def test_wrapping_changes_no_parameter_no_mode_and_no_hook_of_the_network():
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    network[1].eval()
    network[2].weight.requires_grad_(False)
    before = snapshot(network)
    varlap.BNN(network)
    assert_same(before, network)
    assert [m.training for m in network.modules()] == [True, True, False, True]
    assert [p.requires_grad for p in network.parameters()] == [True, True, True, True, False, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_forward_passes_positional_and_keyword_arguments_through():
    class Network(nn.Linear):
        def forward(self, x, *, scale, shift=0.0):
            return super().forward(x) * scale + shift

    network = Network(4, 3)
    bnn, (x, _) = varlap.BNN(network), batch()
    assert torch.equal(bnn(x, scale=2.0, shift=1.0), network(x, scale=2.0, shift=1.0))


def test_random_state_is_untouched_by_wrapping_drawing_and_predicting():
    network = nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.Linear(5, 3))
    before = torch.get_rng_state()
    bnn = varlap.BNN(network)
    with bnn.sample(generator()):
        pass
    bnn.predict(batch()[0])
    bnn.kl()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_built_in_likelihood_follows_the_networks_dtype_and_an_own_one_stays_as_it_is(dtype):
    assert varlap.BNN(mlp().to(dtype), "gaussian").likelihood.log_noise.dtype == dtype
    own = varlap.Gaussian().half()
    assert varlap.BNN(mlp().to(dtype), own).likelihood is own
    assert own.log_noise.dtype == torch.float16


def test_unknown_choice_of_variances_is_refused():
    with pytest.raises(ConfigError, match="variances='all': choose 'per-weight' or 'one'"):
        varlap.BNN(mlp(), variances="all")


# -- saving and loading ----------------------------------------------------------------------------------------------


def test_state_dict_has_readable_keys():
    bnn = varlap.BNN(mlp(), prior=varlap.FanInPrior(centre="network"))
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    parts = ["network", "prior_scale", "prior_mean", "log_sigma"]
    assert sorted(bnn.state_dict()) == sorted(f"{part}.{name}" for part in parts for name in names)


@by_name
def test_state_dict_of_every_case_loads_strictly_into_a_fresh_wrap(case):
    bnn, x, _ = case.make()
    bnn.eval()
    with torch.no_grad():
        for tensor in bnn.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator()))
    bnn.refit_prior()
    torch.manual_seed(7)
    fresh = varlap.BNN(case.network(), case.likelihood(), **case.options).double().eval()
    fresh.load_state_dict(bnn.state_dict(), strict=True)
    assert_same(snapshot(bnn), fresh)
    assert torch.equal(fresh.kl(), bnn.kl())
    assert torch.equal(fresh.outputs(x), bnn.outputs(x))


def test_strict_loading_names_what_is_missing():
    bnn = varlap.BNN(mlp())
    state = bnn.state_dict()
    del state["log_sigma.2.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"log_sigma\.2\.bias"'):
        varlap.BNN(mlp()).load_state_dict(state)


def test_state_dict_survives_torch_save_with_weights_only(tmp_path):
    bnn = varlap.BNN(mlp(), "gaussian")
    torch.save(bnn.state_dict(), tmp_path / "state.pt")
    fresh = varlap.BNN(mlp(), "gaussian")
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(snapshot(bnn), fresh)


# -- awkward names ---------------------------------------------------------------------------------------------------


class Awkward(nn.Module):
    """Names that collide with methods and attributes of dicts and modules."""

    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(4, 4)
        self.values = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])
        self.items = nn.ModuleDict({"network": nn.Linear(4, 4), "log_sigma": nn.Linear(4, 3)})
        self.names = nn.Module()
        self.names.deep = nn.Module()
        self.names.deep.weight = nn.Parameter(torch.ones(4))
        self.names.deep._parameters["training"] = nn.Parameter(torch.ones(4))  # register_parameter refuses it
        self.top = nn.Parameter(torch.zeros(3))
        self._names = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = torch.tanh(self.keys(x)) * self.names.deep.weight + self.names.deep._parameters["training"]
        for layer in self.values:
            x = torch.tanh(layer(x))
        return self.items["log_sigma"](self.items["network"](x)) * self._names + self.top


def test_awkward_names_are_kept_found_and_trained():
    bnn = varlap.BNN(Awkward())
    names = [name for name, _ in bnn.network.named_parameters()]
    assert {"keys.weight", "values.1.0.bias", "items.network.weight", "names.deep.training", "top", "_names"} <= set(
        names
    )
    assert list(bnn.log_sigma) == list(bnn.prior_scale) == list(bnn.means()) == names
    assert {f"log_sigma.{name}" for name in names} <= set(bnn.state_dict())
    for name, mean in bnn.means().items():
        assert bnn.log_sigma[name].shape == mean.shape
    varlap.VL(num_data=60)(bnn, *batch()).loss.backward()
    for name, log_sigma in bnn.log_sigma.items():
        assert log_sigma.grad is not None, name
        assert bool((log_sigma.grad != 0).all()), name


def test_awkward_names_survive_copying_moving_and_loading():
    bnn = varlap.BNN(Awkward())
    twin = copy.deepcopy(bnn).double()
    assert list(twin.log_sigma) == list(bnn.log_sigma)
    assert {t.dtype for t in twin.log_sigma.values()} == {torch.float64}
    fresh = varlap.BNN(Awkward())
    fresh.load_state_dict(bnn.state_dict())
    assert_same(snapshot(bnn), fresh)
    with bnn.sample(generator()):
        pass
    assert_same(snapshot(fresh), bnn)


def test_log_sigma_behaves_as_a_mapping():
    bnn = varlap.BNN(mlp(), select=["0.*"])
    assert list(bnn.log_sigma) == list(bnn.log_sigma.keys()) == ["0.weight", "0.bias"]
    assert len(bnn.log_sigma) == len(bnn.log_sigma.values()) == 2
    assert "0.weight" in bnn.log_sigma
    assert "2.weight" not in bnn.log_sigma
    assert dict(bnn.log_sigma.items())["0.bias"] is bnn.log_sigma["0.bias"]
    with pytest.raises(KeyError, match=r"2\.weight"):
        bnn.log_sigma["2.weight"]


# -- dtypes, devices, copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda bnn: bnn.to(torch.float64), torch.float64),
        (lambda bnn: bnn.double(), torch.float64),
        (lambda bnn: bnn.half(), torch.float16),
        (lambda bnn: bnn.to(torch.bfloat16), torch.bfloat16),
    ],
    ids=["to(float64)", "double", "half", "to(bfloat16)"],
)
def test_change_of_dtype_reaches_every_tensor_and_keeps_the_parameters_identity(change, dtype):
    bnn = varlap.BNN(mlp(), "gaussian", prior=varlap.FanInPrior(centre="network"))
    before = {name: id(p) for name, p in bnn.named_parameters()}
    values = snapshot(bnn)
    assert change(bnn) is bnn
    assert {name: id(p) for name, p in bnn.named_parameters()} == before
    for name, tensor in bnn.state_dict().items():
        assert tensor.dtype == dtype, name
        torch.testing.assert_close(tensor, values[name].to(dtype), rtol=0, atol=0)
    assert bnn.kl().dtype == torch.promote_types(dtype, torch.float32)  # a sum in half precision would overflow


def test_step_after_double_equals_a_step_of_a_network_that_was_double_before():
    def gradients(make):
        torch.manual_seed(3)
        bnn = make()
        x, y = batch()
        varlap.VL(num_data=60)(bnn, x.double(), y).loss.backward()
        return [p.grad for p in bnn.parameters()]

    after, before = gradients(lambda: varlap.BNN(mlp()).double()), gradients(lambda: varlap.BNN(mlp().double()))
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # log s was rounded to single precision once


def test_meta_device_takes_the_whole_module_along():
    bnn = varlap.BNN(mlp(), "gaussian", prior=varlap.EmpiricalBayesPrior(centre="network")).to("meta")
    assert {t.device.type for t in (*bnn.parameters(), *bnn.buffers())} == {"meta"}
    assert bnn.device.type == "meta"
    assert bnn.kl().shape == ()
    assert bnn(torch.zeros(2, 4, device="meta")).shape == (2, 3)


def test_network_built_on_the_meta_device_can_be_wrapped_and_filled_later():
    with torch.device("meta"):
        network = mlp()
    bnn = varlap.BNN(network)
    assert bnn.device.type == "meta"
    source = varlap.BNN(mlp())
    bnn.load_state_dict(source.state_dict(), assign=True)
    assert_same(snapshot(source), bnn)
    assert torch.equal(bnn.kl(), source.kl())


@by_name
def test_deepcopy_is_equal_and_independent(case):
    bnn, x, y = case.make()
    twin = copy.deepcopy(bnn)
    own = {t.data_ptr() for t in (*bnn.parameters(), *bnn.buffers())}
    assert not own & {t.data_ptr() for t in (*twin.parameters(), *twin.buffers())}
    before = snapshot(bnn)
    assert_same(before, twin)
    torch.testing.assert_close(
        varlap.VL(num_data=50)(twin, x, y).loss, varlap.VL(num_data=50)(bnn, x, y).loss, rtol=0, atol=0
    )
    bnn.load_state_dict(before)  # batch norm has moved
    with torch.no_grad():
        for tensor in twin.parameters():
            tensor.add_(1.0)
    assert_same(before, bnn)


def test_deepcopy_keeps_shared_parameters_and_the_one_variance_shared():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.again = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

    twin = copy.deepcopy(varlap.BNN(Shared(), variances="one"))
    assert twin.network.first.weight is twin.network.second.weight is twin.network.again.weight
    assert len(list(twin.log_sigma.parameters())) == 1
    assert len({id(t) for t in twin.log_sigma.values()}) == 1
    assert len(twin.log_sigma) == 3
    with torch.no_grad():
        twin.log_sigma["first.bias"].fill_(-1.5)
    assert {t.item() for t in twin.log_sigma.values()} == {-1.5}


@pytest.mark.parametrize("change", ["double", "half", "deepcopy", "load"])
def test_one_variance_stays_one_parameter_whatever_is_done_to_the_module(change):
    bnn = varlap.BNN(mlp(), variances="one")
    state = snapshot(bnn)
    bnn = copy.deepcopy(bnn) if change == "deepcopy" else bnn
    if change == "load":
        bnn.load_state_dict(state)
    elif change != "deepcopy":
        getattr(bnn, change)()
    assert len({id(t) for t in bnn.log_sigma.values()}) == 1
    assert sum(p.numel() for p in bnn.log_sigma.parameters()) == 1
    assert bnn.log_sigma["0.weight"].shape == ()


def test_one_variance_starts_at_the_average_over_weights():
    bnn = varlap.BNN(nn.Linear(8, 3).double(), variances="one")
    expected = (24 * 0.5 * math.log(2 / 8) + 3 * 0.0) / 27 - 3
    assert bnn.log_sigma["weight"].item() == pytest.approx(expected, abs=1e-12)


# -- modes and prediction --------------------------------------------------------------------------------------------


def mixed_modes():
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    bnn = varlap.BNN(network).train()
    network[1].eval()
    return bnn


def test_evaluating_gives_each_module_its_own_mode_back():
    bnn = mixed_modes()
    before = [module.training for module in bnn.modules()]
    assert len(set(before)) == 2
    with bnn.evaluating():
        assert not any(module.training for module in bnn.modules())
    assert [module.training for module in bnn.modules()] == before


def test_evaluating_restores_the_modes_even_if_the_body_raises():
    bnn = mixed_modes()
    before = [module.training for module in bnn.modules()]

    def fail():
        with bnn.evaluating():
            raise KeyError("in the body")

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in bnn.modules()] == before


def test_predict_is_the_mean_network_in_evaluation_mode_without_gradients():
    bnn, (x, _) = mixed_modes(), batch()
    modes, state = [module.training for module in bnn.modules()], snapshot(bnn)
    prediction = bnn.predict(x)
    assert [module.training for module in bnn.modules()] == modes
    assert_same(state, bnn)
    assert not prediction.probs.requires_grad
    twin = copy.deepcopy(bnn.network).eval()
    torch.testing.assert_close(prediction.probs, twin(x).softmax(1), rtol=0, atol=0)
    assert torch.equal(prediction.probs, bnn.predict(x).probs)  # no dropout


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, left, right):
        hidden = self.left(left) + self.right(right)
        return {"logits": 2 * hidden, "hidden": hidden}, hidden


def test_predict_takes_dicts_and_tuples_and_reads_the_chosen_output():
    network = TwoInputs()
    left, right = torch.randn(5, 4), torch.randn(5, 2)
    expected = network(left, right)
    for output, logits in [
        (1, expected[1]),
        (-1, expected[1]),
        (lambda returned: returned[0]["logits"], expected[0]["logits"]),
    ]:
        bnn = varlap.BNN(network, output=output)
        for x in ({"right": right, "left": left}, (left, right)):
            torch.testing.assert_close(bnn.outputs(x), logits, rtol=0, atol=0)
            torch.testing.assert_close(bnn.predict(x).probs, logits.softmax(1), rtol=0, atol=0)


def test_output_names_the_entry_of_a_dict():
    class Named(TwoInputs):
        def forward(self, left, right):
            return super().forward(left, right)[0]

    x = (torch.randn(5, 4), torch.randn(5, 2))
    bnn = varlap.BNN(Named(), output="logits")
    torch.testing.assert_close(bnn.outputs(x), bnn.network(*x)["logits"], rtol=0, atol=0)
    with pytest.raises(NetworkError, match=r"output='logit'\) is not in what the network returned \(\['hidden', 'logi"):
        varlap.BNN(Named(), output="logit").outputs(x)


@pytest.mark.parametrize("output", [2, "logits"])
def test_output_that_is_not_there_is_named_with_what_is(output):
    bnn = varlap.BNN(TwoInputs(), output=output)
    with pytest.raises(NetworkError, match=rf"output={output!r}\) is not in what the network returned \(tuple\)"):
        bnn.outputs((torch.zeros(1, 4), torch.zeros(1, 2)))


@pytest.mark.parametrize("objective", [varlap.MAP, varlap.VI, varlap.VL])
def test_targets_drawn_from_a_learnt_noise_serve_more_than_one_call(objective):
    """They come with a graph back to the noise, which belongs to the draw and not to the training."""
    bnn = varlap.BNN(nn.Linear(2, 1), "gaussian")
    x = torch.randn(5, 2)
    y = bnn.likelihood.sample(bnn(x), torch.Generator().manual_seed(0))
    assert y.requires_grad
    gradients = []
    for targets in (y, y, y.detach()):
        bnn.zero_grad()
        objective(num_data=5)(bnn, x, targets).loss.backward()
        gradients.append(bnn.likelihood.log_noise.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
