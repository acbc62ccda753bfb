"""Every shipped experiment is a valid list of runs, and a typo is refused before anything runs."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from varlap.errors import ConfigError, DataError
from varlap.experiments.grid import Experiment, expand, paper_numbers
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store

COUNTS = {"figure-1": 12, "figure-2": 16, "miniature": 4, "table-1": 48, "table-2": 3}


def test_every_shipped_experiment_is_valid_and_counted():
    assert {name: len(Experiment.named(name).specs) for name in Experiment.names()} == COUNTS
    for name in Experiment.names():
        keys = [spec.key() for spec in Experiment.named(name).specs]
        assert len(set(keys)) == len(keys)


@dataclass(frozen=True)
class LaterSpec(RunSpec):
    """A spec as it may look once a setting was added."""

    warm_up: int = 0


@pytest.mark.parametrize("settings", [{}, {"epochs": 50, "seed": 2, "recipe": "ours", "prior_scale": 1}])
def test_a_setting_that_is_added_with_a_default_leaves_every_key_as_it_was(settings: dict):
    named = {"data": "digits", "method": "vl", "beta": 1}
    before, after = RunSpec.of(named | settings), LaterSpec.of(named | settings)
    assert after.key() == before.key()
    assert after.stated() == before.stated()
    assert LaterSpec.of(named | settings | {"warm_up": 1}).key() != before.key()


def test_every_setting_that_is_not_the_default_is_in_the_key():
    others = {"seed": 1, "recipe": "x", "model": "mlp", "width": 32, "epochs": 3, "lr": 0.1, "schedule": "cosine"}
    others |= {"batch_size": 1, "log_sigma_lr_multiplier": 1, "curvature": "default", "prior_scale": 1.0}
    others |= {"augment": False, "validation": 0.2, "num_train": 9, "precision": "fp32", "linearised": False}
    others |= {"optimizer": "Adam", "momentum": 0.8, "warmup": 0.1, "clip_norm": 1.0}
    others |= {"gradient": "whole", "variances": "closed-form", "beta_warmup": 0.1}
    spec = RunSpec("digits", "vl", 0.1, optimizer="SGD", momentum=0.9)
    assert set(others) == {field.name for field in dataclasses.fields(spec)} - {"data", "method", "beta"}
    other = [{name: value} | ({"momentum": 0.0} if name == "optimizer" else {}) for name, value in others.items()]
    changed = [dataclasses.replace(spec, **settings) for settings in other]
    assert len({one.key() for one in [spec, *changed]}) == 1 + len(others)


def test_changes_replace_settings_and_grids():
    specs = Experiment.named("table-1", recipe="ours", data=["cifar10"], epochs=50, seed=[0, 1]).specs
    assert len(specs) == 24
    assert {(spec.data, spec.epochs, spec.lr, spec.recipe) for spec in specs} == {("cifar10", 50, 1e-3, "ours")}


def test_a_value_that_comes_twice_is_run_once():
    specs = expand({"grid": {"data": "digits", "method": ["vl"], "beta": [1, 0.1, 1.0, 0.1]}}, {"seed": [0, 0]})
    assert [(spec.beta, spec.seed) for spec in specs] == [(1.0, 0), (0.1, 0)]


def test_the_papers_numbers_are_all_there():
    rows = ["VL", "VI (mean)", "VI (10 samples)", "MAP"]
    table = {  # test NLL, accuracy, ECE, typed from the paper
        "cifar10": [[0.23, 0.924, 0.017], [0.37, 0.911, 0.053], [0.35, 0.902, 0.044], [0.43, 0.908, 0.058]],
        "cifar100": [[1.00, 0.714, 0.024], [1.29, 0.688, 0.100], [1.49, 0.673, 0.026], [1.61, 0.675, 0.159]],
        "svhn": [[0.14, 0.971, 0.009], [0.16, 0.963, 0.012], [0.22, 0.955, 0.022], [0.24, 0.957, 0.028]],
        "fashion_mnist": [[0.16, 0.946, 0.010], [0.23, 0.940, 0.034], [0.29, 0.936, 0.016], [0.29, 0.936, 0.096]],
    }
    assert paper_numbers("table-1") == {data: dict(zip(rows, found, strict=True)) for data, found in table.items()}
    assert paper_numbers("table-2") == {"cifar10": {"VL": 114.9, "VI": 43.2, "MAP": 41.8}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metod": "vl"}, "a run has no setting 'metod'; did you mean 'method'?"),
        ({"data": "cifar"}, "data = 'cifar': did you mean 'cifar10'?"),
        ({"beta": float("inf")}, "beta = inf must be a positive, finite number"),
        ({"beta": True}, "beta = True must be a positive, finite number"),
        ({"epochs": 1.5}, "epochs = 1.5 must be a whole number of at least 1"),
        ({"num_train": -3}, "num_train = -3 must be a whole number of at least 1"),
        ({"validation": 1.0}, "validation = 1.0 must be a part of the training images"),
        ({"linearised": "no"}, "linearised = 'no' must be true or false"),
        ({"seed": -1}, "seed = -1 must be a whole number of at least 0"),
        ({"validation": "0.1"}, "validation = 0.1 must be a part of the training images"),
        ({"momentum": 0.9}, "momentum = 0.9 is SGD's; set optimizer = 'SGD' too"),
        ({"optimizer": "SGD", "momentum": 1}, "momentum = 1 must be at least 0 and below 1; 0.9 is usual"),
        ({"warmup": -0.1}, "warmup = -0.1 must be the part of the training over which the learning rate rises"),
        ({"beta_warmup": 1.0}, "beta_warmup = 1.0 must be the part of the training over which β rises, such as 0.3"),
        ({"optimizer": "SGD"}, "optimizer = 'SGD' without momentum; set momentum too; 0.9 is usual"),
        ({"width": 16, "model": "mlp"}, "width = 16 is PreactResNet-18's, and mlp has none; leave it out"),
        ({"width": 16, "model": "convnet"}, "width = 16 is PreactResNet-18's, and convnet has none; leave it out"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd': did you mean 'SGD'?"),
        ({"recipe": "../x"}, "becomes part of a file's name"),
    ],
)
def test_a_mistake_in_a_spec_is_named(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("..", r"\.\.")):
        RunSpec.of({"data": "digits", "method": "vl", "beta": 0.1} | settings)


RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not part of a source distribution")
def test_every_committed_result_is_read_and_lies_under_its_key():
    folders = [folder for folder in RESULTS.iterdir() if Store.is_one(folder)]
    results = [(folder, result) for folder in folders for result in Store(folder)]
    assert len(results) > 100
    for folder, result in results:
        assert (folder / f"{result.spec.key()}.json").is_file(), result.spec


def test_every_method_of_a_table_has_as_many_trials():
    for what in ("table-1", "figure-1"):
        specs = Experiment.named(what).specs
        tried = {
            (data, method): {spec.beta for spec in specs if (spec.data, spec.method) == (data, method)}
            for data, method in {(spec.data, spec.method) for spec in specs}
        }
        assert {len(betas) for betas in tried.values()} == {4}
    assert set(Experiment.named("figure-1").specs) <= set(Experiment.named("table-1").specs)  # nothing is run twice


def test_mistakes_in_an_experiment_are_named():
    with pytest.raises(ConfigError, match=r"there is no experiment 'table-3'; did you mean 'table-"):
        Experiment.named("table-3")
    with pytest.raises(ConfigError, match=r"an experiment has no part 'gird'; did you mean 'grid'\?"):
        expand({"gird": {}}, {})
    with pytest.raises(ConfigError, match="recipe 'mine': choose 'paper', 'ours' or 'sgd'"):
        Experiment.named("table-1", recipe="mine")


def test_an_experiment_of_ones_own_is_read_and_its_mistakes_are_named_with_the_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('[common]\nepochs = 2\n[grid]\ndata = ["digits"]\nmethod = ["map", "vl"]\nbeta = [0.1]\n')
    found = Experiment.read(path, seed=[0, 1])
    assert (found.name, found.title, len(found.specs)) == ("mine", "mine", 4)
    path.write_text('[grid]\ndata = ["digits"]\nmetod = ["vl"]\nbeta = [0.1]\n')
    with pytest.raises(ConfigError, match=r"mine.toml: a run has no setting 'metod'; did you mean 'method'\?"):
        Experiment.read(path)
    path.write_text("[grid\n")
    with pytest.raises(ConfigError, match=r"the experiment .*mine.toml cannot be read"):
        Experiment.read(path)
    path.write_text("grid = 3\n")
    with pytest.raises(ConfigError, match=r"mine.toml: grid = 3 must be a table of settings: \[grid\]"):
        Experiment.read(path)
    path.write_text("title = 3\n")
    with pytest.raises(ConfigError, match=r"mine.toml: title = 3 must be a text"):
        Experiment.read(path)
    own = '[grid]\ndata = "digits"\nmethod = ["map", "vl"]\n[grid.beta]\n'
    for table, message in (
        ("map = [0.1]\nvi = [0.1]\n", r"beta has no values for the method 'vl'; add vl = \[...\] to \[grid.beta\]"),
        ("map = [0.1]\nvl = []\n", r"beta.vl = \[\] leaves nothing to run"),
        ("mpa = [0.1]\n", r"beta has values for 'mpa', which is no method; did you mean 'map'\?"),
    ):
        path.write_text(own + table)
        with pytest.raises(ConfigError, match=message):
            Experiment.read(path)
    path.write_text('[common]\nrecipe = "sgd"\n[grid]\ndata = "digits"\nmethod = "map"\nbeta = 0.1\n')
    with pytest.raises(ConfigError, match=r"mine.toml: recipe = 'sgd' would be a name without its settings; choose it"):
        Experiment.read(path)
    assert [spec.optimizer for spec in Experiment.read(path, recipe="sgd").specs] == ["SGD"]
    path.write_text("[grid]\nbeta = []\n")
    with pytest.raises(ConfigError, match=r"beta = \[\] leaves nothing to run"):
        Experiment.read(path)


def test_a_result_is_read_as_it_was_written_but_for_digits_nobody_needs(tmp_path: Path):
    store = Store(tmp_path)
    spec = RunSpec("digits", "vl", 0.1 + 0.2)  # 0.30000000000000004
    rows = ({"epoch": 0, "elbo": float("nan"), "seconds": 1 / 3},)
    store.put(Result(spec, {"mean": {"nll": float("inf")}}, {}, {"torch": "2"}, 2 / 3, rows, "letters"))
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["history"] == [{"epoch": 0, "elbo": None, "seconds": 0.333333}]
    found = store.get(spec)
    assert found is not None
    assert found.spec == spec
    assert (found.seconds, found.ood, found.origin) == (0.666667, "letters", {"torch": "2"})
    assert math.isnan(found.test["mean"]["nll"])
    assert Store.is_one(tmp_path)
    assert not Store.is_one(tmp_path / "report")


def test_equal_specs_have_one_result(tmp_path: Path):
    store = Store(tmp_path)
    store.put(Result(RunSpec("digits", "vl", 1), {"mean": {"nll": 0.3}}, {}, {}, seconds=2.0))
    found = store.get(RunSpec("digits", "vl", 1.0))
    assert found is not None
    assert found.spec == RunSpec("digits", "vl", 1.0)
    assert store.get(RunSpec("digits", "vl", 1.0, seed=1)) is None


def test_a_damaged_result_is_named(tmp_path: Path):
    store = Store(tmp_path)
    store.put(Result(RunSpec("digits", "vl", 1.0), {}, {}, {}, seconds=2.0))
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text()[:40])
    with pytest.raises(DataError, match=r"cannot be read .*; delete it, and it is computed again"):
        list(store)


def test_a_result_of_a_later_version_is_not_to_be_deleted(tmp_path: Path):
    store = Store(tmp_path)
    store.put(Result(RunSpec("digits", "vl", 1.0), {}, {}, {}, seconds=2.0))
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"spec": content["spec"] | {"dropout": 0.1}}))
    with pytest.raises(
        DataError, match=r"has the setting 'dropout', which this version of varlap does not know; use the"
    ):
        list(store)


def test_multipliers_that_change_nothing_are_not_compared():
    with pytest.raises(ConfigError, match="log_sigma_lr_multiplier would change nothing: VL learns no log σ"):
        Experiment.named("figure-2", recipe="sgd")
    assert len(Experiment.named("figure-2", recipe="sgd", method="vi").specs) == 8
    assert len(Experiment.named("figure-2", recipe="sgd", variances="learnt").specs) == 16


COMMITTED = [folder for folder in sorted((Path(__file__).parents[2] / "results").iterdir()) if Store.is_one(folder)]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_every_committed_result_lies_under_the_name_that_its_spec_gives(folder: Path):
    store = Store(folder)
    named = {store._path(result.spec) for result in store}
    assert named == set(folder.glob("*.json"))
    assert len(COMMITTED) >= 6
