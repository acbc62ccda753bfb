"""What less curvature work costs in quality: test NLL of MAP, exact VL and faster settings, by paired seeds.

    VARLAP_DATA=... python benchmarks/curvature_quality.py --data cifar10 --out results/bench/quality.json

PreactResNet-18 or a small convnet with batch norm, softplus, batch 128, Adam with a cosine schedule, predictions by the
mean. Each method is set up once and started again for each seed, with the same weights and batches for all methods.
Runs that the file has already are not made again.
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
    "vl-every-6": varlap.Fisher(every=6, fraction=0.25, memory=0.8, batch_norm="part"),
    "vl-every-8": varlap.Fisher(every=8, fraction=0.25, memory=0.8, batch_norm="part"),
}


def network(args: argparse.Namespace, data: varlap.data.ArrayData, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    channels, size, _ = data.image_shape
    if args.model == "convnet":
        return varlap.models.convnet(channels, data.num_classes, image_size=size, batch_norm=True).to(args.device)
    return varlap.models.preact_resnet18(data.num_classes, channels, args.width).to(args.device)


class Runner:
    """One method, set up once."""

    def __init__(self, method: str, args: argparse.Namespace, data: varlap.data.ArrayData) -> None:
        self.args, self.data = args, data
        images, labels = data.train_images[: args.train_images], data.train_labels[: args.train_images]
        num_data = len(labels)
        if method == "map":
            self.objective: Any = varlap.MAP(num_data, args.betas[0])
        else:
            self.objective = varlap.VL(num_data, args.betas[0], curvature=CURVATURES[method])
        self.bnn = varlap.BNN(network(args, data, 0).to(memory_format=torch.channels_last)).train()
        self.log_sigma = {name: t.detach().clone() for name, t in self.bnn.log_sigma.items()}
        on_cuda = args.device == "cuda"
        self.optimizer = varlap.adam(self.bnn, args.lr, fused=on_cuda, capturable=on_cuda)
        self.step = varlap.TrainingStep(self.bnn, self.objective, self.optimizer, precision=args.precision)
        normalise = varlap.data.Normaliser.of(data.train_images)
        self.train = normalise(images.to(args.device)), labels.to(args.device)
        self.test = normalise(data.test_images.to(args.device)), data.test_labels.to(args.device)

    @torch.no_grad()
    def restart(self, seed: int) -> None:
        fresh = network(self.args, self.data, seed)
        for own, new in zip(self.bnn.network.state_dict().values(), fresh.state_dict().values(), strict=True):
            own.copy_(new)
        for name, start in self.log_sigma.items():
            self.bnn.log_sigma[name].copy_(start)
        for state in self.optimizer.state.values():
            for entry in state.values():
                entry.zero_()
        for running in self.objective.running_means().values():
            for total in running.sums.values():
                total.zero_()
        self.objective.seed = seed

    def run(self, seed: int, beta: float) -> dict[str, Any]:
        self.restart(seed)
        self.objective.beta = beta
        images, labels = self.train
        num_batches = len(labels) // BATCH_SIZE
        total = self.args.epochs * num_batches
        started = time.perf_counter()
        for epoch in range(self.args.epochs):
            order = torch.randperm(len(labels), generator=Streams(seed, epoch).generator("order", "cpu")).to(
                labels.device
            )
            for index in range(num_batches):
                number = epoch * num_batches + index
                factor = varlap.FitSettings(epochs=1).lr_factor(number / total)
                for group, rate in zip(self.optimizer.param_groups, (self.args.lr, 10 * self.args.lr), strict=True):
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(rate * factor)
                    else:
                        group["lr"] = rate * factor
                items = order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]
                batch = images[items]
                if self.args.augment:
                    batch = varlap.data.crop_and_flip(batch, Streams(seed, number).generator("augment", labels.device))
                batch = batch.contiguous(memory_format=torch.channels_last)
                self.step(batch, labels[items], number=number)
        self.step.check()
        if labels.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        scores = varlap.evaluate(self.bnn, self.test)
        share = torch.cat(
            [(self.bnn.log_sigma[n] - self.bnn.prior_scale[n].log()).flatten() for n in self.bnn.log_sigma]
        )
        return {
            "seed": seed,
            "beta": beta,
            "seconds": seconds,
            "median_log_sigma_over_s": float(share.detach().median()),
            **scores,
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
    runners: dict[str, Runner] = {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for seed, beta, method in itertools.product(range(args.seeds), args.betas, args.methods.split(",")):
        done = [run for run in runs if run["method"] == method]
        if any((run["seed"], run["beta"]) == (seed, beta) for run in done):
            continue
        if time.perf_counter() - began + max((run["seconds"] for run in done), default=0.0) > args.seconds:
            print(f"no time for {method}, seed {seed}", flush=True)
            continue
        if method not in runners:
            runners[method] = Runner(method, args, data)
        run = {"method": method, "curvature": repr(CURVATURES.get(method)), **runners[method].run(seed, beta)}
        print(run, flush=True)
        runs.append(run)
        result = {"spec": spec, "origin": origin, "summary": summary(runs), "runs": runs}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
