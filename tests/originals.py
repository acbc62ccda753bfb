"""Small data sets in the formats of the originals, and a server on the loopback that hands them out."""

import functools
import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from varlap.data import Archive, Source
from varlap.data.archives import read_cifar10, read_cifar100, read_idx, read_svhn

NUM_TRAIN, NUM_TEST = 10, 4
IDX_NAMES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
KEYS = ["train_images", "train_labels", "test_images", "test_labels"]


def arrays(shape=(32, 32, 3), num_classes=10):
    """The arrays that must come out."""
    random = np.random.default_rng(0)
    return {
        "train_images": random.integers(0, 256, (NUM_TRAIN, *shape), dtype=np.uint8),
        "train_labels": np.arange(NUM_TRAIN) * 7 % num_classes,
        "test_images": random.integers(0, 256, (NUM_TEST, *shape), dtype=np.uint8),
        "test_labels": np.arange(NUM_TEST) % num_classes,
    }


def records(images, *labels):
    """CIFAR's records, one after the other: the labels' bytes, then the red, the green and the blue plane."""
    out = b""
    for index, image in enumerate(images):
        out += bytes(int(column[index]) for column in labels)
        out += b"".join(image[:, :, channel].tobytes() for channel in range(3))
    return out


def tar_gz(members):
    """A tar.gz of (name, content); a content None is a link that leads outside."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content or b""))
    return gzip.compress(out.getvalue(), mtime=0)


def cifar10_members(parts):
    images, labels = parts["train_images"], parts["train_labels"]
    batches = [
        (f"cifar-10-batches-bin/data_batch_{i + 1}.bin", records(images[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2]))
        for i in range(5)
    ]
    test = ("cifar-10-batches-bin/test_batch.bin", records(parts["test_images"], parts["test_labels"]))
    return [("cifar-10-batches-bin/readme.html", b"hello"), *batches, test]


def cifar100_members(parts):
    coarse = np.full(NUM_TRAIN, 19)
    return [
        ("cifar-100-binary/train.bin", records(parts["train_images"], coarse, parts["train_labels"])),
        ("cifar-100-binary/test.bin", records(parts["test_images"], coarse, parts["test_labels"])),
    ]


def idx(array):
    array = array.astype(np.uint8)
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


def mat(images, labels, **more):
    from scipy import io as scipy_io

    out = io.BytesIO()
    tens = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    scipy_io.savemat(out, {"X": images.transpose(1, 2, 3, 0), "y": tens} | more, do_compression=True)
    return out.getvalue()


@functools.cache  # a .mat file holds the time at which it was made
def contents(name):
    """The archives of a data set, name by name."""
    if name == "cifar10":
        return {"cifar-10-binary.tar.gz": tar_gz(cifar10_members(arrays()))}
    if name == "cifar100":
        return {"cifar-100-binary.tar.gz": tar_gz(cifar100_members(arrays(num_classes=100)))}
    if name == "svhn":
        parts = arrays()
        pairs = {part: (parts[f"{part}_images"], parts[f"{part}_labels"]) for part in ("train", "test")}
        return {f"{part}_32x32.mat": mat(*pair) for part, pair in pairs.items()}
    return dict(zip(IDX_NAMES, map(idx, arrays((28, 28)).values()), strict=True))


def hashes(parts):
    return {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in parts.items()}


def source(name, address="http://127.0.0.1:9", known=True):
    """A data set's entry in the catalogue, like the real one but small."""
    read = {"cifar10": read_cifar10, "cifar100": read_cifar100, "svhn": read_svhn}.get(name, read_idx)
    shape, num_classes = (28, 28) if read is read_idx else (32, 32, 3), 100 if name == "cifar100" else 10
    archives = tuple(
        Archive(f"{address}/{name}/{file}", len(content), hashlib.sha256(content).hexdigest())
        for file, content in contents(name).items()
    )
    sha256 = hashes(arrays(shape, num_classes)) if known else {}
    module = "scipy" if name == "svhn" else None
    return Source(name, archives, read, shape, NUM_TRAIN, NUM_TEST, num_classes, sha256, module)


def put(folder: Path, name: str, **changes: bytes) -> Path:
    """Write a data set's archives into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (contents(name) | changes).items():
        (folder / file).write_bytes(content)
    return folder


class Server:
    """An HTTP server on the loopback. `replies` holds what to do with the next requests; then files are served."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.replies: list[Callable[[http.server.BaseHTTPRequestHandler, bytes], None]] = []
        self.ranges: list[str | None] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.ranges.append(self.headers["Range"])
                content = server.files.get(self.path)
                if server.replies:
                    server.replies.pop(0)(self, content or b"")
                elif content is None:
                    self.send_error(404)
                else:
                    send(self, content)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def offer(self, name: str) -> None:
        self.files |= {f"/{name}/{file}": content for file, content in contents(name).items()}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send(handler, content, upto=None):
    """Send a file, or the range that was asked for; break off after `upto` bytes."""
    start = int((handler.headers["Range"] or "bytes=0-")[len("bytes=") : -1])
    if start >= len(content):
        handler.send_error(416)
        return
    handler.send_response(206 if start else 200)
    handler.send_header("Content-Length", str(len(content) - start))
    handler.end_headers()
    handler.wfile.write(content[start:][:upto])


def send_whole(handler, content):
    """Send the whole file, whatever range was asked for."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
