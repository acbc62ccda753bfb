"""Lightning trains a Bayesian network on digits, data-parallel in two processes on the CPU.

Run it: python examples/lightning_two_processes.py

Each process squares the gradient of labels that it draws for its own items, which keeps the estimate of the curvature
unbiased; Lightning averages the gradients. On a GPU: Trainer(accelerator="gpu", devices=..., precision="bf16-mixed").
"""

import os
import tempfile

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import varlap
from varlap.integrations.lightning import FitSampler, LightningBNN


def main() -> None:
    """Train, and load the best checkpoint as an ordinary model."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the processes communicate over loopback only
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same initial weights in both
    digits = varlap.data.load("digits")
    x, y = digits.train_images.flatten(1), digits.train_labels
    train, held_out = TensorDataset(x[180:], y[180:]), TensorDataset(x[:180], y[:180])  # which chooses the checkpoint
    test = TensorDataset(digits.test_images.flatten(1), digits.test_labels)

    bnn = varlap.BNN(varlap.models.mlp(64, 10))
    module = LightningBNN(bnn, varlap.VL(num_data=len(train), beta=0.01), lr=1e-2)
    # Passed to the second process, which runs this script again.
    folder = os.environ.setdefault("EXAMPLE_FOLDER", tempfile.mkdtemp())
    best = ModelCheckpoint(folder, monitor="validation_nll")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=10,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(train, batch_size=32, sampler=FitSampler(train))  # 32 in each process
    trainer.fit(module, loader, DataLoader(held_out, batch_size=180))

    if trainer.is_global_zero:
        again = varlap.load(best.best_model_path, varlap.models.mlp(64, 10))
        scores = varlap.evaluate(again, test[:], only=("nll", "accuracy", "ece"))
        print(f"{trainer.world_size} processes:", {name: round(value, 3) for name, value in scores.items()})


if __name__ == "__main__":
    main()
