"""How long linearised prediction takes: PreactResNet-18, 10,000 images, 30 draws of the weights.

    python benchmarks/linearised.py --out results/bench/linearised-h200.json

Random weights and images: the time does not depend on them.
"""

import argparse
import contextlib
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

import varlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    torch.manual_seed(0)
    network = varlap.models.preact_resnet18(width=args.width).to(args.device)
    bnn = varlap.BNN(network.to(memory_format=torch.channels_last))
    images = torch.randn(args.images, 3, 32, 32, device=args.device).contiguous(memory_format=torch.channels_last)
    hardware = torch.cuda.get_device_name() if on_cuda else platform.machine()
    result: dict[str, Any] = {
        "spec": {key: value for key, value in vars(args).items() if key != "out"},
        "origin": {"varlap": varlap.__version__, "torch": torch.__version__, "hardware": hardware},
        "seconds": {},
    }
    for precision in ("fp32", "bf16"):
        around = torch.autocast(args.device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        for how in ("mean", "linearised"):
            options = {} if how == "mean" else {"num_samples": args.samples}
            with around:
                bnn.predict(images[: 2 * args.batch_size], how, batch_size=args.batch_size, **options)  # warm up
                started = time.perf_counter()
                prediction = bnn.predict(images, how, batch_size=args.batch_size, **options)
            assert prediction.probs is not None
            checksum = float(prediction.probs.sum())  # waits for the device
            result["seconds"][f"{how}, {precision}"] = time.perf_counter() - started
            assert round(checksum) == args.images
    if on_cuda:
        result["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    print(result, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
