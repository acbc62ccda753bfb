"""`BNN`: any network with a mean-field Gaussian posterior over its weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varlap.errors import ConfigError, NetworkError
from varlap.likelihoods import Likelihood, Prediction, choose_likelihood
from varlap.posterior.buffers import KeptBuffers
from varlap.posterior.call import call
from varlap.posterior.installed import installed
from varlap.posterior.kl import kl_divergence
from varlap.posterior.mean_field import optimal_log_sigmas, reparameterise
from varlap.posterior.named import NamedTensors
from varlap.posterior.network_check import check_network
from varlap.posterior.optimizer_check import watch_optimizers
from varlap.posterior.prior import FanInPrior, Prior, checked_scale
from varlap.posterior.select import Select, padding_rows, select_weights
from varlap.streams import as_generator, draw

LOG_SIGMA_START = -3.0  # log σ starts at log s − 3 (paper, section 5.1)


class BNN(nn.Module):
    """A network and a Gaussian N(μ, σ²) over each of its weights.

    The network's own parameters **are** the means: nothing is copied, and `bnn.network` remains an ordinary module.
    `bnn.log_sigma` and `bnn.prior_scale` map each Bayesian parameter's name to its log σ and its prior's s.

    Args:
        network: any `nn.Module`, unmodified.
        likelihood: "categorical", "bernoulli", "gaussian", "heteroscedastic", "poisson", or an object that follows
            `varlap.Likelihood`.
        prior: `FanInPrior()` (default), `OneScalePrior(s)`, `EmpiricalBayesPrior()`, or an object that follows
            `varlap.Prior`.
        select: which parameters are Bayesian: patterns such as "head.*", or a function of (name, parameter); by
            default all that require a gradient. The others are point estimates, or frozen.
        output: which entry of a network's dict or tuple the likelihood reads: a key, an index or a function.
        variances: "per-weight", or "one" variance for all weights (a comparison: the uniform weighting of
            implicit gradient regularisation).

    A dict or tuple `x` is spread over the network's arguments where it fits their names or number, and is passed
    whole otherwise; a list is spread if it has as many entries as the network has required arguments.

    >>> bnn = BNN(nn.Linear(4, 3))
    >>> sorted(bnn.log_sigma)
    ['bias', 'weight']
    >>> bnn.log_sigma["bias"]
    Parameter containing:
    tensor([-3., -3., -3.], requires_grad=True)
    """

    log_sigma: NamedTensors
    prior_scale: NamedTensors
    prior_mean: NamedTensors

    def __init__(
        self,
        network: nn.Module,
        likelihood: str | Likelihood = "categorical",
        prior: Prior | None = None,
        select: Select | None = None,
        *,
        output: str | int | Callable[[Any], Any] | None = None,
        variances: Literal["per-weight", "one"] = "per-weight",
    ) -> None:
        super().__init__()
        check_network(network)
        if any(isinstance(module, BNN) for module in network.modules()):
            raise NetworkError("the network is, or holds, a BNN already; wrap the network itself: BNN(bnn.network)")
        prior = FanInPrior() if prior is None else prior
        if isinstance(prior, type) or not isinstance(prior, Prior):
            raise ConfigError(f"prior {prior!r} does not follow varlap.Prior; use for example varlap.FanInPrior()")
        if variances not in ("per-weight", "one"):
            raise ConfigError(f"variances={variances!r}: choose 'per-weight' or 'one'")
        self.network = network
        self.likelihood = choose_likelihood(likelihood)
        weights = select_weights(network, select, self.likelihood)
        self.padding_rows = padding_rows(network, weights)
        if isinstance(self.likelihood, nn.Module):  # one given by name takes the network's dtype too
            self.likelihood.to(weights[0].value if isinstance(likelihood, str) else weights[0].value.device)
        self.prior = prior
        self._output = output
        scales = {w.name: _scalar(checked_scale(prior, w), w.value) for w in weights}
        centred = [w for w in weights if prior.centre == "network"]
        self.prior_scale = NamedTensors(scales)
        self.prior_mean = NamedTensors({w.name: w.value.detach().clone() for w in centred})
        start = {w.name: scales[w.name].log() + LOG_SIGMA_START for w in weights}
        if variances == "one":
            sizes = {w.name: w.value.numel() for w in weights}
            mean_start = sum(start[name] * size for name, size in sizes.items()) / sum(sizes.values())
            shared = nn.Parameter(torch.as_tensor(mean_start))
            self.log_sigma = NamedTensors(dict.fromkeys(start, shared))
        else:
            self.log_sigma = NamedTensors(
                {w.name: nn.Parameter(start[w.name].expand(w.value.shape).clone()) for w in weights}
            )
        watch_optimizers(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        watch_optimizers(self)  # a copy is trained by optimizers of its own

    # -- the pieces ---------------------------------------------------------------------------------------------

    def means(self) -> dict[str, nn.Parameter]:
        """Return the Bayesian parameters of the network by name.

        >>> list(BNN(nn.Linear(4, 3), select="weight").means())
        ['weight']
        """
        parameters = dict(self.network.named_parameters())
        try:
            return {name: parameters[name] for name in self.log_sigma}
        except KeyError as missing:
            raise NetworkError(
                f"bnn.network has no parameter {missing}, whose variances are here: it was changed after it "
                "was wrapped; put the old one back (after torch.compile, bnn.network = bnn.network._orig_mod: varlap "
                "compiles the whole step itself), or wrap the new one: varlap.BNN(network)"
            ) from None

    def point_estimates(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters that are not Bayesian, the likelihood's own among them."""
        chosen = {f"network.{name}": p for name, p in self.network.named_parameters() if name not in self.log_sigma}
        if isinstance(self.likelihood, nn.Module):
            own = dict(self.likelihood.named_parameters())
            shared = {id(parameter) for parameter in self.network.parameters()} if own else ()  # those count once
            chosen |= {f"likelihood.{name}": p for name, p in own.items() if id(p) not in shared}
        return {name: parameter for name, parameter in chosen.items() if parameter.requires_grad}

    def prior_mean_of(self, name: str) -> Tensor | float:
        """Return the prior's mean m of one parameter: 0 unless the prior is centred on the network."""
        return self.prior_mean[name] if name in self.prior_mean else 0.0  # noqa: SIM401  # `get` would raise inside

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return next(iter(self.log_sigma.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the means, which numpy's floating-point arrays take; log σ may have a wider one."""
        return next(iter(self.means().values())).dtype

    def num_weights(self) -> int:
        """Count the Bayesian weights.

        >>> BNN(nn.Linear(4, 3)).num_weights()
        15
        """
        return sum(mean.numel() for mean in self.means().values())

    # -- the network --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network at the means."""
        return self.network(*args, **kwargs)

    def outputs(self, x: Any) -> Any:
        """Return what the likelihood reads for a batch `x`, which may be a tensor, a tuple or a dict."""
        returned = call(self.network, x)
        if self._output is None:
            return returned
        if callable(self._output):
            return self._output(returned)
        try:
            return returned[self._output]
        except (KeyError, IndexError, TypeError):
            known = sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned).__name__
            raise NetworkError(
                f"BNN(output={self._output!r}) is not in what the network returned ({known}); name an entry that is"
            ) from None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set evaluation mode, and give each module its own mode back afterwards.

        >>> bnn = BNN(nn.Sequential(nn.Linear(2, 2), nn.Dropout())).train()
        >>> with bnn.evaluating():
        ...     bnn.network[1].training
        False
        >>> bnn.network[1].training
        True
        """
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def has_moving_buffers(self) -> bool:
        """Whether a forward pass may move running statistics or other buffers: in training mode, if there are any."""
        training = any(module.training for module in self.network.modules())
        return training and any(True for _ in self.network.buffers())

    @contextlib.contextmanager
    def buffers_restored(self, *, only_on_error: bool = False) -> Iterator[None]:
        """Put running statistics and other buffers back afterwards, always or only if the body raises.

        >>> bnn = BNN(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))).train()
        >>> with bnn.buffers_restored():
        ...     _ = bnn(torch.randn(8, 2) + 5)
        >>> bnn.network[0].running_mean
        tensor([0., 0.])
        """
        moving = [self.network] if self.has_moving_buffers() else []
        kept = KeptBuffers(*moving, *([self.prior_scale] if self.prior.learnt else []))
        sound = False
        try:
            yield
            sound = True
        finally:
            if not (sound and only_on_error):
                kept.put_back()

    @contextlib.contextmanager
    def spare_buffers(self) -> Iterator[None]:
        """Let a further pass move copies of the buffers, so that running statistics move once a step."""
        copies = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        with installed(self.network, copies) if copies else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def means_differentiable(self) -> Iterator[None]:
        """Let frozen means require a gradient for the moment: their variances still need the curvature."""
        frozen = [mean for mean in self.means().values() if not mean.requires_grad]
        try:
            for mean in frozen:
                mean.requires_grad_(True)
            yield
        finally:
            for mean in frozen:
                mean.requires_grad_(False)

    # -- the posterior ------------------------------------------------------------------------------------------

    def refit_prior(self) -> None:
        """Set the scales of an empirical-Bayes prior to their optimum; others stay."""
        if not self.prior.learnt:
            return
        with torch.no_grad():
            for name, mean in self.means().items():
                spread = (2 * self.log_sigma[name]).exp() + (mean - self.prior_mean_of(name)).square()
                self.prior_scale[name].copy_(spread.mean().sqrt())

    def kl(self) -> Tensor:
        """Return KL(posterior ‖ prior), Eq. 12 summed over all Bayesian weights; differentiable.

        >>> from varlap import OneScalePrior
        >>> bnn = BNN(nn.Linear(1, 1), prior=OneScalePrior(1.0))
        >>> with torch.no_grad():
        ...     _ = bnn.network.weight.fill_(1.0), bnn.network.bias.fill_(0.0)
        >>> bnn.kl()  # one (σ² + 1 − 1 + 6)/2 and one (σ² − 1 + 6)/2, with log σ = −3
        tensor(5.5025, grad_fn=<SumBackward0>)
        """
        self.refit_prior()
        # A copy of each scale, since the next call may refit it before this one is differentiated.
        terms = [
            kl_divergence(mean, self.log_sigma[name], self.prior_mean_of(name), self.prior_scale[name].clone())
            for name, mean in self.means().items()
        ]
        return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()

    @contextlib.contextmanager
    def sample(self, generator: torch.Generator | int) -> Iterator["BNN"]:
        """Put one draw from the posterior in the place of the means, and restore them whatever happens inside.

        >>> bnn, x = BNN(nn.Linear(2, 2)), torch.ones(1, 2)
        >>> before = bnn(x)
        >>> with bnn.sample(torch.Generator().manual_seed(0)):
        ...     torch.equal(bnn(x), before)
        False
        >>> torch.equal(bnn(x), before)
        True
        """
        noise = self.draw_noise(as_generator(generator, self.device))
        with self.perturbed(noise):
            yield self

    def draw_noise(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw ε for every Bayesian weight, all at once; 0 for the padding of an embedding, which is no weight.

        The KL counts that row like any other, but nothing holds its σ, so that its share goes to 0.

        >>> bnn = BNN(nn.Embedding(2, 3, padding_idx=0))
        >>> bnn.draw_noise(torch.Generator().manual_seed(0))["weight"][0]
        tensor([0., 0., 0.])
        """
        means = self.means()
        dtype = functools.reduce(torch.promote_types, (mean.dtype for mean in means.values()))
        flat = draw("normal", (self.num_weights(),), dtype, generator).to(self.device)
        parts = flat.split([mean.numel() for mean in means.values()])
        noise = {name: part.view(mean.shape) for (name, mean), part in zip(means.items(), parts, strict=True)}
        for name, row in self.padding_rows.items():
            noise[name][row].zero_()
        return noise

    @contextlib.contextmanager
    def perturbed(self, noise: Mapping[str, Tensor]) -> Iterator[None]:
        """Set the weights to μ + σ ε (Eq. 4) for a given ε, and put the means back afterwards."""
        drawn = {}
        for name, mean in self.means().items():
            weight = reparameterise(mean.detach(), self.log_sigma[name].detach(), noise[name])
            drawn[name] = weight.requires_grad_(mean.requires_grad)
        with installed(self.network, drawn):
            yield

    @torch.no_grad()
    def set_optimal_variances(self, curvature: Mapping[str, Tensor], num_data: float, beta: float | Tensor) -> None:
        """Set every σ² to β/(N f + β/s²), Eq. 23 tempered, for a diagonal curvature f per datum.

        >>> bnn = BNN(nn.Linear(2, 1))
        >>> bnn.set_optimal_variances({name: torch.zeros_like(m) for name, m in bnn.means().items()}, 100, beta=1.0)
        >>> torch.allclose(bnn.log_sigma["weight"], bnn.prior_scale["weight"].log())
        True
        """
        for name, best in optimal_log_sigmas(self.log_sigma, curvature, self.prior_scale, num_data, beta).items():
            self.log_sigma[name].copy_(best)

    # -- for optimizers -----------------------------------------------------------------------------------------

    def parameter_groups(self, lr: float, log_sigma_lr_multiplier: float = 10.0) -> list[dict[str, Any]]:
        """Return parameter groups for an adaptive optimizer of torch: means and point estimates at `lr`, log σ faster.

        Weight decay is 0 in both: the prior is the weight decay, and log σ must not decay to 0.

        >>> groups = BNN(nn.Linear(4, 3)).parameter_groups(lr=1e-3)
        >>> [(group["name"], group["lr"]) for group in groups]
        [('means', 0.001), ('log_sigma', 0.01)]
        """
        if not lr > 0 or not log_sigma_lr_multiplier > 0:
            raise ConfigError(f"lr={lr} and log_sigma_lr_multiplier={log_sigma_lr_multiplier} must be positive")
        means = [p for p in self.means().values() if p.requires_grad] + list(self.point_estimates().values())
        log_sigma = list(self.log_sigma.parameters())
        return [
            {"params": means, "lr": lr, "weight_decay": 0.0, "name": "means"},
            {
                "params": log_sigma,
                "lr": lr * log_sigma_lr_multiplier,
                "weight_decay": 0.0,
                "name": "log_sigma",
            },
        ]

    # -- delegates ----------------------------------------------------------------------------------------------

    def predict(self, x: Any, how: Literal["mean", "sampled", "linearised"] = "mean", **options: Any) -> Prediction:
        """Predict: probabilities, or mean and variance; in evaluation mode, which is put back.

        Args:
            x: inputs as in training, tensors or arrays.
            how: "mean" for the likelihood of the targets, "linearised" for what lies outside the training data, or
                "sampled", which warns where it is likely to be worse than both.
            options: those of `varlap.predict.predict`: `num_samples`, `seed` (draws are determined by it), `batch_size`
                (inputs at a time), `temperature` (from `varlap.fit_temperature`), `statistics` (for "sampled":
                data for batch norm's statistics of each draw), `closed_form` (for "linearised": no draws).

        >>> bnn, x = BNN(nn.Linear(4, 3)), torch.zeros(2, 4)
        >>> bnn.predict(x).probs.shape
        torch.Size([2, 3])
        >>> bnn.predict(x, how="linearised", num_samples=30).mutual_information.shape
        torch.Size([2])
        """
        from varlap.predict import predict

        return predict(self, x, how, **options)

    def save(self, path: Path | str) -> None:
        """Write weights, variances and what describes the posterior to a new folder, for `varlap.load`.

        >>> import tempfile, torch, varlap
        >>> bnn, folder = varlap.BNN(torch.nn.Linear(4, 3)), tempfile.mkdtemp()
        >>> bnn.save(f"{folder}/model")
        >>> again = varlap.load(f"{folder}/model", torch.nn.Linear(4, 3))
        >>> torch.equal(again.network.weight, bnn.network.weight)
        True
        """
        from varlap.training.model_file import save

        save(self, path)


def _scalar(value: float, like: Tensor) -> Tensor:
    """Make a scalar in at least single precision: a log σ in half precision could not follow its optimizer."""
    return torch.tensor(value, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
