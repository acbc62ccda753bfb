"""An error of the user's network says how varlap called it."""

import pytest
import torch
from torch import nn

import varlap


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, z: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.body(x + scale * z)


@pytest.mark.parametrize(
    ("network", "x", "note"),
    [
        (nn.Linear(3, 2), torch.ones(5, 4), "varlap called Linear.forward(input) with x (5, 4)"),
        (nn.Embedding(3, 2), torch.tensor([[7]]), "varlap called Embedding.forward(input) with x (1, 1)"),
        (
            Two(),
            {"x": torch.ones(5, 3), "z": torch.ones(5, 3), "w": torch.ones(5)},
            "varlap called Two.forward(x, z, scale) with x['x'] (5, 3), x['z'] (5, 3), x['w'] (5,)",
        ),
        (nn.Linear(3, 2), "text", "varlap called Linear.forward(input) with x, a str"),
    ],
)
def test_an_error_of_the_network_has_a_note_of_what_it_was_given(network: nn.Module, x: object, note: str):
    with pytest.raises((RuntimeError, IndexError, TypeError)) as caught:
        varlap.BNN(network).predict(x)
    assert caught.value.__notes__ == [note]


def test_fit_says_it_too():
    bnn = varlap.BNN(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        varlap.fit(bnn, varlap.MAP(8), (torch.ones(8, 4), torch.zeros(8).long()), epochs=1, progress="none")
    assert "varlap called Linear.forward(input) with x (1, 4)" in caught.value.__notes__


class OfTorch(nn.Module):
    """One whose forward pass is a function without a signature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.forward = torch.relu


def test_an_error_passes_where_the_signature_cannot_be_read():
    with pytest.raises(TypeError, match="relu") as caught:
        varlap.BNN(OfTorch()).predict("text")
    assert caught.value.__notes__ == ["varlap called OfTorch.forward(...) with x, a str"]


class Slip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.table(x).to(mask.dtype)


def test_a_slip_of_the_network_that_speaks_of_dtypes_is_not_taken_for_inputs_of_another_precision():
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'dtype'"):
        varlap.BNN(Slip()).predict(torch.tensor([[1]]))
