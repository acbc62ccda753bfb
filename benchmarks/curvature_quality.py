"""What less curvature work costs in quality: test NLL of MAP, exact VL and faster settings, by paired seeds.

    VARLAP_DATA=... python benchmarks/curvature_quality.py --data cifar10 --out results/bench/quality.json

PreactResNet-18 or a small convnet with batch norm, softplus, batch 128, Adam with a cosine schedule, predictions by the
mean. All methods start from the weights of their seed and see the same batches. Runs that the file has already are not
made again.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import varlap
from varlap.streams import Streams

BATCH_SIZE = 128
CURVATURES = {
    "vl-exact": varlap.Fisher(),
    "vl-default": varlap.curvature.DEFAULT,
    "vl-every-1": varlap.Fisher(fraction=1 / 16, memory=0.5, batch_norm="part"),
    "vl-every-2": varlap.Fisher(every=2, fraction=1 / 8, memory=0.8, batch_norm="part"),
    "vl-every-6": varlap.Fisher(every=6, fraction=0.25, memory=0.8, batch_norm="part"),
    "vl-every-8": varlap.Fisher(every=8, fraction=0.25, memory=0.8, batch_norm="part"),
}


def network(args: argparse.Namespace, data: varlap.data.ArrayData, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    channels, size, _ = data.image_shape
    if args.model == "convnet":
        return varlap.models.convnet(channels, data.num_classes, image_size=size, batch_norm=True).to(args.device)
    return varlap.models.preact_resnet18(data.num_classes, channels, args.width).to(args.device)


def run(method: str, seed: int, beta: float, args: argparse.Namespace, data: varlap.data.ArrayData) -> dict[str, Any]:
    """Train and score one network."""
    images, labels = data.train_images[: args.train_images], data.train_labels[: args.train_images]
    num_data, num_batches = len(labels), len(labels) // BATCH_SIZE
    if method == "map":
        objective: Any = varlap.MAP(num_data, beta, seed=seed)
    else:
        objective = varlap.VL(num_data, beta, seed=seed, curvature=CURVATURES[method])
    bnn = varlap.BNN(network(args, data, seed).to(memory_format=torch.channels_last)).train()
    on_cuda = args.device == "cuda"
    optimizer = varlap.adam(bnn, args.lr, fused=on_cuda, capturable=on_cuda)
    step = varlap.TrainingStep(bnn, objective, optimizer, precision=args.precision)
    normalise = varlap.data.Normaliser.of(data.train_images)
    images, labels = normalise(images.to(args.device)), labels.to(args.device)
    test = normalise(data.test_images.to(args.device)), data.test_labels.to(args.device)
    total = args.epochs * num_batches
    started = time.perf_counter()
    for epoch in range(args.epochs):
        order = torch.randperm(num_data, generator=Streams(seed, epoch).generator("order", "cpu")).to(labels.device)
        for index in range(num_batches):
            number = epoch * num_batches + index
            factor = varlap.FitSettings(epochs=1).lr_factor(number / total)
            for group, rate in zip(optimizer.param_groups, (args.lr, 10 * args.lr), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate * factor)
                else:
                    group["lr"] = rate * factor
            items = order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]
            batch = images[items]
            if args.augment:
                batch = varlap.data.crop_and_flip(batch, Streams(seed, number).generator("augment", labels.device))
            step(batch.contiguous(memory_format=torch.channels_last), labels[items], number=number)
    step.check()
    if on_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    share = torch.cat([(bnn.log_sigma[n] - bnn.prior_scale[n].log()).flatten() for n in bnn.log_sigma])
    return {
        "method": method,
        "curvature": repr(CURVATURES.get(method)),
        "seed": seed,
        "beta": beta,
        "seconds": seconds,
        "median_log_sigma_over_s": float(share.detach().median()),
        **varlap.evaluate(bnn, test),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Average over seeds, and the paired difference in NLL from exact VL with its standard error."""
    exact = {(run["seed"], run["beta"]): run["nll"] for run in runs if run["method"] == "vl-exact"}
    result = {}
    for method, beta in sorted({(run["method"], run["beta"]) for run in runs}):
        rows = [run for run in runs if (run["method"], run["beta"]) == (method, beta)]
        row = {key: statistics.mean(r[key] for r in rows) for key in ("nll", "accuracy", "ece", "seconds")}
        paired = [r["nll"] - exact[r["seed"], beta] for r in rows if (r["seed"], beta) in exact]
        if paired and method != "vl-exact":
            row["nll_minus_exact"] = statistics.mean(paired)
            if len(paired) > 1:
                row["standard_error"] = statistics.stdev(paired) / len(paired) ** 0.5
        result[f"{method}, beta {beta}"] = row | {"seeds": len(rows)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--methods", default="map,vl-exact,vl-default")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--betas", type=lambda text: [float(part) for part in text.split(",")], default=[0.01])
    parser.add_argument("--model", default="preact-resnet-18", choices=["preact-resnet-18", "convnet"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--train-images", type=int, help="use only the first so many")
    parser.add_argument("--augment", action="store_true", help="random crops and flips")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no run that would end after this many seconds"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    data = varlap.data.load(args.data)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    origin = {
        "varlap": varlap.__version__,
        "torch": torch.__version__,
        "hardware": hardware,
        "training_images": len(data.train_labels[: args.train_images]),
    }
    spec = {
        key: value for key, value in vars(args).items() if key not in ("out", "seconds", "methods", "betas", "seeds")
    }
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for seed, beta, method in itertools.product(range(args.seeds), args.betas, args.methods.split(",")):
        done = [row for row in runs if row["method"] == method]
        if any((row["seed"], row["beta"]) == (seed, beta) for row in done):
            continue
        if time.perf_counter() - began + max((row["seconds"] for row in done), default=0.0) > args.seconds:
            print(f"no time for {method}, seed {seed}", flush=True)
            continue
        runs.append(run(method, seed, beta, args, data))
        print(runs[-1], flush=True)
        result = {"spec": spec, "origin": origin, "summary": summary(runs), "runs": runs}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
