"""Claims about mistakes: each gets an error that says what, where and how to fix it, and changes nothing."""

import inspect
import math
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import varlap
from refusals import batch, by_objective, network, refused
from varlap import errors
from varlap.errors import BatchError, ConfigError, NetworkError, VarlapError

# -- settings of an objective ----------------------------------------------------------------------------------------


@by_objective
def test_missing_num_data_is_refused_with_an_example(objective):
    name = objective.__name__
    message = (
        rf"{name} needs num_data, the number of items in the whole training set.*{name}\(num_data=len\(train_set\)\)"
    )
    with pytest.raises(ConfigError, match=message):
        objective()


@by_objective
@pytest.mark.parametrize("num_data", [0, -3, 2.5, True, math.nan, math.inf, "many", [3]], ids=str)
def test_num_data_that_is_no_count_is_refused(objective, num_data):
    with pytest.raises(
        ConfigError, match=rf"{objective.__name__}\(num_data=.*must be a whole number of items, at least 1"
    ):
        objective(num_data=num_data)


@by_objective
def test_num_data_smaller_than_a_batch_is_refused(objective):
    bnn, tries = varlap.BNN(network()), objective(num_data=5)
    message = (
        r"the batch has 6 items but num_data=5; num_data is the size of the whole.*VL\(num_data=len\(train_set\)\)"
    )
    with refused(BatchError, message, bnn, tries):
        tries(bnn, *batch())


@by_objective
@pytest.mark.parametrize("beta", [-0.1, math.nan, math.inf, -math.inf])
def test_beta_that_is_no_temperature_is_refused(objective, beta):
    with pytest.raises(
        ConfigError, match=rf"{objective.__name__}\(beta={beta}\) must be finite and not negative; 1 is Bayes"
    ):
        objective(num_data=10, beta=beta)


@by_objective
@pytest.mark.parametrize("beta", ["0.01", None, torch.tensor(0.01)], ids=str)
def test_beta_that_is_no_number_is_refused(objective, beta):
    name = objective.__name__
    message = (
        rf"{name}\(beta={re.escape(repr(beta))}\) must be a number, such as 0\.01; of a string or .* float\(beta\)"
    )
    with pytest.raises(ConfigError, match=message):
        objective(num_data=10, beta=beta)


@by_objective
@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "one", True, None], ids=str)
def test_a_seed_that_no_generator_takes_is_refused(objective, seed):
    message = rf"{objective.__name__}\(seed={seed!r}\) must be a whole number from -2\*\*63 to 2\*\*64 - 1"
    with pytest.raises(ConfigError, match=message):
        objective(num_data=10, seed=seed)


@by_objective
@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63), np.int64(3)], ids=str)
def test_any_seed_that_generators_take_is_kept_as_a_plain_number(objective, seed):
    kept = objective(num_data=10, seed=seed).seed
    assert (kept, type(kept)) == (seed, int)
    assert torch.Generator().manual_seed(kept).initial_seed() == int(seed) % 2**64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: varlap.VL(10, beta_warmup_steps=-1), r"VL\(beta_warmup_steps=-1\) must be a number that is not neg"),
        (lambda: varlap.VI(10, beta_warmup_steps="3"), r"VI\(beta_warmup_steps='3'\) must be a number that is not"),
        (lambda: varlap.VL(10, variances="closed"), r"VL\(variances='closed'\): choose 'learnt' or 'closed-form'"),
        (lambda: varlap.VL(10, variances="closed-form"), r"needs beta_warmup_steps, about 30 % of all.*pass 0 if that"),
        (lambda: varlap.VL(10, 0.0, variances="closed-form", beta_warmup_steps=0), "closed form needs a positive beta"),
        (
            lambda: varlap.VL(10, variances="closed-form", beta_warmup_steps=0, fisher_decay=1.0),
            r"decay.*must be in \[0, 1\)",
        ),
        (lambda: varlap.VI(10, num_samples=0), r"VI\(num_samples=0\) must be a whole number of at least 1"),
        (lambda: varlap.VI(10, num_samples=1.5), r"VI\(num_samples=1\.5\) must be a whole number of at least 1"),
        (lambda: varlap.VI(10, num_samples=3, antithetic=True), r"uses samples in pairs: num_samples=3 must be even"),
        (lambda: varlap.VI(10, antithetic=True), r"num_samples=1 must be even"),
        (lambda: varlap.VLDeterminant(10, beta=0.0), r"VLDeterminant\(beta=0\): the log-determinant needs a positive"),
        (lambda: varlap.Fisher(every=0), r"Fisher\(every=0\) must be a whole number of at least 1"),
        (lambda: varlap.Fisher(every=1.5), r"Fisher\(every=1\.5\) must be a whole number"),
        (lambda: varlap.Fisher(fraction=0.0), r"Fisher\(fraction=0\.0\) must be in \(0, 1\]: the part of the batch"),
        (lambda: varlap.Fisher(fraction=1.1), r"Fisher\(fraction=1\.1\) must be in \(0, 1\]"),
        (lambda: varlap.Fisher(fraction=math.nan), r"Fisher\(fraction=nan\) must be in \(0, 1\]"),
        (lambda: varlap.Fisher(groups=0), r"Fisher\(groups=0\) must be a whole number of at least 1"),
        (lambda: varlap.Fisher(groups=1.5), r"Fisher\(groups=1\.5\) must be a whole number"),
        (lambda: varlap.Fisher(memory=1.0), r"Fisher\(memory=1\.0\) must be in \[0, 1\); 0\.9 averages about 10"),
        (lambda: varlap.Fisher(memory="0.9"), r"Fisher\(memory='0\.9'\) must be in \[0, 1\)"),
        (lambda: varlap.Fisher(fraction="1"), r"Fisher\(fraction='1'\) must be in \(0, 1\]"),
        (lambda: varlap.Fisher(every="2"), r"Fisher\(every='2'\) must be a whole number of at least 1"),
        (lambda: varlap.Fisher(groups=True), r"Fisher\(groups=True\) must be a whole number of at least 1"),
        (lambda: varlap.Fisher(memory=-0.1), r"Fisher\(memory=-0\.1\) must be in \[0, 1\)"),
        (lambda: varlap.Fisher(batch_norm="own"), r"Fisher\(batch_norm='own'\): choose 'whole' or 'part'"),
        (lambda: varlap.Fisher(gradient="full"), r"Fisher\(gradient='full'\): choose 'held' \(the paper's\), 'quiet'"),
        (lambda: varlap.EmpiricalFisher(every=-1), r"EmpiricalFisher\(every=-1\) must be"),
        (lambda: varlap.EmpiricalFisher(fraction=2), r"EmpiricalFisher\(fraction=2\) must be"),
        (lambda: varlap.EmpiricalFisher(groups=-2), r"EmpiricalFisher\(groups=-2\) must be"),
        (lambda: varlap.Hessian(num_probes=0), r"Hessian\(num_probes=0\) must be a whole number of at least 1"),
        (lambda: varlap.Hessian(every=0), r"Hessian\(every=0\) must be a whole number of at least 1"),
        (lambda: varlap.Gaussian(noise=0.0), r"Gaussian\(noise=0\.0\) must be positive and finite; it is a"),
        (lambda: varlap.Gaussian(num_outputs=0), r"Gaussian\(num_outputs=0\) must be a whole number of at least 1"),
    ],
)  # fmt: skip
def test_setting_out_of_range_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# -- what cannot be wrapped ------------------------------------------------------------------------------------------


class Stub(nn.Module):
    """Compiling needs no compiler here: only the wrapper matters."""

    def __init__(self):
        super().__init__()
        self.body = torch.compile(nn.Linear(2, 2), backend="eager")
        self.head = nn.Linear(2, 2)


def compiled_in_place():
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    return compiled


def test_a_network_that_was_compiled_after_it_was_wrapped_is_refused_with_the_way_back():
    bnn = varlap.BNN(network())
    bnn.network = torch.compile(bnn.network, backend="eager")
    message = (
        r"no parameter '0\.weight', whose variances are here: .*bnn\.network = bnn\.network\._orig_mod.*varlap\.BNN\("
    )
    for use in (lambda: varlap.VL(num_data=10)(bnn, *batch()), bnn.kl, lambda: varlap.adam(bnn)):
        with pytest.raises(NetworkError, match=message):
            use()
    bnn.network = bnn.network._orig_mod
    varlap.VL(num_data=10)(bnn, *batch())


class ComplexWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.real = nn.Linear(2, 2)
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(2, 2))


SHARED = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), {}, NetworkError, "it was compiled by torch.compile"),
        (Stub, {}, NetworkError, "its part 'body' was compiled by .*; pass the module as it was, its ._orig_mod"),
        (compiled_in_place, {}, NetworkError, r"it was compiled by .* no second derivative; leave out \.compile\(\)"),
        (lambda: nn.Sequential(scripted()), {}, NetworkError, r"part '0' is TorchScript.*; wrap the Python module"),
        (scripted, {}, NetworkError, r"the network is TorchScript, .* before torch\.jit\.script or torch\.jit\.trace"),
        (lambda: SHARED, {"select": SHARED[1]}, ConfigError, r"select is a Linear; say .* names, as select='1\.\*'"),
        (lambda: SHARED, {"select": SHARED}, ConfigError, r"select is a Sequential; say .* names, as select='\*'"),
        (lambda: SHARED, {"select": nn.Linear(2, 2)}, ConfigError, r"select is a Linear; .* as select='head\.\*'"),
        (
            lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
            {},
            NetworkError,
            r"'0\.weight' has sparse gradients.*leave out sparse=True in its Embedding",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            {},
            NetworkError,
            r"parameter '0\.weight' has no shape yet \(a lazy module\); call the network once on a batch, then wrap it",
        ),
        (
            ComplexWeight,
            {},
            NetworkError,
            r"parameter 'phase' has dtype torch\.complex64.*leave it out with select=lambda name.*name != 'phase'",
        ),
        (Frozen, {}, ConfigError, r"no Bayesian parameter is left: no parameter of the network requires a"),
        (nn.Identity, {}, ConfigError, "no Bayesian parameter is left"),
        (lambda: nn.Linear(2, 2), {"select": "head.*"}, ConfigError, r"'head\.\*' matches no parameter"),
        (lambda: nn.Linear(2, 2), {"prior": varlap.FanInPrior}, ConfigError, "does not follow varlap.Prior"),
        (lambda: nn.Linear(2, 2), {"variances": "none"}, ConfigError, "variances='none': choose"),
        (
            lambda: nn.Linear(2, 2),
            {"likelihood": "catgorical"},
            ConfigError,
            "unknown likelihood 'catgorical': did you mean 'categorical'",
        ),
        (lambda: nn.Linear(2, 2), {"likelihood": "zip"}, ConfigError, "unknown likelihood 'zip': choose"),
        (
            lambda: nn.Linear(2, 2),
            {"likelihood": nn.CrossEntropyLoss()},
            ConfigError,
            r"CrossEntropyLoss\(\) lacks log_prob, sample, predict; it must follow varlap.Likelihood",
        ),
        (
            lambda: nn.Linear(2, 2),
            {"likelihood": varlap.Categorical},
            ConfigError,
            "is a class; pass an object of it",
        ),
    ],
)  # fmt: skip
def test_network_or_option_that_cannot_be_is_refused_and_the_network_stays_as_it_was(make, options, error, message):
    module = make()
    names = [name for name, _ in module.named_modules()]
    before = {name: (p.requires_grad, id(p)) for name, p in module.named_parameters()}
    with pytest.raises(error, match=message) as caught:
        varlap.BNN(module, **options)
    assert isinstance(caught.value, VarlapError)
    assert {name: (p.requires_grad, id(p)) for name, p in module.named_parameters()} == before
    assert [name for name, _ in module.named_modules()] == names
    assert module.training


@pytest.mark.parametrize(
    "what", [torch.tanh, nn.Linear, None, torch.zeros(2)], ids=["function", "class", "None", "tensor"]
)
def test_what_is_no_module_is_refused(what):
    with pytest.raises(NetworkError, match=r"BNN needs an nn\.Module, got .*; wrap a function in a module"):
        varlap.BNN(what)


def test_complex_parameter_can_be_left_out_as_its_message_says():
    bnn = varlap.BNN(ComplexWeight(), select=lambda name, parameter: name != "phase")
    assert list(bnn.log_sigma) == ["real.weight", "real.bias"]


def test_lazy_network_can_be_wrapped_after_a_call_as_its_message_says():
    lazy = nn.Sequential(nn.LazyLinear(3))
    lazy(torch.zeros(1, 4))
    assert varlap.BNN(lazy).num_weights() == 15


# -- the tree --------------------------------------------------------------------------------------------------------


def test_all_exceptions_derive_from_one_and_from_what_python_would_raise():
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, BaseException) and name not in ("VarlapError", "Interrupted")
    }
    assert {"ConfigError", "NetworkError", "BatchError", "NonFiniteError", "DataError"} <= set(classes)
    for name, kind in classes.items():
        if issubclass(kind, Warning):
            assert issubclass(kind, errors.VarlapWarning), name
        else:
            assert issubclass(kind, VarlapError), name
            assert len(kind.__bases__) == 2, name
        assert kind.__doc__, name


def test_what_stops_a_training_on_request_passes_through_a_loop_that_outlives_errors():
    """A sweep that catches every error of a run must end where its user asks for it."""
    assert issubclass(errors.Interrupted, KeyboardInterrupt)
    assert not issubclass(errors.Interrupted, Exception)


def test_import_and_first_step_raise_no_warning_of_any_kind():
    program = (
        "import torch, varlap; bnn = varlap.BNN(torch.nn.Linear(2, 3));"
        "varlap.VL(num_data=9)(bnn, torch.ones(4, 2), torch.tensor([0, 1, 2, 0])).loss.backward();"
        "varlap.adam(bnn).step(); bnn.predict(torch.ones(4, 2))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("network", [nn.Linear(4, 3), nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_inputs_of_another_precision_than_the_weights_are_named_with_the_remedy(network: nn.Module, dtype: torch.dtype):
    bnn, x = varlap.BNN(network), torch.ones(6, 4, dtype=dtype)
    with pytest.raises(BatchError, match=rf"x holds {dtype}, and the weights are torch.float32; give it as x.to"):
        bnn.predict(x)
    with pytest.raises(RuntimeError, match="shape"):  # other errors of torch stay as they are
        varlap.BNN(nn.Linear(5, 3)).predict(torch.ones(6, 4))


def test_warnings_that_one_thread_leaves_out_are_heard_in_others():
    with ThreadPoolExecutor(1) as threads, errors.without_warnings():
        errors.warn("nobody hears this")
        with pytest.warns(errors.VarlapWarning, match="mind the gap"):
            threads.submit(errors.warn, "mind the gap").result()
