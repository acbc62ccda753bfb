"""How well bfloat16 gradients agree with single precision: cosines on PreactResNet-18, before and after training.

    VARLAP_DATA=... python benchmarks/precision.py --data cifar10 --out results/bench/precision.json

The likelihood's and the curvature's gradients in the means, for the same batch and the same drawn labels.
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varlap


def mean_gradient(bnn: varlap.BNN, objective: Any, x: Tensor, y: Tensor, bf16: bool) -> Tensor:
    bnn.zero_grad()  # training has left the gradients of its last step
    around = torch.autocast(x.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    with bnn.buffers_restored(), around:
        terms = objective(bnn, x, y, step=0)
    terms.loss.backward()
    return torch.cat([mean.grad.flatten().double() for mean in bnn.means().values() if mean.grad is not None])


def cosines(bnn: varlap.BNN, x: Tensor, y: Tensor, num_data: int) -> dict[str, float]:
    """Compare fp32 and bf16, with the labels that the fp32 pass drew."""
    likelihood = varlap.MAP(num_data, beta=0.0)
    both = varlap.VL(num_data, beta=0.0, curvature=varlap.Fisher())
    drawn: list[Tensor] = []
    sample = bnn.likelihood.sample

    def replayed(*args: Any) -> Tensor:
        if not drawn:
            drawn.append(sample(*args))
        return drawn[0]

    bnn.likelihood.sample = replayed  # type: ignore[method-assign]
    gradients = {bf16: mean_gradient(bnn, likelihood, x, y, bf16) for bf16 in (False, True)}
    totals = {bf16: mean_gradient(bnn, both, x, y, bf16) for bf16 in (False, True)}
    bnn.likelihood.sample = sample  # type: ignore[method-assign]
    curvatures = {bf16: totals[bf16] - gradients[bf16] for bf16 in (False, True)}
    return {
        "log_likelihood": float(torch.cosine_similarity(gradients[False], gradients[True], 0)),
        "curvature": float(torch.cosine_similarity(curvatures[False], curvatures[True], 0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-train", type=int, help="train on so many images only")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    data = varlap.data.load(args.data)
    normalise = varlap.data.Normaliser.of(data.train_images)
    x = normalise(data.train_images[: args.num_train].to(args.device)).contiguous(memory_format=torch.channels_last)
    y = data.train_labels[: args.num_train].to(args.device)
    torch.manual_seed(0)
    network = varlap.models.preact_resnet18(data.num_classes, data.image_shape[0], args.width).to(args.device)
    bnn = varlap.BNN(network).train()
    result: dict[str, Any] = {"spec": {key: str(value) for key, value in vars(args).items() if key != "out"}}
    result["origin"] = {"varlap": varlap.__version__, "torch": torch.__version__}
    result["origin"]["hardware"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result["at_initialisation"] = cosines(bnn, x[:128], y[:128], len(y))
    precision = "bf16" if args.device == "cuda" else "fp32"
    objective = varlap.VL(len(y), 0.01)
    varlap.fit(bnn, objective, (x, y), epochs=args.epochs, precision=precision, augment=varlap.data.crop_and_flip)
    result["after_training"] = cosines(bnn, x[:128], y[:128], len(y)) | {"epochs": args.epochs}
    print(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
