"""Claims about the curvature of a whole data set: the peers' numbers, the enumeration's, and no trace left behind."""

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from test_fisher import enumerated_fisher, flat
from torch import nn

import varlap
from cases import CASES, LIKELIHOOD_CASES, Exponential, case
from oracles import peer_cases
from varlap.curvature import diagonal as diagonal_module
from varlap.errors import BatchError, ConfigError

PEERS = json.loads(Path(peer_cases.__file__).with_name("peer_values.json").read_text())
PEER_PAIRS = [(name, peer) for name, values in PEERS["cases"].items() for peer in values]
FUNCTIONS = {
    "exact": varlap.fisher_diagonal,
    "sampled": lambda bnn, data: varlap.fisher_diagonal(bnn, data, labels="sampled"),
    "hessian": varlap.hessian_diagonal,
    "probed": lambda bnn, data: varlap.hessian_diagonal(bnn, data, num_probes=2),
}
# The exact Hessian takes a product for each weight; these have the fewest and are all kinds of likelihood and input.
HESSIAN_CASES = [
    *LIKELIHOOD_CASES,
    *(c for c in CASES if c.name in ("batch-norm", "attention", "gru", "shared-frozen-unused", "dicts", "subset")),
]


# ---- the Fisher ---------------------------------------------------------------------------------------------------


def test_the_peers_values_are_there():
    assert len(PEER_PAIRS) == 6
    assert not PEERS["left_out"]


@pytest.mark.parametrize(("name", "peer"), PEER_PAIRS)
def test_exact_fisher_agrees_with_the_peer_libraries(name, peer):
    peer_case = peer_cases.cases()[name]
    noise_1 = varlap.Gaussian(noise=1.0, learnt=False)
    bnn = varlap.BNN(peer_case.network, "categorical" if peer_case.likelihood == "categorical" else noise_1)
    found = varlap.fisher_diagonal(bnn.double(), (peer_case.x, peer_case.y))
    values = PEERS["cases"][name][peer]
    assert list(found) == list(values)
    for parameter, value in values.items():
        expected = torch.tensor(value, dtype=torch.float64)
        torch.testing.assert_close(found[parameter] * len(peer_case.x), expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_fisher_equals_the_enumeration_in_evaluation_mode(case):
    bnn, x, y = case.make()
    found = varlap.fisher_diagonal(bnn, (x, y))
    assert list(found) == list(bnn.means())
    torch.testing.assert_close(flat(found), enumerated_fisher(bnn.eval(), x, y), rtol=1e-10, atol=1e-12)


def own_likelihood_case():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    network = lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))  # noqa: E731
    return case("own", network, Exponential, x=lambda: x, y=lambda: x[:, :2].exp())


def exponential_fisher(bnn, x):
    """∂ log p/∂output = 1 − rate·y has variance 1, independently for each output: f = (1/S) Σ J²."""
    entries = bnn.outputs(x).flatten()
    rows = [torch.autograd.grad(entry, list(bnn.means().values()), retain_graph=True) for entry in entries]
    return torch.stack([torch.cat([g.flatten() for g in row]).square() for row in rows]).sum(0) / len(x)


def repeated(value, times):
    return torch.cat([value] * times)


@pytest.mark.parametrize("case", [*LIKELIHOOD_CASES, own_likelihood_case()], ids=lambda case: case.name)
def test_sampled_fisher_of_the_data_is_unbiased(case):
    """64 seeds, each with 20 copies of the data, in standard errors.

    No t-statistic of 64 means of 20 χ²₁ was above 7 in 12 million simulated; with the own likelihood's heavier
    (1 − rate·y)² 2 in 100,000 were, so all 7 cases of 23 to 43 weights raise a false alarm with probability below 1e-3
    with other seeds (Bonferroni).
    """
    bnn, x, y = case.make()
    truth = exponential_fisher(bnn.eval(), x) if case.name == "own" else enumerated_fisher(bnn.eval(), x, y)
    data = repeated(x, 20), repeated(y, 20)
    rows = [flat(varlap.fisher_diagonal(bnn, data, labels="sampled", seed=seed)) for seed in range(64)]
    rows = torch.stack(rows)
    z = (rows.mean(0) - truth) / (rows.std(0) / 8)
    assert z.abs().max() < 7
    ratios = (rows / truth).mean(1)  # one number with a smaller error, so that a wrong factor shows
    assert abs(ratios.mean() - 1) < 5 * ratios.std() / 8 < 0.15


def test_the_sampled_path_without_a_score_draws_labels():
    case = own_likelihood_case()
    bnn, x, y = case.make()
    assert not hasattr(bnn.likelihood, "score")
    with pytest.raises(ConfigError, match=r"Exponential has no `score`.*add score\(outputs, noise.*labels='sampled'"):
        varlap.fisher_diagonal(bnn, (x, y))


@pytest.mark.parametrize("function", ["exact", "hessian"])
@pytest.mark.parametrize("name", ["mlp-categorical", "mlp-poisson", "segmentation", "batch-norm", "dicts"])
def test_the_batch_size_does_not_matter(name, function):
    bnn, x, y = next(c for c in CASES if c.name == name).make()
    compute = varlap.fisher_diagonal if function == "exact" else varlap.hessian_diagonal
    whole, by_two = (compute(bnn, (x, y), batch_size=batch_size) for batch_size in (5, 2))
    torch.testing.assert_close(by_two, whole, rtol=1e-10, atol=1e-13)


def test_per_item_gradients_in_several_chunks_or_in_a_loop_are_the_same(monkeypatch, caplog):
    bnn, x, y = CASES[0].make()
    whole = varlap.fisher_diagonal(bnn, (x, y))
    monkeypatch.setattr(diagonal_module, "MOST_GRADIENT_ENTRIES", 2 * bnn.num_weights())
    torch.testing.assert_close(varlap.fisher_diagonal(bnn, (x, y)), whole, rtol=1e-12, atol=0)

    def refuse(*args, **kwargs):
        raise RuntimeError("vmap: not this network")

    monkeypatch.setattr(torch, "vmap", refuse)
    with caplog.at_level(logging.INFO, "varlap"):
        torch.testing.assert_close(varlap.fisher_diagonal(bnn, (x, y)), whole, rtol=1e-12, atol=0)
    assert "in a loop, since torch.vmap refused the network: vmap: not this network" in caplog.text


def test_items_for_which_there_is_no_memory_are_not_tried_one_by_one(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    bnn, x, y = CASES[0].make()
    monkeypatch.setattr(torch, "vmap", fail)
    for call in (
        lambda: varlap.fisher_diagonal(bnn, (x, y)),
        lambda: bnn.predict(x, how="linearised", closed_form=True),
    ):
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            call()


class LooksAtData(nn.Linear):
    """Branches on a value, which vmap cannot trace, and takes a number that is no tensor."""

    def forward(self, x, scale):
        return scale * super().forward(x) if x.sum() > 0 else super().forward(x)


def test_control_flow_on_data_and_inputs_beside_tensors_are_taken_item_by_item():
    x = torch.tensor([[1.0, 2.0], [-3.0, 1.0]], dtype=torch.float64)
    bnn = varlap.BNN(LooksAtData(2, 1), varlap.Gaussian(noise=1.0, learnt=False)).double()
    found = varlap.fisher_diagonal(bnn, [({"x": x, "scale": 3.0}, torch.zeros(2, 1, dtype=torch.float64))])
    expected = (9 * x[0].square() + x[1].square()) / 2
    torch.testing.assert_close(found["weight"], expected[None], rtol=1e-12, atol=0)


def test_a_half_precision_network_is_summed_in_single_precision():
    """In bfloat16 a sum stops growing after 256 like terms: 40,000 items of curvature 1 would give 0.82."""
    bnn = varlap.BNN(nn.Linear(1, 1, bias=False).bfloat16(), varlap.Gaussian(noise=1.0, learnt=False))
    data = torch.ones(40_000, 1, dtype=torch.bfloat16), torch.zeros(40_000, 1, dtype=torch.bfloat16)
    for compute, sign in ((varlap.fisher_diagonal, 1), (varlap.hessian_diagonal, -1)):
        found = compute(bnn, data, batch_size=128)["weight"]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor([[sign * 1.0]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", ["exact", "hessian"])
def test_the_memory_format_does_not_matter(function):
    segmentation = next(c for c in CASES if c.name == "segmentation")
    bnn, x, y = segmentation.make()
    plain = FUNCTIONS[function](bnn, (x, y))
    bnn.network.to(memory_format=torch.channels_last)
    torch.testing.assert_close(FUNCTIONS[function](bnn, (x, y)), plain, rtol=1e-10, atol=1e-13)


# ---- the Hessian --------------------------------------------------------------------------------------------------


def dense_hessian(bnn, x, y):
    """Every second derivative of (1/S) Σ log p(y|x, μ), as one matrix, by torch.func."""
    bnn = copy.deepcopy(bnn)  # functional_call does not put shared parameters back
    for module in bnn.modules():
        if isinstance(module, nn.BatchNorm2d) and module.training:  # torch.func allows no update of its statistics
            module.running_mean = module.running_var = module.num_batches_tracked = None
    means = {f"network.{name}": mean.detach() for name, mean in bnn.means().items()}
    sizes = [mean.numel() for mean in means.values()]

    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = bnn.network

        def forward(self, x):
            return bnn.outputs(x)

    module = Outputs()

    def log_likelihood(vector):
        pieces = {n: p.reshape(means[n].shape) for n, p in zip(means, vector.split(sizes), strict=True)}
        outputs = torch.func.functional_call(module, pieces, (x,))
        return bnn.likelihood.log_prob(outputs, y).mean()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        vector = torch.cat([mean.flatten() for mean in means.values()])
        return torch.func.hessian(log_likelihood)(vector)


@pytest.mark.parametrize("case", HESSIAN_CASES, ids=lambda case: case.name)
def test_exact_hessian_diagonal_equals_the_dense_hessians(case):
    bnn, x, y = case.make()
    found = varlap.hessian_diagonal(bnn, (x, y))
    assert list(found) == list(bnn.means())
    expected = dense_hessian(bnn.eval(), x, y).diagonal()
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(flat(found), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp-categorical", "mlp-heteroscedastic", "batch-norm"])
def test_hutchinsons_estimate_of_the_data_is_unbiased(name):
    """Mean of 100 seeds × 3 probes, in the standard errors that theory gives, √(Σ_{j≠i} H²ᵢⱼ/300).

    v ∘ Hv is bounded and symmetric about its mean, so the normal's tail holds: 6 standard errors for at most 89
    weights in 3 cases is a false alarm of 5e-7 (Bonferroni).
    """
    bnn, x, y = next(c for c in CASES if c.name == name).make()
    hessian = dense_hessian(bnn.eval(), x, y)
    rows = [flat(varlap.hessian_diagonal(bnn, (x, y), num_probes=3, seed=seed)) for seed in range(100)]
    off = (hessian - hessian.diagonal().diag()).square().sum(1)
    moving = off > 1e-20
    z = ((torch.stack(rows).mean(0) - hessian.diagonal()) / (off / 300).sqrt())[moving]
    assert z.abs().max() < 6
    assert moving.sum() > 30
    assert 0.5 < z.square().mean() < 1.7  # the spread is the theory's, so probes are averaged and not summed


def test_too_many_weights_for_an_exact_hessian_are_refused():
    bnn = varlap.BNN(nn.Linear(1_000, 3))
    with pytest.raises(
        ConfigError, match=r"one product for each of 3003 weights; pass num_probes=100 for Hutchinson's"
    ):
        varlap.hessian_diagonal(bnn, (torch.zeros(2, 1_000), torch.tensor([0, 1])))


# ---- no trace left ------------------------------------------------------------------------------------------------


class Modes(nn.Module):
    """Notes in which mode it is called."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, x):
        self.seen.add(self.training)
        return x


@pytest.mark.parametrize("function", FUNCTIONS)
def test_evaluation_mode_is_used_and_each_modules_own_mode_restored(function):
    modes = Modes()
    network = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), modes)
    bnn, x, y = case("", lambda: network).make()
    network[2].eval()
    FUNCTIONS[function](bnn, (x, y))
    assert modes.seen == {False}
    assert [module.training for module in (bnn, network, *network)] == [True, True, True, True, False, True]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_modes_are_restored_after_an_error_too(function):
    bnn, x, _ = CASES[0].make()
    with pytest.raises(BatchError, match="label 7 is out of range"):
        FUNCTIONS[function](bnn, (x, torch.full((5,), 7)))
    assert all(module.training for module in bnn.modules())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_checkpointed_network_has_the_curvature_of_an_ordinary_one(function):
    class Checkpointed(nn.Sequential):
        def forward(self, input):
            return torch.utils.checkpoint.checkpoint(super().forward, input, use_reentrant=False)

    bnn, x, y = CASES[0].make()
    checkpointed = varlap.BNN(Checkpointed(*bnn.network)).double()
    torch.testing.assert_close(FUNCTIONS[function](checkpointed, (x, y)), FUNCTIONS[function](bnn, (x, y)))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["batch-norm", "gru", "mlp-poisson", "shared-frozen-unused"])
def test_parameters_gradients_buffers_and_the_global_generator_stay_as_they_were(name, function):
    bnn, x, y = next(c for c in CASES if c.name == name).make()
    before, state = copy.deepcopy(bnn.state_dict()), torch.get_rng_state()
    held = {id(tensor) for module in bnn.modules() for tensor in module._parameters.values()}
    trainable = [parameter for parameter in bnn.parameters() if parameter.requires_grad]
    found = FUNCTIONS[function](bnn, (x, y))
    assert torch.equal(torch.get_rng_state(), state)
    assert {id(tensor) for module in bnn.modules() for tensor in module._parameters.values()} == held
    assert all(torch.equal(value, before[key]) for key, value in bnn.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in trainable)
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("part", [slice(1), slice(None)], ids=["one parameter", "all"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_frozen_network_has_the_curvature_of_a_trainable_one(function, part):
    (trainable, x, y), (frozen, _, _) = CASES[0].make(), CASES[0].make()
    means = list(frozen.means().values())[part]
    for mean in means:
        mean.requires_grad_(False)
    torch.testing.assert_close(FUNCTIONS[function](frozen, (x, y)), FUNCTIONS[function](trainable, (x, y)))
    assert not any(mean.requires_grad for mean in means)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_works_under_no_grad_and_the_same_seed_gives_the_same_numbers(function):
    bnn, x, y = CASES[0].make()
    first = FUNCTIONS[function](bnn, (x, y))
    with torch.no_grad():
        again = FUNCTIONS[function](bnn, (x, y))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("function", ["sampled", "probed"])
def test_another_seed_gives_other_numbers(function):
    bnn, x, y = CASES[0].make()
    settings = {"labels": "sampled"} if function == "sampled" else {"num_probes": 2}
    compute = varlap.fisher_diagonal if function == "sampled" else varlap.hessian_diagonal
    one, two = (compute(bnn, (x, y), seed=seed, **settings) for seed in (0, 1))
    assert not torch.equal(one["0.weight"], two["0.weight"])


class ReadsOneEntry(varlap.Categorical):
    """A likelihood of one's own for a network that returns a dict, with all that a built-in one has."""

    def log_prob(self, outputs, targets):
        return super().log_prob(outputs["scores"], targets)

    def check(self, outputs, targets):
        super().check(outputs["scores"], targets)


class ReturnsScores(nn.Linear):
    def forward(self, x):
        return {"scores": super().forward(x)}


@pytest.mark.parametrize("labels", ["exact", "sampled"])
def test_structured_outputs_are_refused_where_a_cotangent_of_them_is_needed(labels):
    bnn, x, y = case("", lambda: ReturnsScores(4, 3), ReadsOneEntry).make()
    told = (
        r" needs one tensor, but the network returned a dict with keys \['scores'\]; say .*output='scores'\), or use "
    )
    with pytest.raises(BatchError, match=rf"fisher_diagonal{told}hessian_diagonal \(laplace: curvature='hessian'\)"):
        varlap.fisher_diagonal(bnn, (x, y), labels=labels)
    for curvature, name in [
        (varlap.Fisher(gradient="whole"), r"Fisher\(gradient='whole'\)"),
        (varlap.ExactFisher(), "ExactFisher"),
    ]:
        with pytest.raises(BatchError, match=rf"{name}{told}Fisher\(gradient='held'\)"):
            varlap.VL(100, curvature=curvature)(bnn, x, y)
    assert varlap.hessian_diagonal(bnn, (x, y))["weight"].isfinite().all()


def test_labels_that_do_not_exist_are_refused():
    bnn, x, y = CASES[0].make()
    with pytest.raises(ConfigError, match="labels='observed': choose 'exact' or 'sampled'"):
        varlap.fisher_diagonal(bnn, (x, y), labels="observed")


def test_network_that_draws_leaves_the_callers_generator_alone():
    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(3) * 1e-3

    bnn = varlap.BNN(Drawing(4, 3))
    data = torch.randn(8, 4), torch.arange(8) % 3
    before = torch.get_rng_state()
    varlap.fisher_diagonal(bnn, data)
    varlap.laplace(bnn, data)
    assert torch.equal(torch.get_rng_state(), before)
