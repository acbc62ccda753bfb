"""What stands best for ReLU, which has no second derivative: softplus, SiLU or GELU, in two ordinary networks.

    VARLAP_DATA=... python benchmarks/activations.py --out results/quality/activations.json

A convnet with batch norm, max pooling and dropout, and an MLP, on 3,000 images of Fashion-MNIST; MAP and VL at one β.
What the file has is not run again.
"""

import argparse
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn

import varlap
from varlap.experiments import origin

NUM_TRAIN, EPOCHS, BATCH_SIZE, LR, BETA = 3_000, 15, 64, 2e-3, 0.01
ACTIVATIONS = {"ReLU": nn.ReLU, "softplus": nn.Softplus, "SiLU": nn.SiLU, "GELU": nn.GELU}
METHODS = {"MAP": varlap.MAP, "VL": varlap.VL}


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


NETWORKS = {"convnet": convnet, "mlp": mlp}
STUDIED = list(itertools.product(NETWORKS, METHODS, ACTIVATIONS, range(3)))


def run(network: str, method: str, activation: str, seed: int) -> dict[str, Any]:
    data = varlap.data.load("fashion_mnist")
    normalise = varlap.data.Normaliser.of(data.train_images)
    torch.manual_seed(seed)
    module = NETWORKS[network]()
    if activation != "ReLU":
        varlap.smooth(module, activation=ACTIVATIONS[activation])
    bnn = varlap.BNN(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", varlap.errors.VarlapWarning)  # of ReLU, which is what is studied
        varlap.fit(
            bnn,
            METHODS[method](num_data=NUM_TRAIN, beta=BETA, seed=seed),
            (normalise(data.train_images[:NUM_TRAIN]), data.train_labels[:NUM_TRAIN]),
            epochs=EPOCHS,
            batch_size=BATCH_SIZE,
            lr=LR,
            schedule="cosine",
            seed=seed,
            progress="none",
        )
    scores = varlap.evaluate(bnn, (normalise(data.test_images), data.test_labels), only=["nll", "accuracy", "ece"])
    return {"network": network, "method": method, "activation": activation, "seed": seed, **scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = {"num_train": NUM_TRAIN, "epochs": EPOCHS, "batch_size": BATCH_SIZE, "lr": LR, "beta": BETA}
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(one["network"], one["method"], one["activation"], one["seed"]) for one in runs}
    for settings in track([settings for settings in STUDIED if settings not in done], "runs"):
        runs.append(run(*settings))
        print(*runs[-1].values())
        args.out.write_text(json.dumps({"spec": spec, "origin": origin("cpu"), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
