"""Claims about saved models: they come back the same, or what differs is named."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_bits, sign_again, write_small
from torch import nn

import varlap
from varlap.errors import CheckpointError, ConfigError, NetworkError, VarlapError, VarlapWarning
from varlap.likelihoods.choose import BUILT_IN
from varlap.training import model_file
from varlap.training.checkpoint import (
    read_checkpoint,
    write_checkpoint,
)
from varlap.training.model_file import load, save

GOLDEN = Path(__file__).parents[1] / "golden"


# -- models ----------------------------------------------------------------------------------------------------------


class Tight:
    centre = "zero"
    learnt = False

    def scale(self, weight):
        return 0.1


class Laplacian(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_width = nn.Parameter(torch.zeros(()))

    def log_prob(self, outputs, targets):
        return -((outputs - targets).abs() * (-self.log_width).exp() + self.log_width).sum(1)

    def sample(self, outputs, generator, targets=None):
        return outputs + self.log_width.exp() * torch.randn(outputs.shape, generator=generator)

    def predict(self, outputs):
        return varlap.Prediction(mean=outputs)


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return {"logits": self.second(self.first(x))}


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def linear() -> nn.Module:
    return nn.Linear(2, 2)


MODELS = {
    "default": (convnet, {}),
    "categorical": (linear, {"likelihood": varlap.Categorical(ignored_label=-1)}),
    "bernoulli": (linear, {"likelihood": "bernoulli"}),
    "heteroscedastic": (linear, {"likelihood": "heteroscedastic"}),
    "poisson": (linear, {"likelihood": "poisson"}),
    "learnt noise": (linear, {"likelihood": varlap.Gaussian(noise=0.3)}),
    "known noise": (linear, {"likelihood": varlap.Gaussian(noise=0.3, learnt=False)}),
    "noise of each output": (linear, {"likelihood": varlap.Gaussian(num_outputs=2)}),
    "one scale": (convnet, {"prior": varlap.OneScalePrior(0.2)}),
    "gain": (convnet, {"prior": varlap.FanInPrior(gain=1)}),
    "centred": (convnet, {"prior": varlap.FanInPrior(centre="network")}),
    "empirical": (convnet, {"prior": varlap.EmpiricalBayesPrior()}),
    "empirical, started": (
        convnet,
        {"prior": varlap.EmpiricalBayesPrior(start=varlap.OneScalePrior(0.3), centre="network")},
    ),
    "last layer": (convnet, {"select": "3.*"}),
    "one variance": (convnet, {"variances": "one"}),
    "one variance of one weight": (linear, {"variances": "one", "select": "weight"}),
    "tied, with a key": (Tied, {"output": "logits"}),
    "index": (linear, {"output": 0}),
    "double": (lambda: convnet().double(), {}),
    "half": (lambda: convnet().bfloat16(), {"likelihood": "gaussian"}),
    "channels last": (lambda: convnet().to(memory_format=torch.channels_last), {}),
}


def trained(make, settings, seed=0) -> varlap.BNN:
    """A model none of whose tensors is where it started."""
    torch.manual_seed(seed)
    bnn = varlap.BNN(make(), **settings)
    with torch.no_grad():
        for tensor in bnn.state_dict().values():
            tensor.add_(torch.randn(tensor.shape).abs().to(tensor.dtype) if tensor.is_floating_point() else 3)
    return bnn


@pytest.mark.parametrize("case", MODELS)
def test_a_model_comes_back_the_same(tmp_path, case):
    make, settings = MODELS[case]
    bnn = trained(make, settings)
    save(bnn, tmp_path / "model")
    torch.manual_seed(1)
    network = make()
    state = torch.get_rng_state()
    again = load(tmp_path / "model", network)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.network is network
    assert_same_bits(again.state_dict(), bnn.state_dict())
    assert list(again.means()) == list(bnn.means())
    assert list(again.point_estimates()) == list(bnn.point_estimates())
    assert type(again.likelihood) is type(bnn.likelihood)
    assert again.prior == bnn.prior
    assert model_file.describe(again) == model_file.describe(bnn)
    assert len(list(again.parameters())) == len(list(bnn.parameters())), "what was shared still is"
    if case in ("categorical",):
        assert again.likelihood.ignored_label == -1
    if case == "tied, with a key":
        assert torch.equal(again.outputs(torch.ones(1, 3)), bnn.outputs(torch.ones(1, 3)))
        assert again.network.second.weight is again.network.first.weight
    save(again, tmp_path / "again")
    first, second = (read_checkpoint(tmp_path / name).documents for name in ("model", "again"))
    assert first == second


def test_a_loaded_model_predicts_and_trains_as_the_saved_one(tmp_path):
    bnn = trained(lambda: varlap.models.mlp(2, 3, hidden=(4,)), {"prior": varlap.EmpiricalBayesPrior()})
    save(bnn, tmp_path / "model")
    again = load(tmp_path / "model", varlap.models.mlp(2, 3, hidden=(4,)))
    x, y = torch.randn(8, 2), torch.arange(8) % 3
    assert torch.equal(again.predict(x).probs, bnn.predict(x).probs)
    for model in (bnn, again):
        optimizer = varlap.adam(model)
        varlap.VI(num_data=8)(model, x, y).loss.backward()
        optimizer.step()
    assert_same_bits(again.state_dict(), bnn.state_dict())


def test_a_model_made_double_after_wrapping_comes_back(tmp_path):
    bnn = trained(linear, {"likelihood": "gaussian"}).double()
    save(bnn, tmp_path / "model")
    assert_same_bits(load(tmp_path / "model", linear().double()).state_dict(), bnn.state_dict())
    half = trained(linear, {"likelihood": "gaussian"}).half()
    save(half, tmp_path / "half")
    assert_same_bits(load(tmp_path / "half", linear().half()).state_dict(), half.state_dict())


def test_the_descriptions_know_every_setting_of_what_is_built_in():
    """A new setting of a likelihood or prior that was not saved would be lost in silence."""
    in_the_tensors = {"noise"}
    import inspect

    for name, kind in BUILT_IN.items():
        settings = set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"} - in_the_tensors
        assert set(model_file.describe_likelihood(kind())["settings"]) == settings, name
    assert {varlap.FanInPrior, varlap.OneScalePrior, varlap.EmpiricalBayesPrior} == set(model_file.PRIORS.values())
    exported = [getattr(varlap, name) for name in varlap.__all__ if name.endswith("Prior") and name != "Prior"]
    assert set(exported) == set(model_file.PRIORS.values())


def test_own_classes_are_asked_for_by_name_and_checked(tmp_path):
    bnn = trained(linear, {"likelihood": Laplacian(), "prior": Tight(), "output": lambda outputs: outputs[:, :1]})
    path = tmp_path / "model"
    save(bnn, path)
    own = {"likelihood": Laplacian(), "prior": Tight(), "output": lambda outputs: outputs[:, :1]}
    for name, what in (("likelihood", "Laplacian"), ("prior", "Tight"), ("output", "a function")):
        given = {key: value for key, value in own.items() if key != name}
        message = rf"saved with a {name} of your own, {what}; pass it: varlap.load\(path, network, {name}=\.\.\.\)"
        with pytest.raises(CheckpointError, match=message):
            load(path, linear(), **given)
    with pytest.raises(CheckpointError, match=r"saved with the likelihood Laplacian, which .*gaussian.* is not"):
        load(path, linear(), **own | {"likelihood": "gaussian"})
    with pytest.raises(CheckpointError, match=r"saved with the prior Tight, which .*FanInPrior.* is not"):
        load(path, linear(), **own | {"prior": varlap.FanInPrior()})
    again = load(path, linear(), **own)
    assert_same_bits(again.state_dict(), bnn.state_dict())
    assert again.prior is own["prior"]
    assert again.outputs(torch.ones(1, 2)).shape == (1, 1)


def test_own_classes_inside_or_derived_from_built_in_ones_are_own(tmp_path):
    class Own(varlap.Gaussian):
        pass

    save(varlap.BNN(linear(), Own(), varlap.EmpiricalBayesPrior(start=Tight())), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"likelihood of your own, Own"):
        load(tmp_path / "model", linear())
    with pytest.raises(CheckpointError, match=r"prior of your own, EmpiricalBayesPrior of Tight"):
        load(tmp_path / "model", linear(), Own())
    assert load(tmp_path / "model", linear(), Own(), varlap.EmpiricalBayesPrior(start=Tight())).prior.learnt


def test_what_is_given_must_be_what_was_saved(tmp_path):
    path = tmp_path / "model"
    save(varlap.BNN(linear(), "gaussian", output=0), path)
    assert isinstance(load(path, linear(), "gaussian", varlap.FanInPrior(), output=0).likelihood, varlap.Gaussian)
    for given in (
        {"likelihood": "poisson"},
        {"likelihood": varlap.Gaussian(learnt=False)},
        {"prior": varlap.FanInPrior(gain=1.0)},
        {"output": "logits"},
    ):
        (what,) = given
        with pytest.raises(CheckpointError, match=rf"was saved with the {what} .*; leave {what} out"):
            load(path, linear(), **given)
    with pytest.raises(ConfigError, match="did you mean 'gaussian'"):
        load(path, linear(), "gausian")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 3), r"different: weight \(in the file it is float32 \(2, 2\), .*here it .*\(3, 2"),
        (lambda: nn.Linear(2, 2, bias=False), r"unexpected in the file: bias"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"missing in the file: 0\.weight, 0\.bias; unexpected in the file: w"),
        (lambda: linear().double(), r"in the file it is float32 .* here it is float64 .*network\.to\(dtype\)"),
        (lambda: nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)]), r"0\.weight, 0\.bias, 1\.weight and 7 more"),
        (lambda: nn.LazyLinear(2), r"different: weight .* here it is a UninitializedParameter"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_network_of_another_form_is_refused_with_names_and_stays_as_it_was(tmp_path, make, message):
    save(trained(linear, {}), tmp_path / "model")
    network = make()
    before = {n: t.clone() for n, t in network.state_dict().items() if not isinstance(t, nn.UninitializedParameter)}
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model", network)
    assert_same_bits({name: network.state_dict()[name] for name in before}, before)


def test_tied_and_untied_weights_are_told_apart(tmp_path):
    save(trained(Tied, {"output": "logits"}), tmp_path / "tied")
    with pytest.raises(CheckpointError, match=r"second\.weight \(.*a buffer, or shared, here .*a parameter of its own"):
        load(tmp_path / "tied", Tied(tied=False))
    save(trained(lambda: Tied(tied=False), {"output": "logits"}), tmp_path / "untied")
    with pytest.raises(CheckpointError, match=r"second\.weight \(.*a parameter of its own, here .*a buffer, or shared"):
        load(tmp_path / "untied", Tied())


def test_an_activation_of_another_kind_is_named(tmp_path):
    def network(activation):
        return nn.Sequential(nn.Linear(2, 3), activation, nn.Linear(3, 1))

    save(varlap.BNN(varlap.smooth(network(nn.ReLU())), "gaussian"), tmp_path / "model")
    with pytest.warns(VarlapWarning, match=r"saved from a network with other modules: 1 was SiLU, here it is ReLU"):
        load(tmp_path / "model", network(nn.ReLU()))
    load(tmp_path / "model", network(nn.SiLU()))  # as it was: nothing is said, which the settings of pytest check


def test_a_network_that_changes_what_it_loads_is_found_out(tmp_path):
    class Rounds(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            state_dict = {name: tensor.round() for name, tensor in state_dict.items()}
            super()._load_from_state_dict(state_dict, prefix, *rest)

    save(trained(linear, {}), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"network\.weight is not what was saved after the network took it over"):
        load(tmp_path / "model", Rounds(2, 2))


def test_what_is_no_model_or_no_network_is_refused(tmp_path):
    write_small(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"is a checkpoint without a model; give a folder that BNN\.save wrote"):
        load(tmp_path / "run", linear())
    with pytest.raises(NetworkError, match="load needs the network to put the weights into, got str"):
        load(tmp_path / "run", "model")

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match=r"\['network\._extra_state'\] is a dict, which safetensors cannot hold"):
        save(varlap.BNN(Extra(2, 2)), tmp_path / "extra")
    with pytest.raises(CheckpointError, match="exists already"):
        save(varlap.BNN(linear()), tmp_path / "run")


def test_a_saved_model_is_replaced_by_the_next_one(tmp_path):
    one, two = varlap.BNN(linear()), varlap.BNN(linear())
    for bnn in (one, two):
        save(bnn, tmp_path / "model")
    assert_same_bits(load(tmp_path / "model", linear()).state_dict(), two.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "change",
    [
        {"likelihood": {"name": "os.system", "settings": {}}},
        {"likelihood": {"name": ["gaussian"], "settings": {}}},
        {"likelihood": {"name": "gaussian", "settings": {"learnt": True, "num_outputs": 10**15}}},
        {"likelihood": {"name": "categorical", "settings": {"ignored_label": "5"}}},
        {"likelihood": {"name": "poisson", "settings": {"__class__": 3}}},
        {"likelihood": None},
        {"prior": {"name": "FanInPrior", "settings": {"gain": "x", "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": -1.0, "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": 10**400, "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": 5e-324, "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": 2.0, "centre": "moon"}}},
        {"prior": {"name": "FanInPrior", "settings": []}},
        {"prior": {"name": "BNN", "settings": {}}},
        {"prior": []},
        {"bayesian": []},
        {"bayesian": ["weight"]},
        {"bayesian": 3},
        {"bayesian": [["weight"]]},
        {"others": None},
        {"variances": "two"},
        {"variances": "one"},
        {"output": {"own": 3}},
    ],
    ids=str,
)
def test_a_well_signed_description_is_not_believed_either(tmp_path, change):
    path = tmp_path / "model"
    save(varlap.BNN(linear(), "gaussian"), path)
    description = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps(description | change))
    sign_again(path)
    network = linear()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(CheckpointError, match=str(path)):
        load(path, network)
    assert_same_bits(network.state_dict(), before)


# -- files of earlier versions ---------------------------------------------------------------------------------------


def golden_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1))


def make_golden() -> None:
    """Write the golden folders, once for each version of the format; those of earlier versions are never remade.

    From the folder tests/training: python -c "import test_model_file; test_model_file.make_golden()"
    """
    tensors = {
        "model": {
            "w": torch.tensor([[1.5, -2.0], [0.0, 3.25]]),
            "b": torch.tensor([0.5, -1.0], dtype=torch.bfloat16),
            "a": torch.tensor(0.1, dtype=torch.float64),
        },
        "run": {"step": torch.tensor(2**40)},
        "empty": {},
    }
    write_checkpoint(GOLDEN / "checkpoint-v1", tensors, {"state": {"step": 7, "nll": 0.25, "best": None, "µ": [True]}})
    bnn = varlap.BNN(
        golden_network(),
        varlap.Gaussian(num_outputs=1),
        varlap.EmpiricalBayesPrior(start=varlap.OneScalePrior(0.5), centre="network"),
        select="2.*",
    )
    with torch.no_grad():
        for index, tensor in enumerate(bnn.state_dict().values()):
            tensor.copy_(index + torch.arange(tensor.numel()).reshape(tensor.shape) / 4)
    save(bnn, GOLDEN / "model-v1")


def test_a_checkpoint_of_version_1_stays_readable():
    found = read_checkpoint(GOLDEN / "checkpoint-v1")
    assert found.documents == {"state": {"step": 7, "nll": 0.25, "best": None, "µ": [True]}}
    assert found.tensors["empty"] == {}
    assert found.tensors["run"]["step"].item() == 2**40
    assert list(found.tensors["model"]) == ["w", "b", "a"]
    assert found.tensors["model"]["w"].tolist() == [[1.5, -2.0], [0.0, 3.25]]
    assert found.tensors["model"]["b"].dtype == torch.bfloat16
    assert found.tensors["model"]["b"].tolist() == [0.5, -1.0]
    assert found.tensors["model"]["a"].item() == 0.1


def test_a_model_of_version_1_stays_loadable():
    bnn = load(GOLDEN / "model-v1", golden_network())
    assert list(bnn.means()) == ["2.weight", "2.bias"]
    assert bnn.prior == varlap.EmpiricalBayesPrior(start=varlap.OneScalePrior(0.5), centre="network")
    assert isinstance(bnn.likelihood, varlap.Gaussian)
    assert {name: tensor.tolist() for name, tensor in bnn.state_dict().items()} == {
        "network.0.weight": [[0.0, 0.25]],
        "network.0.bias": [1.0],
        "network.2.weight": [[2.0]],
        "network.2.bias": [3.0],
        "likelihood.log_noise": [4.0],
        "prior_scale.2.weight": 5.0,
        "prior_scale.2.bias": 6.0,
        "prior_mean.2.weight": [[7.0]],
        "prior_mean.2.bias": [8.0],
        "log_sigma.2.weight": [[9.0]],
        "log_sigma.2.bias": [10.0],
    }


def test_the_error_is_one_of_ours_and_one_of_the_systems():
    assert issubclass(CheckpointError, VarlapError)
    assert issubclass(CheckpointError, OSError)
