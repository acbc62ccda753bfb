"""A loop of your own with Hugging Face accelerate.

Run it: python examples/accelerate_loop.py
Or in two processes: torchrun --nproc_per_node 2 examples/accelerate_loop.py
(on the CPU `accelerate launch --cpu --num_processes 2` starts one process only)

The network is not given to `accelerator.prepare`: an objective takes the BNN itself, and the gradients are
averaged by hand.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import varlap


def main() -> None:
    """Train by VL and print scores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same start in every process
    accelerator = Accelerator(cpu=True)  # without cpu=True it uses the devices of the machine
    digits = varlap.data.load("digits")
    train = TensorDataset(digits.train_images.flatten(1), digits.train_labels)

    bnn = varlap.BNN(varlap.models.mlp(64, 10).to(accelerator.device)).train()
    objective = varlap.VL(num_data=len(train), beta=0.01)
    optimizer = varlap.adam(bnn, lr=1e-2)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(train, batch_size=64, shuffle=True))

    for _ in range(10):
        for x, y in loader:
            with accelerator.autocast():  # for mixed precision
                terms = objective(bnn, x, y)
            accelerator.backward(terms.loss)
            for parameter in bnn.parameters():
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")
            optimizer.step()
            optimizer.zero_grad()

    test = digits.test_images.flatten(1), digits.test_labels
    scores = varlap.evaluate(bnn, test, only=("nll", "accuracy", "ece"))
    rounded = {name: round(value, 3) for name, value in scores.items()}
    accelerator.print(f"processes: {accelerator.num_processes},", rounded)


if __name__ == "__main__":
    main()
