"""Claims about damaged and foreign files: every byte is vouched for, and nothing that is read can run code."""

import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import seal, sign_again, write_small
from torch import nn

import varlap
from figures import record
from varlap.errors import CheckpointError
from varlap.training import checkpoint as module, encoding, model_file
from varlap.training.checkpoint import (
    checkpoint_path,
    newest_checkpoint,
    read_checkpoint,
)
from varlap.training.model_file import load, save

slow = pytest.mark.slow


def refused(path: Path, match: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    return caught.value


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_small(tmp_path / "small")
    return tmp_path / "small"


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_trials", [100, pytest.param(1000, marks=slow)])
def test_a_flipped_byte_or_a_truncation_anywhere_is_found(tmp_path, num_trials, caplog):
    chance = random.Random(0)
    write_small(checkpoint_path(tmp_path, 1), 1)
    newest = checkpoint_path(tmp_path, 2)
    write_small(newest, 2)
    files = sorted(newest.iterdir())
    for trial in range(num_trials):
        file = files[trial % len(files)]
        good = file.read_bytes()
        place = chance.randrange(len(good))
        changed = bytes([good[place] ^ chance.randrange(1, 256)])
        bad = good[:place] if trial % 3 == 0 else good[:place] + changed + good[place + 1 :]
        file.write_bytes(bad)
        error = refused(newest, ".")
        # A manifest may be at fault by naming a file that is not there.
        assert file.name in str(error) or "manifest.json" in str(error), (file.name, place)
        found = newest_checkpoint(tmp_path)
        assert found[0] == checkpoint_path(tmp_path, 1), (file.name, place)
        file.write_bytes(good)
    assert newest_checkpoint(tmp_path)[0] == newest
    record("flipped bytes and truncations", tried=num_trials, found=num_trials, loaded_silently=0)


def test_every_single_byte_of_the_manifest_matters(small):
    file = small / "manifest.json"
    good = file.read_bytes()
    for place in range(len(good)):
        for other in {good[place] ^ 1, good[place] ^ 32, ord(" "), ord("\t")} - {good[place]}:
            file.write_bytes(good[:place] + bytes([other]) + good[place + 1 :])
            refused(small, r"manifest\.json")
    file.write_bytes(good + b"\n")
    refused(small, r"manifest\.json is damaged")


def test_files_that_the_manifest_does_not_know_are_ignored(small):
    expected = read_checkpoint(small).documents
    (small / "other.json").write_text("not json")
    (small / "evil.pkl").write_bytes(b"")
    assert read_checkpoint(small).documents == expected


def test_missing_things_are_named(small, tmp_path):
    refused(tmp_path / "absent", r"absent/manifest\.json does not exist; give the folder of a whole varlap checkpoint")
    (small / "model.safetensors").unlink()
    refused(small, r"model\.safetensors does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", r"file/manifest\.json cannot be read: .*Not a directory")
    with pytest.raises(CheckpointError, match="cannot be read: embedded null byte"):
        read_checkpoint("a\0b")


@pytest.mark.parametrize("name", ["model.safetensors", "progress.json", "manifest.json"])
def test_only_regular_files_are_read(small, tmp_path, name):
    file, elsewhere = small / name, tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    refused(small, rf"{name} cannot be read: it is a symbolic link")
    file.unlink()
    os.mkfifo(file)
    refused(small, rf"{name} is damaged: it is not a regular file")
    file.unlink()
    file.mkdir()
    refused(small, rf"{name} (is damaged: it is not a regular file|cannot be read: .*Is a directory)")


def test_a_newer_version_asks_for_an_upgrade(small):
    seal(small, {"format": "varlap checkpoint", "version": 2, "files": {}})
    refused(
        small,
        r"has version 2, but this varlap reads up to 1; upgrade it: git pull, then pip install \. in the checkout",
    )


@pytest.mark.parametrize(
    "manifest",
    [[], 3, None, {}, {"format": "zip"}, {"format": "varlap checkpoint"},
     {"format": "varlap checkpoint", "version": "1"}, {"format": "varlap checkpoint", "version": True}],
    ids=str,
)  # fmt: skip
def test_another_format_is_not_taken_for_a_checkpoint(small, manifest):
    (small / "manifest.json").write_text(json.dumps(manifest))
    refused(small, "is not the manifest of a varlap checkpoint; give a folder that varlap wrote")


GOOD_ENTRY = {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        *[
            ({name: GOOD_ENTRY}, "is no file name of a checkpoint")
            for name in ("../secret.json", "/etc/secret.json", "..", "", "a/b.json", "..json", ".json", "a.pkl",
                         "manifest.json", "a.json\n", "a\0.json", "a\\b.json", "C:a.json", "a" * 101 + ".json")
        ],
        *[
            ({"progress.json": entry}, r"it gives no size and SHA-256 for progress\.json")
            for entry in (None, [], {}, {"bytes": 2}, {"sha256": ""}, {"bytes": "2", "sha256": ""},
                          {"bytes": True, "sha256": ""}, {"bytes": 2.0, "sha256": ""}, {"bytes": 2, "sha256": 3})
        ],
        *[
            ({"progress.json": GOOD_ENTRY | {"bytes": size}}, rf"progress\.json .* has \d+ bytes instead of {size}")
            for size in (2, -1, 0, 2**62, 10**30)
        ],
        (None, "it has no list of files"),
        ([], "it has no list of files"),
    ],
    ids=str,
)  # fmt: skip
def test_a_well_signed_manifest_is_not_believed_either(small, tmp_path, files, message):
    (tmp_path / "secret.json").write_text("{}")
    seal(small, {"format": "varlap checkpoint", "version": 1, "files": files})
    refused(small, message)


@pytest.mark.parametrize("depth", [50, 300, 900, 5000])
def test_a_manifest_nested_so_deep_that_it_cannot_be_written_again_is_refused(small, depth):
    nested = "[" * depth + "]" * depth
    (small / "manifest.json").write_text(f'{{"format": "varlap checkpoint", "version": 1, "files": {nested}}}')
    refused(small, r"manifest\.json is damaged")


def test_a_huge_manifest_is_not_read_into_memory(small):
    with (small / "manifest.json").open("r+b") as file:
        file.truncate(2**40)  # a hole, which takes no space on disk
    refused(small, "1099511627776 bytes are too many for a manifest")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"{", b"NaN", b"Infinity", b"-1e999", b"[" * 99999, b"1" * 9999, b"\xef\xbb\xbf{}", b"3\x00"],
    ids=range(10),
)
def test_well_signed_text_that_is_no_json_is_refused(small, data):
    (small / "progress.json").write_bytes(data)
    sign_again(small)
    refused(small, r"progress\.json is damaged: it is no JSON document")


def entry(dtype: str, shape: list, start: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def safetensors_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2**63).to_bytes(8, "little"),
        safetensors_file({"x": entry("F32", [2**61], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F32", [2**40, 2**40], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 2**40)}, b"1234"),
        safetensors_file({"x": entry("F32", [-1], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F8_E8M0", [4], 0, 4), "__metadata__": {"order": '["x"]'}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": "[]"}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": '["x", "x"]'}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": "3"}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": '["x"]'}}, b"12345"),
        safetensors_file(b"[" * 100_000),
    ],
    ids=range(14),
)
def test_well_signed_bytes_that_are_no_safetensors_are_refused(small, data):
    (small / "model.safetensors").write_bytes(data)
    sign_again(small)
    refused(small, r"model\.safetensors is damaged: it is no safetensors file")


# -- foreign files ---------------------------------------------------------------------------------------------------


class Reduced:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def zipped(data: bytes) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


def malicious_files(marker: Path) -> dict[str, bytes]:
    touch = f"touch {marker}"
    write = f"open({str(marker)!r}, 'w').close()"
    header = pickle.dumps(Reduced(os.system, touch))
    tensors = safetensors_file({"x": entry("U8", [len(header)], 0, len(header))}, header)
    return {
        "os.system": pickle.dumps(Reduced(os.system, touch)),
        "eval": pickle.dumps(Reduced(eval, write), protocol=0),
        "zip": zipped(pickle.dumps({"state_dict": Reduced(exec, write)}, protocol=2)),
        "subprocess": pickle.dumps([Reduced(subprocess.check_call, ["touch", str(marker)])]),
        "pickle as the header of safetensors": safetensors_file(header),
        "pickle as the data of safetensors": tensors,
    }


def test_the_malicious_pickles_would_work(tmp_path):
    marker = tmp_path / "marker"
    for name in ("os.system", "eval", "subprocess"):
        pickle.loads(malicious_files(marker)[name])
        assert marker.exists()
        marker.unlink()
    torch.load(io.BytesIO(malicious_files(marker)["zip"]), weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("name", malicious_files(Path("marker")))
@pytest.mark.parametrize("signed", [False, True])
def test_a_pickle_under_any_name_is_refused_and_never_run(tmp_path, name, signed):
    marker = tmp_path / "marker"
    data = malicious_files(marker)[name]
    bnn = varlap.BNN(nn.Linear(2, 3))
    save(bnn, tmp_path / "model")
    for file in sorted(path.name for path in (tmp_path / "model").iterdir()):
        path = tmp_path / "attacked"
        shutil.copytree(tmp_path / "model", path)
        (path / file).write_bytes(data)
        if signed and file != "manifest.json":
            sign_again(path)
        refused(path, re.escape(file))
        with pytest.raises(CheckpointError):
            load(path, nn.Linear(2, 3))
        shutil.rmtree(path)
    assert not marker.exists()
    record(f"pickle {name!r} under every name, {'signed' if signed else 'unsigned'}", executed=0)


def test_nothing_here_can_unpickle():
    for part in (module, encoding, model_file):
        assert not re.search(r"pickle|torch\.load|torch\.save|\beval\(|\bexec\(", Path(part.__file__).read_text())


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change some bytes, cut, repeat, insert, or replace a number or a word by another."""
    changed = bytearray(data)
    if chance.random() < 0.4:  # of one length, which gets past the sizes that a header gives
        for _ in range(chance.choice((1, 2, 5))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        return bytes(changed)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        start = chance.randrange(len(changed) + 1)
        end = min(len(changed), start + chance.choice((0, 1, 2, 8, 40)))
        pieces = (b"", bytes(chance.randrange(256) for _ in range(8)), bytes(changed[start:end]) * 3, b"0", b"-1", b'"',
                  b"[]", b"{}", b"null", b"NaN", b"1e999", b"9" * 25, b"F64", b"BF16", b"F4", b"\x00" * 8, b"own",
                  bytes([chance.randrange(256)]))  # fmt: skip
        changed[start:end] = chance.choice(pieces)
    if chance.random() < 0.1:
        numbers = list(re.finditer(rb"\d+", bytes(changed)))
        if numbers:
            number = chance.choice(numbers)
            changed[number.start() : number.end()] = str(chance.choice((0, 1, 7, 2**31, 2**63, 2**64))).encode()
    return bytes(changed)


@pytest.mark.filterwarnings("ignore:.* was saved from a network with other modules")  # a name in the file has changed
@pytest.mark.parametrize("num_trials", [500, pytest.param(10_000, marks=slow)])
def test_mutated_files_only_ever_raise_our_error(tmp_path, num_trials):
    """Half of them with right hashes, so that what parses foreign bytes is tried, and what builds a model from them."""
    chance = random.Random(1)
    network = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))  # noqa: E731
    bnn = varlap.BNN(network(), varlap.Gaussian(num_outputs=1), varlap.EmpiricalBayesPrior(), select="1.*")
    path = tmp_path / "model"
    save(bnn, path)
    good = {file.name: file.read_bytes() for file in path.iterdir()}
    # Every stage must have been reached; other weights with right hashes are even a sound model.
    stages = ("SHA-256", "not what was written", "bytes instead of", "is no JSON document", "is no safetensors file",
              "cannot be built", "another network", "loaded")  # fmt: skip
    outcomes = dict.fromkeys(stages, 0)
    for trial in range(num_trials):
        signed = trial % 2 == 1
        name = chance.choice(sorted(good) if not signed else ["model.json", "model.safetensors"])
        bad = mutated(good[name], chance)
        if bad == good[name]:
            continue
        (path / name).write_bytes(bad)
        if signed:
            sign_again(path)
        try:
            load(path, network())
            outcomes["loaded"] += 1
            assert signed, "an unsigned change was not found"
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
            for stage in stages:
                outcomes[stage] += stage in str(error)
        for file in {name, "manifest.json"}:
            (path / file).write_bytes(good[file])
    assert min(outcomes.values()) > 0, outcomes
    record("mutated files, half of them with right hashes", tried=num_trials, other_errors=0, where_found=outcomes)
