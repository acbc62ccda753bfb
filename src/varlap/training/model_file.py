"""A trained model in a file: a checkpoint with its tensors, and a document that says how to build it again."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varlap.errors import CheckpointError, ConfigError, NetworkError, warn
from varlap.likelihoods import Categorical, Gaussian, Likelihood, choose_likelihood
from varlap.likelihoods.choose import BUILT_IN
from varlap.posterior import BNN, EmpiricalBayesPrior, FanInPrior, OneScalePrior, Prior
from varlap.training.checkpoint import read_checkpoint, surviving, write_checkpoint
from varlap.training.encoding import tensor_bytes

MODEL, BEST = "model", "best"
BESIDE = ".model"  # ends the name of the folder beside FILE.ckpt
PRIORS: dict[str, Callable[..., Prior]] = {
    "FanInPrior": FanInPrior,
    "OneScalePrior": OneScalePrior,
    "EmpiricalBayesPrior": EmpiricalBayesPrior,
}
MOST_NAMES = 3  # in an error


def save(bnn: BNN, path: Path | str) -> None:
    """Save a model as a folder; `load` needs the network's code, but no other setting. A model there is replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(BNN(nn.Linear(2, 1), "gaussian"), f"{folder}/model")
    ...     sorted(file.name for file in Path(folder, "model").iterdir())
    ['manifest.json', 'model.json', 'model.safetensors']
    """
    save_tensors(Path(path), bnn.state_dict(), describe(bnn))


def save_tensors(path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Save a model from its `state_dict` and what `describe` says of it; a model there is replaced.

    >>> import tempfile
    >>> bnn = BNN(nn.Linear(2, 1), "gaussian")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tensors(Path(folder, "model"), bnn.state_dict(), describe(bnn))
    ...     load(f"{folder}/model", nn.Linear(2, 1)).likelihood
    Gaussian()
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # a link stays a link
    is_model = (path / "model.json").is_file() and not (path / "state.json").exists()
    # What is no model, or the checkpoint of a run, stays, with an error.
    replace = is_model or not os.path.lexists(path)
    write_checkpoint(path, {MODEL: dict(tensors)}, {MODEL: dict(description)}, replace=replace)


def load(
    path: Path | str,
    network: nn.Module,
    likelihood: str | Likelihood | None = None,
    prior: Prior | None = None,
    *,
    output: str | int | Callable[[Any], Any] | None = None,
) -> BNN:
    """Load a model that `save` wrote: same weights to the bit, same likelihood, prior and choice of Bayesian weights.

    Args:
        path: the folder, or one of a run's `checkpoints/step-…`, of which a run with `keep="best"` gives the best so
            far, or a checkpoint NAME.ckpt that `LightningBNN` has written with such a folder beside it.
        network: one of the same architecture and dtype, with any weights; it takes over the saved ones.
        likelihood: only for one of your own, an object of the class that was saved.
        prior: only for one of your own, an object of the class that was saved.
        output: only for a function.

    Nothing that is read can run code. If it does not fit the network, the network stays as it was.

    >>> import tempfile
    >>> bnn = BNN(nn.Linear(2, 1), "gaussian", select="weight")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(bnn, f"{folder}/model")
    ...     again = load(f"{folder}/model", nn.Linear(2, 1))
    >>> again.likelihood, list(again.means()), torch.equal(again.network.weight, bnn.network.weight)
    (Gaussian(), ['weight'], True)
    """
    path = Path(path)
    if not isinstance(network, nn.Module):
        raise NetworkError(f"load needs the network to put the weights into, got {type(network).__name__}")
    if (path / "checkpoints").is_dir():
        folders = [path / "model", *sorted((path / "checkpoints").glob("step-*"), reverse=True)]
        models = " or ".join(str(folder) for folder in folders[:2] if folder.is_dir())
        raise CheckpointError(f"{path} is a run; give one of its models: {models or 'so far it has none'}")
    if path.is_file():
        folder = beside(path.resolve())  # Lightning's last.ckpt may be a link to the newest one
        if not surviving(folder).is_dir():
            raise CheckpointError(
                f"{path} is a file, which varlap does not read, and the model that LightningBNN writes beside it is "
                f"not there ({folder.name}); give a folder that BNN.save wrote"
            )
        path = folder
    checkpoint = read_checkpoint(surviving(path))
    tensors = checkpoint.tensors.get(BEST) or checkpoint.tensors.get(MODEL)  # a run that keeps the best has both
    description = checkpoint.documents.get(MODEL)
    if tensors is None or not isinstance(description, dict):
        raise CheckpointError(f"{path} is a checkpoint without a model; give a folder that BNN.save wrote")
    given = None if likelihood is None else choose_likelihood(likelihood)
    try:
        chosen = _choose(path, description, "likelihood", given, describe_likelihood, _build_likelihood(tensors))
        prior = _choose(path, description, "prior", prior, describe_prior, _build_prior)
        output = _choose(path, description, "output", output, describe_output, lambda entry: entry)
        bayesian = set(description["bayesian"])
        _compare(
            path,
            _forms(_inside(tensors, "network."), bayesian | set(description["others"])),
            _forms(network.state_dict(keep_vars=True), {name for name, _ in network.named_parameters()}),
        )
        bnn = BNN(
            network,
            chosen,
            prior,
            lambda name, _: name in bayesian,
            output=output,
            variances=description["variances"],
        )
    except (CheckpointError, NetworkError):
        raise
    except (ConfigError, AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{path} describes a model that cannot be built ({type(error).__name__}: {error}); save it again with this "
            "version of varlap"
        ) from error
    _put(path, bnn, tensors)
    _warn_about_other_modules(path, description.get("modules", {}), _modules(network))
    return bnn


def _warn_about_other_modules(path: Path, saved: Any, own: Mapping[str, str]) -> None:
    """Name modules that are of another kind here: activations have no weights that could tell."""
    if not isinstance(saved, dict):
        return
    others = {name: saved[name] for name in own if saved.get(name, own[name]) != own[name]}
    different = [f"{name or 'the network'} was {kind}, here it is {own[name]}" for name, kind in others.items()]
    if different:
        warn(
            f"{path} was saved from a network with other modules: {_few(different)}; build it as the saved one was, "
            "with varlap.smooth if that was used"
        )


def beside(file: Path) -> Path:
    """Return the folder with the model of a checkpoint that another library wrote to a file.

    >>> beside(Path("runs/last.ckpt")).name
    'last.model'
    """
    return file.with_name(file.name.removesuffix(".ckpt") + BESIDE)


def _put(path: Path, bnn: BNN, tensors: dict[str, Tensor]) -> None:
    """Write the tensors into the model, after looking whether all of them fit."""
    own = {name: t for name, t in bnn.state_dict(keep_vars=True).items() if not name.startswith("network.")}
    saved = {name: t for name, t in tensors.items() if not name.startswith("network.")}
    _compare(path, {n: f"is {tuple(t.shape)}" for n, t in saved.items()}, {n: f"is {tuple(own[n].shape)}" for n in own})
    for name, tensor in own.items():  # made in the dtype of the start; `bnn.double()` may have come later
        tensor.data = tensor.data.to(saved[name].dtype)
    try:
        bnn.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the network: {error}; give one of the same architecture") from error
    for name, tensor in bnn.state_dict().items():
        if tensor_bytes(name, {name: tensor}) != tensor_bytes(name, {name: tensors[name]}):
            raise CheckpointError(
                f"{path}: {name} is not what was saved after the network took it over; it shares memory with another "
                "tensor, or the network changes what it loads: give one built as the saved one was"
            )


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _forms(tensors: Mapping[str, Any], parameters: Container[str]) -> dict[str, str]:
    """Say of each tensor of a network what must agree between two of one architecture."""
    forms = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            forms[name] = f"is a {type(tensor).__name__}"
        else:
            # A parameter that shares its memory is listed by torch once, under the first of its names.
            kind = "a parameter of its own" if name in parameters else "a buffer, or shared"
            forms[name] = f"is {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, {kind}"
    return forms


def _compare(path: Path, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuse a network of another form, with a few names of what is missing, unexpected or different."""
    findings = {
        "missing in the file": [name for name in own if name not in saved],
        "unexpected in the file": [name for name in saved if name not in own],
        "different": [
            f"{name} (in the file it {saved[name]}, here it {own[name]})"
            for name in own
            if name in saved and saved[name] != own[name]
        ],
    }
    found = [f"{what}: {_few(names)}" for what, names in findings.items() if names]
    if found:
        raise CheckpointError(
            f"{path} was saved from another network than the given one; {'; '.join(found)}; build the network as the "
            "saved one was, for a dtype with network.to(dtype)"
        )


def _few(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(itertools.islice(names, MOST_NAMES)) + more


def _choose(
    path: Path,
    description: dict[str, Any],
    what: str,
    given: Any,
    describe: Callable[[Any], Any],
    build: Callable[[Any], Any],
) -> Any:
    """Take what the file describes, or what was given, which must then be what the file describes."""
    saved = description[what]
    own = saved.get("own") if isinstance(saved, dict) else None
    if given is None:
        if own is not None:
            raise CheckpointError(
                f"{path} was saved with a {what} of your own, {own}; pass it: varlap.load(path, network, {what}=...)"
            )
        given = build(saved)
    described = describe(given)
    if described != saved:
        raise CheckpointError(
            f"{path} was saved with the {what} {own or saved}, which {described} is not; leave {what} out for what "
            "is built in, or pass one of the saved class"
        )
    return given


# -- descriptions ---------------------------------------------------------------------------------------------------


def describe(bnn: BNN) -> dict[str, Any]:
    """Say in plain words and numbers what a model is besides its tensors.

    >>> description = describe(BNN(nn.Linear(2, 1), "gaussian", select="weight"))
    >>> description["likelihood"], description["prior"]["name"]
    ({'name': 'gaussian', 'settings': {'learnt': True, 'num_outputs': None}}, 'FanInPrior')
    >>> description["bayesian"], description["others"]
    (['weight'], ['bias'])
    """
    import varlap  # the version is set after this module is imported

    log_sigmas = list(bnn.log_sigma.values())
    one = log_sigmas[0].ndim == 0 and all(log_sigma is log_sigmas[0] for log_sigma in log_sigmas)
    return {
        "varlap": varlap.__version__,
        "torch": str(torch.__version__),
        "likelihood": describe_likelihood(bnn.likelihood),
        "prior": describe_prior(bnn.prior),
        "variances": "one" if one else "per-weight",
        "output": describe_output(bnn._output),
        "bayesian": list(bnn.log_sigma),
        "others": [name for name, _ in bnn.network.named_parameters() if name not in bnn.log_sigma],
        "modules": _modules(bnn.network),
    }


def _modules(network: nn.Module) -> dict[str, str]:
    """Say what the network's innermost modules are, by name."""
    return {name: type(module).__name__ for name, module in network.named_modules() if not any(module.children())}


def describe_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """Say which likelihood it is; what it learns is among the tensors.

    >>> describe_likelihood(Categorical(ignored_label=-1))
    {'name': 'categorical', 'settings': {'ignored_label': -1}}
    """
    for name, kind in BUILT_IN.items():
        if type(likelihood) is kind:
            return {"name": name, "settings": _likelihood_settings(likelihood)}
    return {"own": type(likelihood).__name__}


def _likelihood_settings(likelihood: Likelihood) -> dict[str, Any]:
    if isinstance(likelihood, Categorical):
        return {"ignored_label": int(likelihood.ignored_label)}
    if isinstance(likelihood, Gaussian):
        noise = likelihood.log_noise
        return {"learnt": isinstance(noise, nn.Parameter), "num_outputs": len(noise) if noise.ndim else None}
    return {}


def _build_likelihood(tensors: Mapping[str, Tensor]) -> Callable[[Any], Likelihood]:
    def build(description: Any) -> Likelihood:
        settings = description["settings"]
        # Memory is only asked for what the file really holds.
        if (num_outputs := settings.get("num_outputs")) is not None and (
            tensors["likelihood.log_noise"].shape != (num_outputs,)
        ):
            raise ValueError(f"num_outputs={num_outputs}, but log_noise has another shape")
        likelihood: Any = BUILT_IN[description["name"]]
        return likelihood(**settings)

    return build


def describe_prior(prior: Prior) -> dict[str, Any]:
    """Say which prior it is; the scales themselves are among the tensors.

    >>> describe_prior(FanInPrior(gain=1.0))
    {'name': 'FanInPrior', 'settings': {'gain': 1.0, 'centre': 'zero'}}
    """
    kind = PRIORS.get(type(prior).__name__)
    if kind is not type(prior) or not dataclasses.is_dataclass(prior):
        return {"own": type(prior).__name__}
    settings = {field.name: getattr(prior, field.name) for field in dataclasses.fields(prior) if field.init}
    described = {name: _prior_setting(value) for name, value in settings.items()}
    own = [value["own"] for value in described.values() if isinstance(value, dict) and "own" in value]
    return (
        {"own": f"{type(prior).__name__} of {own[0]}"} if own else {"name": type(prior).__name__, "settings": described}
    )


def _prior_setting(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return describe_prior(value) if isinstance(value, Prior) else float(value)


def _build_prior(description: Any) -> Prior:
    settings = {
        name: _build_prior(value) if isinstance(value, dict) else value
        for name, value in description["settings"].items()
    }
    return PRIORS[description["name"]](**settings)


def describe_output(output: str | int | Callable[[Any], Any] | None) -> Any:
    """Say which entry of the network's outputs is read: a key, an index, or a function of the user's own.

    >>> describe_output("logits"), describe_output(lambda outputs: outputs[0])
    ('logits', {'own': 'a function'})
    """
    return {"own": "a function"} if callable(output) else output
