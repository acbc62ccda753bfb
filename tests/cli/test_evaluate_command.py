"""`varlap evaluate`: a finished run is scored as `varlap.evaluate` would, and what is no finished run is named."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import varlap
from varlap.cli import app
from varlap.experiments import Evaluated, TrainedRun
from varlap.models import convnet

TRAIN = ["train", "digits", "--epochs", "3", "--batch-size", "64", "--lr", "0.01", "--quiet"]


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that holds images out."""
    state = torch.get_rng_state()
    folder = tmp_path_factory.mktemp("runs") / "vl"
    _run(*TRAIN, "--validation", "0.1", "--out", str(folder))
    torch.set_rng_state(state)  # the command seeds torch for the weights
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _by_hand(run: Path):
    """The network and its data, without any of the code that is tested."""
    digits = varlap.data.load("digits")
    normalise = varlap.data.Normaliser.of(digits.train_images)
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(0))[:144]
    held_out = normalise(digits.train_images)[order], digits.train_labels[order]
    bnn = varlap.load(run / "model", convnet(image_size=8))
    return bnn, digits, normalise, (normalise(digits.test_images), digits.test_labels), held_out


@pytest.mark.parametrize("how", ["mean", "sampled", "linearised"])
@pytest.mark.filterwarnings("ignore::varlap.errors.VarlapWarning")
def test_scores_are_those_of_evaluate_in_every_mode(run: Path, how: str):
    said = json.loads(_run("evaluate", str(run), "--how", how, "--ood", "rotated", "--bootstrap", "20", "--json"))
    bnn, digits, normalise, test, _ = _by_hand(run)
    ood = normalise(digits.test_images.rot90(1, (2, 3)))
    expected = varlap.evaluate(bnn, test, how=how, ood=ood, bootstrap=20)
    (kept,) = Evaluated.read_all(run / "evaluations")
    assert said["scores"] == kept.scores == expected
    assert said["spec"] == kept.spec
    assert Path(said["folder"]) == run / "evaluations" / f"{how}-rotated"
    number = {"mean": None, "sampled": 10, "linearised": 30}[how]
    told = {"data": "digits", "method": "vl", "model": "convnet", "beta": 0.01, "epochs": 3, "seed": 0, "lr": 0.01}
    assert (
        kept.spec.items() >= (told | {"how": how, "num_samples": number, "temperature": 1.0, "ood": "rotated"}).items()
    )
    assert kept.seconds == json.loads((run / "result.json").read_text())["seconds"] > 0
    assert kept.origin["torch"] == torch.__version__
    prediction = bnn.predict(test[0]) if how == "mean" else bnn.predict(test[0], how=how)
    torch.testing.assert_close(kept.predictions["probs"], prediction.probs)
    torch.testing.assert_close(kept.predictions["entropy"], prediction.entropy)
    assert torch.equal(kept.predictions["labels"], digits.test_labels)
    assert (
        ("mutual_information" in kept.predictions) == ("ood_mutual_information" in kept.predictions) == (how != "mean")
    )
    unsure = kept.predictions["least_sure"]
    assert (
        kept.predictions["entropy"][unsure].tolist()
        == kept.predictions["entropy"].sort(descending=True)[0][:12].tolist()
    )
    assert torch.equal(kept.predictions["images"], digits.test_images[unsure])


def test_a_temperature_of_held_out_images_is_reported_beside_the_unscaled_scores(run: Path):
    said = json.loads(_run("evaluate", str(run), "--temperature-from-validation", "--json"))
    bnn, _, _, test, held_out = _by_hand(run)
    temperature = varlap.fit_temperature(bnn, held_out)
    both = {"nll_scaled": varlap.evaluate(bnn, test, temperature=temperature)["nll"], "temperature": temperature}
    assert said["scores"] == varlap.evaluate(bnn, test) | both
    assert said["scaled"]["scores"] == varlap.evaluate(bnn, test, temperature=temperature) | both
    plain, scaled = Evaluated.read_all(run / "evaluations")
    assert (plain.scores, scaled.scores) == (said["scores"], said["scaled"]["scores"])
    assert (plain.name, scaled.name) == ("VL", "VL + temperature scaling")
    assert (plain.spec["temperature"], scaled.spec["temperature"]) == (1.0, temperature)
    assert temperature != pytest.approx(1.0, abs=1e-3)


@pytest.mark.filterwarnings("ignore::varlap.errors.VarlapWarning")
@pytest.mark.filterwarnings("ignore:num_samples=3 draws nothing")
def test_another_question_leaves_earlier_evaluations_as_they_are(run: Path):
    sampled = [[], ["--num-samples", "5"], ["--num-samples", "20"], ["--num-samples", "5", "--seed", "1"]]
    asked = [["--how", "sampled", *more] for more in sampled]
    asked += [["--how", "linearised", "--num-samples", "10"], [], ["--num-samples", "3"]]
    said = [json.loads(_run("evaluate", str(run), *options, "--json")) for options in asked]
    names = ["sampled", "sampled-5-samples", "sampled-20-samples", "sampled-5-samples-seed-1"]
    names += ["linearised-10-samples", "mean", "mean"]  # which has no samples
    assert [Path(one["folder"]).name for one in said] == names
    for one in said:
        assert Evaluated.read(one["folder"]).scores == one["scores"]
    again = json.loads(_run("evaluate", str(run), "--how", "sampled", "--num-samples", "10", "--json"))
    assert Path(again["folder"]).name == "sampled"  # the default, said


def test_people_get_a_table_and_pictures(run: Path):
    said = _run("evaluate", str(run), "--ood", "letters", "--bootstrap", "20")
    (kept,) = Evaluated.read_all(run)
    assert f"{kept.scores['nll']:.4f} ({kept.scores['nll_low']:.4f}–{kept.scores['nll_high']:.4f})" in said
    assert "ood_auroc_entropy" in said
    assert [path.name for path in (run / "figures").iterdir()] == ["sigma_over_s.svg"]


def test_without_matplotlib_one_line_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _run("evaluate", str(run))
    assert [record.getMessage() for record in caplog.records if "figures" in record.getMessage()] == [
        "no figures were drawn: varlap.plot.sigma_over_s needs an optional dependency: pip install '.[plot]' in the "
        "checkout"
    ]
    assert not (run / "figures").exists()
    assert Evaluated.read_all(run)


def test_other_data_of_the_same_size_go_through_the_same_normaliser(run: Path, monkeypatch: pytest.MonkeyPatch):
    images = np.random.default_rng(0).integers(0, 2, (5, 8, 8)).astype(np.uint8)
    _save(run, "noise", images)
    monkeypatch.setenv("VARLAP_DATA", str(run))
    said = json.loads(_run("evaluate", str(run), "--ood", "noise", "--json"))
    bnn, _, normalise, test, _ = _by_hand(run)
    ood = normalise(torch.from_numpy(images)[:, None])
    assert said["scores"] == varlap.evaluate(bnn, test, ood=ood)


def test_other_images_that_do_not_fit_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch):
    _save(run, "large", np.zeros((2, 9, 8, 3), np.uint8))
    monkeypatch.setenv("VARLAP_DATA", str(run))
    _refused(
        ["--ood", "large"],
        run,
        "images of large are 9×8 with 3 channels, those of digits 8×8 with 1 channel; choose data of the same size and "
        "channels, or one of letters, rotated",
    )
    _refused(["--ood", "digits"], run, "digits is what the network was trained on")
    _refused(["--ood", "leters"], run, "no images are called 'leters'; did you mean 'letters'?")
    assert not (run / "evaluations").exists()


def test_a_temperature_needs_held_out_images(tmp_path: Path):
    _run(*TRAIN[:3], "1", "--model", "mlp", "--quiet", "--out", str(tmp_path / "all"))
    _refused(
        ["--temperature-from-validation"],
        tmp_path / "all",
        "was trained on all its images, so none are left to fit a temperature on; train with `varlap train ... "
        "--validation 0.1`",
    )


def test_intervals_of_too_few_draws_are_refused(run: Path):
    _refused(["--bootstrap", "1"], run, "evaluate(bootstrap=1): an interval of so few draws may leave out the score")
    assert not (run / "evaluations").exists()


def test_a_map_run_has_nothing_to_average_over(run: Path):
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"method": "map"}))
    _refused(
        ["--how", "sampled"],
        run,
        "was trained by MAP, which learns no variances, so --how sampled has nothing to average over; use --how mean, "
        "or train with --method laplace, vi or vl",
    )
    _run("evaluate", str(run))
    assert not (run / "figures").exists()


def test_what_is_no_finished_run_is_named(run: Path, tmp_path: Path):
    _refused([], tmp_path / "nowhere", "nowhere is no folder; give one that `varlap train DATA --out RUN` wrote")
    (tmp_path / "empty").mkdir()
    _refused([], tmp_path / "empty", "empty holds no run; give a folder that `varlap train DATA --out RUN` wrote")
    (run / "result.json").unlink()
    _refused([], run, "is not finished; repeat its `varlap train` command, which carries it on")
    spec = json.loads((run / "spec.json").read_text())
    (run / "spec.json").write_text(json.dumps(spec | {"label": {}}))
    _refused([], run, "is a run of varlap.fit, which does not tell its network or data; evaluate it in Python")


def test_results_of_other_versions_are_named(run: Path):
    result = json.loads((run / "result.json").read_text())
    less = {name: value for name, value in result.items() if name != "normaliser"}
    (run / "result.json").write_text(json.dumps(less))
    _refused(
        [], run, "result.json does not say normaliser: another version of varlap wrote it; repeat its `varlap train`"
    )
    (run / "result.json").write_text("{")
    _refused([], run, "result.json cannot be read")
    (run / "result.json").write_text(json.dumps(result | {"normaliser": 3}))
    _refused([], run, "result.json is damaged")


def test_opening_a_run_draws_nothing_from_the_global_generator(run: Path):
    before = torch.get_rng_state()
    TrainedRun.open(run).bnn()
    assert torch.equal(before, torch.get_rng_state())


def _save(folder: Path, name: str, images: np.ndarray) -> None:
    labels = np.zeros(len(images), np.int64)
    np.savez(folder / name, train_images=images, train_labels=labels, test_images=images, test_labels=labels)


def _refused(options: list[str], run: Path, message: str) -> None:
    said = _run("evaluate", str(run), *options, status=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1


@pytest.fixture(autouse=True)
def _random_state():
    """The command seeds torch for the weights; other tests must not notice."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
