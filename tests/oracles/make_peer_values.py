"""Ask laplace-torch and curvlinops for the diagonal Fisher of each case in `peer_cases.py`.

The answers go to `peer_values.json`, so that the tests compare with the peers without importing them. The
values are the diagonal of the exact Fisher (= generalised Gauss-Newton) matrix of the log-likelihood, summed
over the data, one entry per parameter of the network. Run it from the root of the repository, in an
environment that holds the peers (they are not dependencies of varlap, hence the imports where they are used):

    pip install laplace-torch curvlinops-for-pytorch
    python -m tests.oracles.make_peer_values
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .peer_cases import Case, cases

VALUES = Path(__file__).with_name("peer_values.json")
PACKAGES = ("laplace-torch", "curvlinops-for-pytorch", "torch")


def laplace_torch_diagonal(case: Case) -> Tensor:
    """Fisher diagonal of laplace-torch, read off as the posterior precision under a prior of precision 0.

    For a diagonal, the backend named here takes dense Jacobians from `torch.func`, it does not call
    curvlinops: the two peers are independent. The precision counts ½(y − f)²/σ², so it needs no factor.
    """
    from laplace import DiagLaplace
    from laplace.curvature import CurvlinopsGGN

    posterior = DiagLaplace(
        case.network,
        likelihood={"categorical": "classification", "gaussian": "regression"}[case.likelihood],
        sigma_noise=1.0,
        prior_precision=0.0,
        backend=CurvlinopsGGN,
        backend_kwargs={"stochastic": False},
    )
    posterior.fit(DataLoader(TensorDataset(case.x, case.y), batch_size=len(case.x)))
    return posterior.posterior_precision


def curvlinops_diagonal(case: Case) -> Tensor:
    """Fisher diagonal of curvlinops, by multiplying its matrix-free operator with every basis vector."""
    from curvlinops import GGNLinearOperator

    if case.likelihood == "categorical":
        loss, factor = nn.CrossEntropyLoss(reduction="sum"), 1.0
    else:
        loss, factor = nn.MSELoss(reduction="sum"), 0.5  # −log p is half the squared error
    parameters = list(case.network.parameters())
    ggn = GGNLinearOperator(case.network, loss, parameters, [(case.x, case.y)])
    return factor * (ggn @ torch.eye(ggn.shape[1], dtype=torch.float64)).diagonal()


PEERS: dict[str, Callable[[Case], Tensor]] = {
    "laplace-torch": laplace_torch_diagonal,
    "curvlinops": curvlinops_diagonal,
}
# What a peer cannot compute: {case: {peer: reason}}. With the versions in `peer_values.json`, nothing.
LEFT_OUT: dict[str, dict[str, str]] = {}


def by_parameter(diagonal: Tensor, network: nn.Module) -> dict[str, Any]:
    """Cut a flat diagonal into nested lists shaped as the parameters, in the order of `named_parameters`."""
    parameters = dict(network.named_parameters())
    pieces = diagonal.detach().split([p.numel() for p in parameters.values()])
    pairs = zip(parameters.items(), pieces, strict=True)
    return {name: piece.reshape(parameter.shape).tolist() for (name, parameter), piece in pairs}


def to_json(value: Any, indent: str = "") -> str:
    """Write dictionaries one entry per line and everything else, so each parameter's values, on one line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + "  "
    entries = ",\n".join(f"{inner}{json.dumps(key)}: {to_json(entry, inner)}" for key, entry in value.items())
    return f"{{\n{entries}\n{indent}}}"


def main() -> None:
    """Compute all values and write them."""
    values: dict[str, dict[str, Any]] = {name: {} for name in cases()}
    for peer, diagonal in PEERS.items():
        for name, case in cases().items():
            if peer not in LEFT_OUT.get(name, {}):
                values[name][peer] = by_parameter(diagonal(case), case.network)
    made_with = {package: version(package) for package in PACKAGES}
    VALUES.write_text(to_json({"made_with": made_with, "cases": values, "left_out": LEFT_OUT}) + "\n")


if __name__ == "__main__":
    main()
