"""The mean network leaves varlap: as an ordinary module, as ONNX, by torch.export, and to another process."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varlap

ROOT = Path(__file__).parents[2]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: varlap.models.mlp(64, 10), (64,)),
    "convnet": (lambda: varlap.models.convnet(width=4, image_size=8, batch_norm=True), (1, 8, 8)),
    "preact_resnet18": (lambda: varlap.models.preact_resnet18(width=4), (3, 32, 32)),
}


def trained(name: str) -> tuple[varlap.BNN, Callable[[int], Tensor]]:
    """Train for two steps, so that batch norm's statistics are not those of the start."""
    build, shape = NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    bnn = varlap.BNN(build())
    data = torch.randn(8, *shape, generator=generator), torch.arange(8)
    varlap.fit(bnn, varlap.MAP(8), data, epochs=2, batch_size=8, lr=1e-2, progress="none")
    return bnn, lambda num_items: torch.randn(num_items, *shape, generator=generator)


@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_runtime_gives_the_same_values_for_any_batch_size(name: str, tmp_path: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    bnn, inputs = trained(name)
    network = bnn.network.eval()
    program = torch.onnx.export(
        network,
        (inputs(2),),
        dynamo=True,
        input_names=["x"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for num_items in (1, 2, 7):
        x = inputs(num_items)
        (found,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), network(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_torch_export_gives_the_same_values_after_a_round_trip(name: str, tmp_path: Path):
    bnn, inputs = trained(name)
    network = bnn.network.eval()
    program = torch.export.export(network, (inputs(2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    for num_items in (1, 2, 7):
        x = inputs(num_items)
        torch.testing.assert_close(again(x), network(x), rtol=1e-6, atol=1e-6)


def test_the_network_is_the_users_own_and_knows_nothing_of_varlap():
    network = varlap.models.mlp(4, 3)
    keys = list(network.state_dict())
    bnn = varlap.BNN(network)
    assert bnn.network is network
    assert list(network.state_dict()) == keys
    assert type(network) is nn.Sequential


@pytest.mark.filterwarnings("ignore:batch norm follows Bayesian weights:varlap.errors.VarlapWarning")
def test_a_saved_model_predicts_the_same_bits_in_a_new_process(tmp_path: Path):
    bnn, inputs = trained("convnet")
    x = inputs(5)
    bnn.save(tmp_path / "model")
    torch.save(x, tmp_path / "x.pt")
    code = f"""
import torch, varlap
torch.set_num_threads({torch.get_num_threads()})
bnn = varlap.load({str(tmp_path / "model")!r}, varlap.models.convnet(width=4, image_size=8, batch_norm=True))
x = torch.load({str(tmp_path / "x.pt")!r}, weights_only=True)
found = [bnn.predict(x).probs, bnn.predict(x, how="linearised", num_samples=3).probs]
torch.save(found, {str(tmp_path / "found.pt")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    mean, linearised = torch.load(tmp_path / "found.pt", weights_only=True)
    assert torch.equal(mean, bnn.predict(x).probs)
    assert torch.equal(linearised, bnn.predict(x, how="linearised", num_samples=3).probs)


@pytest.mark.parametrize("page", ["export", "lightning"])
def test_the_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip({"export": "onnxruntime", "lightning": "lightning"}[page])
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
