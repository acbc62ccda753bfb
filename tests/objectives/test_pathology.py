"""The paper's pathology (Eq. 24) as a test: with the Hessian some variances grow without bound, with the Fisher none.

Adam moves log σ by its learning rate a step; from log s − 3 to log 10 s are 5.3. The means are held where the claim is
about which weights run away, since the Hessian moves with them; then all is trained together, as a user would.
"""

import pytest
import torch
from torch import nn

import varlap

N, BETA = 40, 0.1


def model():
    """Exclusive or, on a network small enough for a dense Hessian."""
    torch.manual_seed(0)
    x = torch.randn(N, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (x.prod(1) > 0).long()
    bnn = varlap.BNN(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double())
    return bnn, x, y


def dense_hessian_diagonal(bnn, x, y):
    """Diagonal of the whole Hessian matrix of (1/N) Σ log p(y|x, w), by autograd; one vector for all."""
    parameters = dict(bnn.network.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}

    def log_likelihood(flat):
        parts = flat.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        outputs = torch.func.functional_call(bnn.network, weights, (x,))
        return -nn.functional.cross_entropy(outputs, y)

    flat = torch.cat([p.detach().flatten() for p in parameters.values()])
    return torch.autograd.functional.hessian(log_likelihood, flat).diagonal()


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def relative_sigma(bnn):
    """σ/s of each weight."""
    return torch.cat([(bnn.log_sigma[n].detach() - bnn.prior_scale[n].log()).exp().flatten() for n in bnn.log_sigma])


def train(bnn, objective, x, y, optimizer, num_steps):
    """Train, and return the largest σ/s that each weight ever had."""
    largest = relative_sigma(bnn)
    for _ in range(num_steps):
        optimizer.zero_grad()
        objective(bnn, x, y).loss.backward()
        optimizer.step()
        largest = torch.maximum(largest, relative_sigma(bnn))
    return largest


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1, 0.01])
def test_count_of_unbounded_variances_equals_a_count_on_the_dense_hessian(beta):
    bnn, x, y = model()
    exact = dense_hessian_diagonal(bnn, x, y)
    hessian = varlap.hessian_diagonal(bnn, (x, y), batch_size=16)
    assert (flat(hessian) - exact).abs().max() < 1e-12
    found = varlap.unbounded_variances(bnn, hessian, N, beta)
    scales = torch.cat([bnn.prior_scale[n].expand(mean.shape).flatten() for n, mean in bnn.means().items()])
    expected = int((N * exact > beta / scales**2).sum())
    assert found.count == expected
    assert found.num_weights == len(exact)
    assert (expected > 0) == (beta < 1)  # so the cases differ: not every h > 0 is unbounded
    assert int((exact > 0).sum()) > 0


class KnownDiagonal:
    """A curvature that is known already, as it is while the means are held: f = −h, without Hutchinson's noise."""

    memory, num_derivatives = 0.0, 3

    def __init__(self, hessian):
        self.hessian = hessian

    def weight(self, step):
        return 1

    def estimate(self, bnn, batch, streams, create_graph):
        return bnn.likelihood.log_prob(bnn.outputs(batch.x), batch.y).mean(), self

    def diagonal(self):
        return {name: -h for name, h in self.hessian.items()}

    def pull_back(self, variance):
        return iter(())


def log_sigma_adam(bnn):
    return torch.optim.Adam(bnn.log_sigma.parameters(), lr=0.05)


def predicted_runaways(bnn, hessian):
    runaways = torch.cat([(N * h > BETA / bnn.prior_scale[n] ** 2).flatten() for n, h in hessian.items()])
    assert 0 < runaways.sum() == varlap.unbounded_variances(bnn, hessian, N, BETA).count
    return runaways


def test_hessian_variances_run_away_exactly_where_predicted():
    bnn, x, y = model()
    hessian = varlap.hessian_diagonal(bnn, (x, y))
    objective = varlap.VLHessian(N, BETA, curvature=KnownDiagonal(hessian))
    largest = train(bnn, objective, x, y, log_sigma_adam(bnn), num_steps=200)
    assert torch.equal(largest > 10, predicted_runaways(bnn, hessian))


def test_hessian_variances_by_hutchinsons_estimate_run_away_only_where_predicted_and_fisher_variances_nowhere():
    bnn, x, y = model()
    runaways = predicted_runaways(bnn, varlap.hessian_diagonal(bnn, (x, y)))
    start = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    objective = varlap.VLHessian(N, BETA, curvature=varlap.Hessian(num_probes=8))
    largest = train(bnn, objective, x, y, log_sigma_adam(bnn), num_steps=200)
    assert (largest[runaways] > 10).any()
    assert (largest[~runaways] < 10).all()
    bnn.load_state_dict(start)
    largest = train(bnn, varlap.VL(N, BETA), x, y, log_sigma_adam(bnn), num_steps=200)
    assert largest.max() < 1.1  # the closed form has σ ≤ s


def test_hessian_variances_run_away_in_training_and_fisher_variances_do_not():
    for objective, bounded in ((varlap.VLHessian(N, BETA), False), (varlap.VL(N, BETA), True)):
        bnn, x, y = model()
        largest = train(bnn, objective, x, y, varlap.adam(bnn, lr=5e-3), num_steps=250)
        assert (largest.max() > 10) == (not bounded)
        if bounded:
            assert largest.max() < 1.2  # a small overshoot of Adam's
