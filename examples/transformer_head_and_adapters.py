"""A Hugging Face transformer of which only a part is Bayesian: its head, or low-rank adapters and its head.

Run it: python examples/transformer_head_and_adapters.py

The weights are random, so that nothing is downloaded; for a pretrained one use `from_pretrained`. A text is positive if
its good words outnumber its bad ones, where "not" turns the word after it round.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import varlap

PAD, NOT, GOOD, BAD, NUM_WORDS, LENGTH = 0, 1, range(2, 6), range(6, 10), 20, 8


def make_texts(num_texts: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Draw texts of 4 to 8 words with their labels; the network takes the dict as its arguments."""
    words = torch.randint(1, NUM_WORDS, (num_texts, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (num_texts, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    words = words.where(mask, torch.tensor(PAD))
    values = torch.zeros(NUM_WORDS)
    values[list(GOOD)], values[list(BAD)] = 1.0, -1.0
    turned = torch.cat([torch.zeros(num_texts, 1, dtype=torch.bool), words[:, :-1] == NOT], 1)
    total = (values[words] * torch.where(turned, -1.0, 1.0)).sum(1)
    return {"input_ids": words, "attention_mask": mask.long()}, (total > 0).long()


class LowRank(nn.Module):
    """A frozen linear layer plus a low-rank update, which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add the update."""
        return self.layer(x) + self.up(self.down(x))


def add_adapters(network: nn.Module) -> nn.Module:
    """Put adapters around every linear layer of the encoder."""
    for module in list(network.bert.encoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, LowRank):
                setattr(module, name, LowRank(child))
    return network


def main() -> None:
    """Train the head, then adapters and head, and print the scores of both."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,  # the usual 0.02 is for weights that are all trained
    )
    pretrained = BertForSequenceClassification(config)
    pretrained.bert.requires_grad_(False)  # the body is frozen
    generator = torch.Generator().manual_seed(0)
    train, test = make_texts(2000, generator), make_texts(1000, generator)

    for part, network, select in (
        ("head", copy.deepcopy(pretrained), "classifier.*"),
        ("adapters and head", add_adapters(copy.deepcopy(pretrained)), ["*.down.*", "*.up.*", "classifier.*"]),
    ):
        bnn = varlap.BNN(network, select=select, output="logits")
        objective = varlap.VL(num_data=len(train[1]), beta=0.01)
        varlap.fit(bnn, objective, train, epochs=10, batch_size=64, lr=5e-3, progress="none")
        scores = varlap.evaluate(bnn, test, only=("nll", "accuracy", "ece"))
        total = sum(parameter.numel() for parameter in network.parameters())
        print(
            f"{part}: {bnn.num_weights()} of {total} weights Bayesian,",
            {name: round(value, 3) for name, value in scores.items()},
        )


if __name__ == "__main__":
    main()
