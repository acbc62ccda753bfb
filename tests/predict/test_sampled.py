"""Claims about sampled prediction: batch norm's statistics of each draw, and the warning of a collapse."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varlap
from varlap.errors import BatchError, VarlapWarning
from varlap.predict.collapse import relative_noise
from varlap.streams import Streams


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_network(**options):
    """A biased convolution in front of batch norm, and dropout behind it."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3, **options), nn.Softplus(), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(2)
    )
    network(torch.zeros(2, 1, 4, 4))
    return varlap.BNN(network).double()


IMAGES = draw(10, 1, 4, 4) + 3
LABELS = torch.arange(10) % 2


def direct_statistics(inputs, sizes):
    """Mean and unbiased variance of each batch of what batch norm sees, averaged with the batches' sizes."""
    means, variances = [], []
    for part in inputs.split(sizes):
        rows = part.movedim(1, -1).flatten(0, -2)
        means.append(len(part) * rows.mean(0))
        variances.append(len(part) * rows.var(0))
    return torch.stack(means).sum(0) / len(inputs), torch.stack(variances).sum(0) / len(inputs)


# -- running statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_loader", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_reestimated_statistics_are_those_of_the_batches_weighted_by_their_size(as_loader, momentum):
    bnn = small_network(momentum=momentum).train()
    layer = bnn.network[1]
    layer.running_mean.fill_(100.0)
    data = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)
    if not as_loader:  # arrays would be mixed
        data = list(data)
    random_state = torch.get_rng_state()
    assert varlap.reestimate_statistics(bnn, data, batch_size=4) == 1
    mean, variance = direct_statistics(bnn.network[0](IMAGES).detach(), [4, 4, 2])
    assert (layer.running_mean - mean).abs().max() < 1e-12
    assert (layer.running_var - variance).abs().max() < 1e-12
    assert layer.momentum == momentum
    assert all(module.training for module in bnn.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_last_batch_of_one_item_has_no_say():
    bnn = varlap.BNN(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))).double()
    x, y = draw(5, 2), torch.zeros(5).long()
    varlap.reestimate_statistics(bnn, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert (bnn.network[0].running_var - x[:4].var(0)).abs().max() < 1e-12


def test_a_network_without_batch_norm_has_nothing_to_reestimate():
    assert varlap.reestimate_statistics(varlap.BNN(nn.Linear(2, 2)), (torch.zeros(3, 2), torch.zeros(3))) == 0


def test_sorted_items_are_mixed_for_statistics_whatever_form_their_targets_have():
    x = torch.arange(64, dtype=torch.float64)[:, None].repeat(1, 2)  # within a batch of neighbours nothing varies
    found = []
    for y in (x[:, 0], {"a": x[:, 0], "b": x}):
        bnn = varlap.BNN(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).double())
        varlap.reestimate_statistics(bnn, (x, y), batch_size=4)
        found.append(bnn.network[0].running_var)
    assert torch.equal(*found)
    assert found[0].min() > 100


def test_a_failed_pass_leaves_the_old_statistics():
    bnn = small_network()
    before = {name: buffer.clone() for name, buffer in bnn.network.named_buffers()}
    with pytest.raises(RuntimeError):
        varlap.reestimate_statistics(bnn, [(IMAGES, LABELS), (IMAGES[:, :, :3], LABELS)])
    for name, buffer in bnn.network.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert bnn.network[1].momentum == 0.1
    with pytest.raises(BatchError, match="the data for batch norm's statistics hold no items; give at least a batch"):
        varlap.reestimate_statistics(bnn, [])


def test_statistics_of_each_draw_are_its_own_and_are_put_back():
    bnn = small_network().train()
    bnn(IMAGES)
    before = {name: buffer.clone() for name, buffer in bnn.network.named_buffers()}
    found = bnn.predict(IMAGES[:3], how="sampled", num_samples=3, statistics=(IMAGES, LABELS))
    for name, buffer in bnn.network.named_buffers():
        assert torch.equal(buffer, before[name]), name
    twin = small_network()
    for number, outputs in enumerate(found.outputs):
        noise = twin.draw_noise(Streams(0, number).generator("weights", "cpu"))
        with torch.no_grad(), twin.perturbed(noise):
            mean, variance = direct_statistics(twin.network[0](IMAGES), [10])
            twin.network[1].running_mean.copy_(mean)
            twin.network[1].running_var.copy_(variance)
            expected = twin.eval().network(IMAGES[:3])
        assert (outputs - expected).abs().max() < 1e-12


def test_reestimation_undoes_what_noisy_biases_do_to_a_sampled_prediction():
    """A bias in front of batch norm has no effect with the statistics of its own draw."""
    bnn = small_network()
    with torch.no_grad():
        for name, log_sigma in bnn.log_sigma.items():
            log_sigma.fill_(1.0 if name == "0.bias" else -20.0)
    varlap.reestimate_statistics(bnn, (IMAGES, LABELS))
    mean = bnn.predict(IMAGES).probs
    with pytest.warns(VarlapWarning, match="batch norm follows Bayesian weights: .* draws may predict worse"):
        assert (bnn.predict(IMAGES, how="sampled").probs - mean).abs().max() > 0.05
    own = bnn.predict(IMAGES, how="sampled", statistics=(IMAGES, LABELS))
    assert (own.probs - mean).abs().max() < 1e-6


# -- the warning ----------------------------------------------------------------------------------------------------


def trained(log_sigma_over_prior):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    bnn = varlap.BNN(varlap.models.mlp(4, 2, hidden=(50, 50)))
    objective, optimizer = varlap.MAP(64, beta=0.01), varlap.adam(bnn, lr=1e-2)
    for _ in range(300):
        objective(bnn, x, y).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for name, log_sigma in bnn.log_sigma.items():
            log_sigma.copy_((bnn.prior_scale[name].log() + log_sigma_over_prior).expand(log_sigma.shape))
    return bnn, x, y


def nll(bnn, x, y, how):
    draws = {} if how == "mean" else {"num_samples": 30}
    return -bnn.predict(x, how=how, **draws).log_prob(y).mean()


def test_a_posterior_at_its_start_is_sampled_without_a_warning_and_without_harm():
    bnn, x, y = trained(-3.0)
    assert nll(bnn, x, y, "sampled") < nll(bnn, x, y, "mean") + 0.1


def test_a_posterior_as_wide_as_the_prior_warns_and_its_samples_are_harmful():
    bnn, x, y = trained(0.0)
    message = (
        r"weight samples of this posterior are likely to predict far worse than the mean network: a draw adds [\d.]+ "
        r"times the sum of squares of the mean weights \(limit 0.8\), as happens where weights × beta / data is large; "
        r"use how='linearised', with batch norm after varlap.laplace\(bnn, data, beta\), or how='mean' for the best NLL"
    )
    with pytest.warns(VarlapWarning, match=message):
        sampled = nll(bnn, x, y, "sampled")
    assert sampled > nll(bnn, x, y, "mean") + 0.1


@pytest.mark.parametrize("variances", ["per-weight", "one"])
def test_relative_noise_counts_matrices_and_every_weight_of_them(variances):
    bnn = varlap.BNN(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2)), variances=variances).double()
    with torch.no_grad():
        for log_sigma in bnn.log_sigma.parameters():
            log_sigma.fill_(math.log(0.5))
    matrices = [bnn.network[0].weight, bnn.network[2].weight]
    expected = 0.25 * (12 + 6) / sum(float(m.square().sum()) for m in matrices)
    assert abs(relative_noise(bnn) - expected) < 1e-12
    assert relative_noise(varlap.BNN(nn.Linear(2, 2), select="bias")) == 0


def test_statistics_of_data_sorted_by_class_are_those_of_all_of_them():
    generator = torch.Generator().manual_seed(0)
    x = (torch.arange(2560) // 256)[:, None] + 0.1 * torch.randn(2560, 1, generator=generator)
    bnn = varlap.BNN(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)))
    for data in ((x, torch.zeros(2560).long()), torch.utils.data.TensorDataset(x, torch.zeros(2560).long())):
        varlap.reestimate_statistics(bnn, data)
        assert abs(float(bnn.network[0].running_var) / float(x.var()) - 1) < 0.05


def test_what_half_precision_draws_disagree_on_is_not_rounded_away():
    torch.manual_seed(0)
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 3)).bfloat16())
    prediction = bnn.predict(torch.randn(200, 4, dtype=torch.bfloat16), how="sampled")
    assert prediction.probs.dtype == torch.float32
    assert (prediction.mutual_information > 0).float().mean() > 0.99
