"""Downloads that carry on where they broke off, and are kept only if they are what they should be."""

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from varlap.data.sources import Archive
from varlap.errors import DataError

Progress = Callable[[str, int, int], None]
"""Is told a file's name, how many of its bytes are there, and how many there will be."""

_CHUNK = 1 << 18
_ELSEWHERE = "fetch it elsewhere, and give its folder with archives (--from)"
_MAY_PASS = (408, 425, 429)  # statuses below 500 that another try may not meet


class UnreachableError(Exception):
    """A file that no try could bring; says why."""


def download(
    archive: Archive,
    path: Path,
    *,
    progress: Progress | None = None,
    tries: int = 4,
    wait_s: float = 1.0,
    timeout_s: float = 30.0,
) -> None:
    """Download a file and check its size and SHA-256; only then does it get its name.

    What has come so far is kept as NAME.part, for the next try or the next call to carry on from.

    Raises:
        UnreachableError: if it cannot be reached, or breaks off in every try.
        DataError: if what came is something else.
    """
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    reason = "no try was made"
    for number in range(tries):
        if number:
            time.sleep(wait_s * 2 ** (number - 1))
        start = part.stat().st_size if part.is_file() else 0
        try:
            if start < archive.size:
                _receive(archive, part, start, progress, timeout_s)
        except urllib.error.HTTPError as error:
            reason = f"the server says {error.code} {error.reason}"
            if error.code == 416:  # it has fewer bytes than the part: another file than before
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in _MAY_PASS:
                break
            continue
        except urllib.error.URLError as error:
            reason = str(error.reason)
            continue
        except (http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            continue
        if part.stat().st_size < archive.size:
            reason = f"the connection ended after {part.stat().st_size:,} of {archive.size:,} bytes"
            continue
        try:
            archive.check(part)
        except DataError as error:
            part.unlink()
            if not start:
                raise DataError(f"{error}; {_ELSEWHERE}") from error
            # The beginning was of an earlier try, perhaps of another file: once more from the start.
            reason = str(error)
            continue
        part.replace(path)
        return
    raise UnreachableError(reason)


def _receive(archive: Archive, part: Path, start: int, progress: Progress | None, timeout_s: float) -> None:
    headers = {"User-Agent": "varlap", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(archive.url, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        if response.status != 206:  # the server sends the whole file, asked or not
            start = 0
        length = response.headers.get("Content-Length")
        if length is not None and length.isdigit() and start + int(length) != archive.size:
            part.unlink(missing_ok=True)
            raise DataError(
                f"{archive.url} offers {start + int(length):,} bytes, not {archive.size:,}: it is not the file it was; "
                f"{_ELSEWHERE}"
            )
        with part.open("ab" if start else "wb") as file:
            done = start
            # One byte more than there should be is enough to know that it is another file.
            while chunk := response.read(min(_CHUNK, archive.size + 1 - done)):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(archive.name, done, archive.size)
