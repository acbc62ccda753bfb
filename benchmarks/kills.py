"""Kill a training run at random moments, carry it on, and compare it with one that was left alone, bit by bit.

    python benchmarks/kills.py --kills 50 --out results/reliability/kills.json

Each child is a fork that trains with a checkpoint after every step, so many kills come while one is being written; it
is killed with SIGKILL, and the same call is made again until it ends by itself.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import varlap
from varlap.training.run_folder import newest

VOLATILE = {"seconds", "memory_mb"}


def train(out: Path, save_every: int = 1) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, stride=2, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.Softplus(),
        torch.nn.Dropout(0.1),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 9, 10),
    )
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(96, 1, 8, 8, generator=generator), torch.randint(0, 10, (96,), generator=generator)
    varlap.fit(
        varlap.BNN(network),
        varlap.VL(80, beta=0.1),
        (x[:80], y[:80]),
        validation=(x[80:], y[80:]),
        augment=varlap.data.crop_and_flip,
        out=out,
        epochs=6,
        batch_size=8,
        keep="best",
        save_every=save_every,
        progress="none",
    )


def final_state(out: Path) -> tuple[dict[str, torch.Tensor], Any, list[dict[str, Any]]]:
    """Everything that the last checkpoint and the metrics hold, times and memory aside."""
    checkpoint = newest(out)
    assert checkpoint is not None
    tensors = {f"{group}/{name}": t for group, named in checkpoint.tensors.items() for name, t in named.items()}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if key not in VOLATILE} for row in rows]
    return tensors, checkpoint.documents["state"], rows


def same(one: Any, other: Any) -> bool:
    tensors_equal = one[0].keys() == other[0].keys() and all(torch.equal(one[0][n], other[0][n]) for n in one[0])
    return tensors_equal and one[1:] == other[1:]


def run_and_kill(out: Path, after_s: float | None) -> bool:
    """Train in a child; return whether it was killed."""
    child = multiprocessing.get_context("fork").Process(target=train, args=(out,))
    child.start()
    child.join(after_s)
    if child.is_alive():
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        return True
    if child.exitcode:
        raise RuntimeError(f"the training itself failed with exit status {child.exitcode}")
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many runs to kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    moments = random.Random(args.seed)
    runs: list[dict[str, Any]] = []
    while_saving = 0
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run_and_kill(Path(folder) / "left alone", None)
        whole_s = time.perf_counter() - started
        reference = final_state(Path(folder) / "left alone")
        while len(runs) < args.kills:
            out, kills = Path(folder) / f"killed {len(runs)}", 0
            while kills == 0 or (kills < 3 and moments.random() < 0.3):  # some are killed again
                if run_and_kill(out, moments.uniform(0, whole_s)):
                    kills += 1
                    checkpoints = out / "checkpoints"
                    while_saving += checkpoints.exists() and any(p.name.startswith(".") for p in checkpoints.iterdir())
                elif kills == 0:
                    shutil.rmtree(out)  # it ended before its moment came
                else:
                    break
            run_and_kill(out, None)
            runs.append({"kills": kills, "equal": same(reference, final_state(out))})
            print(f"{sum(run['equal'] for run in runs)} of {len(runs)} resumed runs equal", flush=True)
    result = {
        "spec": {"kills": args.kills, "seed": args.seed},
        "origin": {"varlap": varlap.__version__, "torch": torch.__version__, "hardware": platform.machine()},
        "kills": sum(run["kills"] for run in runs),
        "kills_while_saving": while_saving,
        "runs": len(runs),
        "runs_equal": sum(run["equal"] for run in runs),
        "seconds_left_alone": whole_s,
        "each": runs,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if result["runs_equal"] != len(runs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
