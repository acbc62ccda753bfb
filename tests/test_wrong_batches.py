"""Claims about batches that do not fit, and about NaN and Inf: what is wrong is named, and nothing changes."""

import math

import pytest
import torch
from torch import nn

import varlap
from refusals import assert_unchanged, batch, by_objective, everything, network, refused
from varlap.errors import BatchError, ConfigError, NetworkError, NonFiniteError

# -- batches that do not fit -----------------------------------------------------------------------------------------


LIKELIHOOD_MISTAKES = [
    ("categorical", torch.tensor([0, 1, 3, 0, 1, 2]), r"label 3 is out of range: the network has 3 outputs.*0 to 2"),
    ("categorical", torch.tensor([0, 1, -1, 0, 1, 2]), r"label -1 is out of range.*\(ignored: -100\); fix the labels"),
    ("categorical", torch.zeros(6, 3).long(), r"targets of shape \(6,\) for outputs of shape \(6, 3\), got \(6, 3\)"),
    ("categorical", torch.zeros(6), r"needs integer labels, got torch\.float32; use targets\.long\(\)"),
    ("bernoulli", torch.zeros(6), r"bernoulli .* outputs' shape \(6, 3\), got \(6,\); .*must return one"),
    ("bernoulli", torch.full((6, 3), 0.5), r"target 0\.5 is no yes or no.*needs 0 and 1; for class numbers use"),
    ("gaussian", torch.zeros(6, 1), r"gaussian .* outputs' shape \(6, 3\), got \(6, 1\); the .*one number for each"),
    ("poisson", torch.full((6, 3), -1.0), r"target -1\.0 is no count: the poisson likelihood needs 0, 1, 2"),
    ("poisson", torch.full((6, 3), 1.5), r"target 1\.5 is no count.*for real numbers use likelihood='gaussian'"),
    ("heteroscedastic", torch.zeros(6, 1), r"outputs of shape \[S, 2D, ...\].*got \(6, 3\); give the last layer twice"),
]  # fmt: skip


@by_objective
@pytest.mark.parametrize("mistake", LIKELIHOOD_MISTAKES, ids=lambda mistake: mistake[2][:30])
def test_targets_that_do_not_fit_the_outputs_are_refused(objective, mistake):
    likelihood, y, message = mistake
    bnn, tries = varlap.BNN(network(), likelihood), objective(num_data=10)
    with refused(BatchError, message, bnn, tries):
        tries(bnn, batch()[0], y)


def test_targets_of_another_shape_than_half_the_outputs_are_refused():
    bnn, tries = varlap.BNN(nn.Linear(4, 4), "heteroscedastic"), varlap.VL(num_data=10, curvature=varlap.Fisher())
    with refused(BatchError, r"needs targets of shape \(6, 2\), half of the outputs' \(6, 4\), got \(6,\)", bnn, tries):
        tries(bnn, batch()[0], torch.zeros(6))


def test_outputs_without_a_class_dimension_are_refused():
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))
    tries = varlap.VL(num_data=10, curvature=varlap.Fisher())
    message = r"needs outputs of shape \[S, K\].*got \(6,\); for one item give x\[None\], for one logit.*'bernoulli'"
    with refused(BatchError, message, bnn, tries):
        tries(bnn, *batch())


@pytest.mark.parametrize(("positions", "fix"), [((5,), r"transpose\(1, 2\)"), ((5, 7), r"movedim\(-1, 1\)")])
def test_classes_in_the_last_dimension_are_refused_with_what_moves_them(positions, fix):
    bnn, tries = varlap.BNN(nn.Linear(4, 3)), varlap.VL(num_data=10)
    message = rf"^the classes must be dimension 1 .* the targets are \(6, {positions[0]}.*return outputs\.{fix}$"
    with refused(BatchError, message, bnn, tries):
        tries(bnn, torch.zeros(6, *positions, 4), torch.zeros(6, *positions).long())


def test_message_about_shapes_has_those_of_the_batch_that_was_passed():
    bnn, tries = varlap.BNN(nn.Linear(4, 3), "gaussian"), varlap.VL(num_data=10)
    with refused(BatchError, r"outputs' shape \(6, 3\), got \(6, 1\)", bnn, tries):
        tries(bnn, batch()[0], torch.zeros(6, 1))


def test_structured_outputs_are_refused_with_the_option_that_reads_them():
    class Named(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x), "features": x}

    class Paired(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    for module, message in [
        (
            Named(4, 3),
            r"returned a dict with keys \['features', 'logits'\]; say which.*BNN\(network, \.\.\., output='logits'\)",
        ),
        (Paired(4, 3), r"needs one tensor, but the network returned a tuple; say which.*output=0"),
    ]:
        bnn = varlap.BNN(module)
        with refused(BatchError, message, bnn):
            varlap.VL(num_data=10)(bnn, *batch())
        with refused(BatchError, message, bnn):
            bnn.predict(batch()[0])


@by_objective
@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(5, 4), torch.zeros(6).long(), r"x has shape \(5, 4\) but y has 6 items; their first"),
        (torch.zeros(()), torch.zeros(6).long(), r"x has shape \(\) but y has 6 items"),
        (torch.zeros(6, 4), torch.tensor(1), r"y need a first dimension of at least one item.*got y \(\)"),
        (torch.zeros(0, 4), torch.zeros(0).long(), r"y need a first dimension of at least one item.*got y \(0,\)"),
        (torch.zeros(6, 4).numpy(), torch.zeros(6).long(), r"x is a ndarray; give a tensor, .* torch\.as_tensor\(x\)"),
        (torch.zeros(6, 4), torch.zeros(6).long().numpy(), r"y is a ndarray; give a tensor, .* torch\.as_tensor\(y\)"),
        (torch.zeros(6, 4), [0, 1, 2, 0, 1, 2], r"y need a first dimension of at least one item.*got list"),
        (torch.zeros(6, 4), {"a": torch.zeros(6), "b": torch.zeros(5)}, r"got y\['a'\] \(6,\), y\['b'\] \(5,\)"),
    ],
)  # fmt: skip
def test_batch_whose_parts_do_not_belong_together_is_refused(objective, x, y, message):
    bnn, tries = varlap.BNN(network()), objective(num_data=10)
    with refused(BatchError, message, bnn, tries):
        tries(bnn, x, y)


@by_objective
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(5), r"weights must have shape \(6,\), one per item, got \(5,\)"),
        (torch.ones(6, 1), r"weights must have shape \(6,\), one per item, got \(6, 1\)"),
        (torch.tensor([1.0, 1, 1, 1, 1, -1e-9]), r"weights must not be negative: their square root weighs"),
        ([1.0] * 6, r"weights must be a tensor of shape \(6,\)"),
    ],
    ids=["too few", "a column", "negative", "a list"],
)
def test_weights_that_do_not_fit_are_refused(objective, weights, message):
    bnn, tries = varlap.BNN(network()), objective(num_data=10)
    with refused(BatchError, message, bnn, tries):
        tries(bnn, *batch(), weights=weights)


@by_objective
@pytest.mark.parametrize("shape", ["scalar", "matrix"])
def test_own_likelihood_whose_log_prob_has_a_wrong_shape_is_refused(objective, shape):
    class Own(varlap.Gaussian):
        def log_prob(self, outputs, targets):
            values = super().log_prob(outputs, targets)
            return values.sum() if shape == "scalar" else values[:, None].expand(-1, 3)

    got = r"\(\)" if shape == "scalar" else r"\(6, 3\)"
    bnn, tries = varlap.BNN(network(), Own()), objective(num_data=10)
    with refused(
        BatchError, rf"log_prob returned shape {got} for 6 items; it must return one value per item", bnn, tries
    ):
        tries(bnn, batch()[0], torch.zeros(6, 3))


@pytest.mark.parametrize("gradient", ["held", "quiet"])
@pytest.mark.parametrize("drawn", [slice(0, 1), (slice(None), 0)], ids=["one item", "no column"])
def test_own_likelihood_whose_draws_would_be_broadcast_is_refused(drawn, gradient):
    class Own(varlap.Gaussian):
        canonical = True

        def log_prob(self, outputs, targets):
            return -(outputs - targets).square().flatten(1).sum(1)

        def sample(self, outputs, generator, targets=None):
            return super().sample(outputs, generator, targets)[drawn]

    module = nn.Linear(4, 1)
    bnn, tries = varlap.BNN(module, Own()), varlap.VL(num_data=10, curvature=varlap.Fisher(gradient=gradient))
    got = r"\(1, 1\)" if drawn == slice(0, 1) else r"\(6,\)"
    message = rf"sample returned shape {got} where the targets have shape \(6, 1\), which would be broadcast; it must "
    with refused(BatchError, message, bnn, tries):
        tries(bnn, batch()[0], torch.zeros(6, 1))


def test_one_output_is_refused_for_classes():
    bnn, tries = varlap.BNN(nn.Linear(4, 1)), varlap.VL(num_data=10)
    with refused(BatchError, r"one output, and of one class .* always certain; use likelihood='bernoulli'", bnn, tries):
        tries(bnn, batch()[0], torch.zeros(6).long())


@pytest.mark.parametrize(
    ("name", "meant"), [("mse", "gaussian"), ("cross_entropy", "categorical"), ("Softmax", "categorical"), ("bce", "b")]
)
def test_the_name_of_a_loss_leads_to_its_likelihood(name, meant):
    with pytest.raises(ConfigError, match=f"unknown likelihood '{name}': did you mean '{meant}"):
        varlap.BNN(nn.Linear(2, 2), name)


def test_likelihood_without_a_score_is_refused_where_one_is_needed():
    class Own:
        def log_prob(self, outputs, targets):
            return -(outputs - targets).abs().sum(1)

        def sample(self, outputs, generator, targets=None):
            return outputs + torch.randn(outputs.shape, generator=generator)

        def predict(self, outputs):
            return varlap.Prediction(mean=outputs)

    bnn = varlap.BNN(network(), Own())
    x, y = batch()[0], torch.zeros(6, 3)
    message = r"the likelihood Own has no `score`.*add score\(outputs, noise, targets=None\)"
    for curvature in (varlap.Fisher(gradient="whole"), varlap.ExactFisher()):
        tries = varlap.VL(num_data=10, curvature=curvature)
        with refused(ConfigError, message, bnn, tries):
            tries(bnn, x, y)


@pytest.mark.parametrize("objective", [varlap.MAP, varlap.VI, varlap.VL, varlap.VLHessian])
def test_outputs_that_no_weight_enters_are_refused(objective):
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    bnn = varlap.BNN(Detached(4, 3))
    with refused(
        NetworkError, r"outputs do not depend on any parameter.*detach its result, or.*torch.inference_mode", bnn
    ):
        objective(num_data=10)(bnn, *batch())


def test_determinant_refuses_minibatches_and_large_networks():
    bnn = varlap.BNN(network())
    with refused(
        BatchError, r"whole training set in one call.*num_data=10, but the batch has 6 items; use varlap\.VL", bnn
    ):
        varlap.VLDeterminant(num_data=10)(bnn, *batch())
    bnn = varlap.BNN(nn.Linear(1000, 3))
    with refused(ConfigError, r"full Hessian of 3003 weights; it is a reference for up to 2000; use varlap\.VL", bnn):
        varlap.VLDeterminant(num_data=6)(bnn, torch.zeros(6, 1000), batch()[1])


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "heteroscedastic", "bernoulli", "poisson"])
def test_targets_in_parts_are_refused_by_likelihoods_of_one_tensor(likelihood):
    bnn = varlap.BNN(nn.Linear(4, 2), likelihood)
    x, targets = torch.randn(6, 4), {"a": torch.zeros(6, 2), "b": torch.zeros(6, 2)}
    for train in (
        lambda: varlap.MAP(6)(bnn, x, targets),
        lambda: varlap.fit(bnn, varlap.MAP(6), (x, targets), epochs=1),
    ):
        with pytest.raises(
            BatchError, match=f"the {likelihood} likelihood needs targets that are one tensor, got a dict"
        ):
            train()


# -- NaN and Inf -----------------------------------------------------------------------------------------------------


BAD = pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "Inf")])


@by_objective
@BAD
def test_bad_number_in_x_y_or_weights_names_step_and_tensor(objective, value, kind):
    bnn, tries = varlap.BNN(network(), "gaussian"), objective(num_data=10)
    x, y, weights = batch()[0], torch.zeros(6, 3), torch.ones(6)
    tries(bnn, x, y, weights=weights)  # a good step, so that the next is step 1
    for name, tensor in {"x": x, "y": y, "weights": weights}.items():
        if (name, value) == ("weights", -math.inf):
            continue  # negative, which is another mistake
        kept = tensor.flatten()[-1].clone()
        tensor.view(-1)[-1] = value
        message = rf"^step 1: {name} holds {kind}; nothing was changed; clean the data or the transform that made it$"
        with refused(NonFiniteError, message, bnn, tries):
            tries(bnn, x, y, weights=weights)
        with refused(NonFiniteError, rf"^step 41: {name} holds {kind}", bnn, tries):
            tries(bnn, x, y, weights=weights, step=41)
        tensor.view(-1)[-1] = kept
    assert tries.num_calls == 1
    tries(bnn, x, y, weights=weights)
    assert tries.num_calls == 2


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, left, right):
        return self.left(left) + self.right(right)


@BAD
def test_bad_number_in_a_structured_input_is_named_by_the_expression_that_reaches_it(value, kind):
    bnn, tries, y = varlap.BNN(Structured()), varlap.VL(num_data=10), batch()[1]
    left, right = torch.zeros(6, 4), torch.zeros(6, 2)
    left[3, 2] = value
    with refused(NonFiniteError, rf"step 0: x\['left'\] holds {kind}", bnn, tries):
        tries(bnn, {"right": right, "left": left}, y)
    with refused(NonFiniteError, rf"step 0: x\[0\] holds {kind}", bnn, tries):
        tries(bnn, (left, right), y)


class Overflows(nn.Module):
    """Finite inputs, and a number that is not finite after the batch norm has moved its statistics."""

    def __init__(self, value, num_outputs=3):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, num_outputs)
        self.value = value

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x)))) * self.value


TARGETS = {
    "categorical": torch.arange(6) % 3,
    "bernoulli": torch.ones(6, 3),
    "gaussian": torch.ones(6, 3),
    "heteroscedastic": torch.ones(6, 2),
    "poisson": torch.ones(6, 3),
}


@by_objective
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("likelihood", TARGETS)
def test_bad_number_made_inside_the_network_names_step_and_tensor_and_moves_no_statistics(objective, likelihood, value):
    module = Overflows(1.0, num_outputs=4 if likelihood == "heteroscedastic" else 3)
    bnn, tries = varlap.BNN(module, likelihood), objective(num_data=10)
    x, y = batch()[0], TARGETS[likelihood]
    tries(bnn, x, y)
    assert bnn.network.norm.num_batches_tracked == 1
    bnn.network.value = value
    message = r"^step 1: the log-likelihood holds (NaN|Inf); nothing was changed; lower the learning rate"
    with refused(NonFiniteError, message, bnn, tries):
        tries(bnn, x, y)
    bnn.network.value = 1.0
    tries(bnn, x, y)
    assert bnn.network.norm.num_batches_tracked == 2
    assert tries.num_calls == 2


@by_objective
def test_bad_number_of_weights_in_half_precision_is_laid_on_them(objective):
    bnn, tries = varlap.BNN(nn.Linear(4, 3).half()), objective(num_data=10)
    with torch.no_grad():
        bnn.network.weight.fill_(60_000.0)
    message = (
        r"nothing was changed; the weights are float16, which .* keep them .*, network\.float\(\), and .*\.autocast"
    )
    with refused(NonFiniteError, message, bnn, tries):
        tries(bnn, torch.ones(6, 4).half(), batch()[1])


@by_objective
def test_bad_number_in_the_weights_themselves_is_refused(objective):
    bnn, tries = varlap.BNN(network()), objective(num_data=10)
    with torch.no_grad():
        bnn.network[0].weight[0, 0] = math.nan
    with refused(NonFiniteError, r"^step 0: the log-likelihood holds NaN", bnn, tries):
        tries(bnn, *batch())


def test_bad_number_in_a_gradient_alone_is_refused_and_named():
    """√ has an infinite slope at 0, so the value is finite and the gradient is not."""

    class Root(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().sqrt()

    bnn, tries = varlap.BNN(Root(4, 3)), varlap.MAP(num_data=10)
    with torch.no_grad():
        bnn.network.weight.zero_(), bnn.network.bias.zero_()
    with refused(
        NonFiniteError, r"^step 0: the gradient of network\.weight holds NaN; nothing was changed", bnn, tries
    ):
        tries(bnn, *batch())


def test_overflow_of_the_curvature_alone_is_refused_and_named():
    bnn, tries = varlap.BNN(network()), varlap.VL(num_data=10)
    with torch.no_grad():
        bnn.log_sigma["0.weight"].fill_(100.0)
    with refused(NonFiniteError, r"^step 0: the curvature holds Inf", bnn, tries):
        tries(bnn, *batch())


@pytest.mark.parametrize("objective", [varlap.VI, varlap.VL, varlap.VLHessian])
def test_failed_step_leaves_a_learnt_prior_as_it_was(objective):
    bnn, tries = varlap.BNN(Overflows(1.0), prior=varlap.EmpiricalBayesPrior()), objective(num_data=10)
    bnn.network.value = math.nan
    with refused(NonFiniteError, "step 0", bnn, tries):
        tries(bnn, *batch())


def test_failed_step_leaves_the_running_fisher_as_it_was():
    bnn = varlap.BNN(Overflows(1.0))
    tries = varlap.VL(num_data=10, variances="closed-form", beta_warmup_steps=0)
    tries(bnn, *batch())
    assert len(everything(bnn, tries)) > len(everything(bnn, varlap.MAP(num_data=10)))  # a Fisher to compare
    bnn.network.value = math.nan
    with refused(NonFiniteError, "step 1", bnn, tries):
        tries(bnn, *batch())


@pytest.mark.parametrize("curvature", [varlap.Fisher(), varlap.Fisher(every=4, memory=0.9)], ids=["each", "memory"])
def test_training_goes_on_after_a_failed_first_step(curvature):
    """Sums that nothing was added to would have the mean 0/0."""
    bnn = varlap.BNN(Overflows(math.nan))
    tries = varlap.VL(num_data=10, curvature=curvature, variances="closed-form", beta_warmup_steps=0)
    with refused(NonFiniteError, "step 0", bnn, tries):
        tries(bnn, *batch(), step=0)
    tries.update_variances(bnn)
    assert all(bool(log_sigma.isfinite().all()) for log_sigma in bnn.log_sigma.values())
    bnn.network.value = 1.0
    for step in range(1, 6):
        assert bool(tries(bnn, *batch(), step=step).loss.isfinite())


@by_objective
def test_statistics_of_a_part_in_training_mode_are_kept_though_the_whole_is_in_evaluation_mode(objective):
    bnn, tries = varlap.BNN(Overflows(1.0)), objective(num_data=10)
    bnn.eval()
    bnn.network.norm.train()
    bnn.network.value = math.nan
    with refused(NonFiniteError, "step 0", bnn, tries):
        tries(bnn, *batch())


@by_objective
def test_buffer_that_a_forward_pass_replaces_is_put_back_after_a_failed_step(objective):
    class Counting(Overflows):
        def __init__(self):
            super().__init__(math.nan)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return super().forward(x)

    bnn, tries = varlap.BNN(Counting()), objective(num_data=10)
    with refused(NonFiniteError, "step 0", bnn, tries):
        tries(bnn, *batch())


@by_objective
def test_error_of_the_users_network_passes_through_and_changes_nothing(objective):
    class Broken(Overflows):
        def forward(self, x):
            super().forward(x)
            raise LookupError("mine")

    bnn, tries = varlap.BNN(Broken(1.0)), objective(num_data=10)
    before = everything(bnn, tries)
    with pytest.raises(LookupError, match="mine"):
        tries(bnn, *batch())
    assert_unchanged(before, bnn, tries)


def test_network_that_needs_all_items_at_once_is_told_how_to_have_them():
    """A dense graph convolution: features [S, F] and adjacency [S, S], whose rows and columns are items."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(3, 2)

        def forward(self, features, adjacency):
            return adjacency @ self.mix(features)

    x, y = (torch.randn(12, 3), torch.rand(12, 12)), torch.arange(12) % 2
    with pytest.raises(RuntimeError) as refusal:
        varlap.VL(num_data=12)(varlap.BNN(Graph()), x, y)
    assert any("take the whole: VL(curvature=varlap.Fisher())" in note for note in refusal.value.__notes__)
    varlap.VL(num_data=12, curvature=varlap.Fisher())(varlap.BNN(Graph()), x, y).loss.backward()
