"""Claims about download, against a server on the loopback."""

import hashlib

import pytest

import originals
from varlap.data import Archive
from varlap.data.download import UnreachableError, download
from varlap.errors import DataError

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = originals.Server()
    server.files["/file.bin"] = CONTENT
    yield server
    server.close()


def archive(server, content=CONTENT, path="/file.bin"):
    return Archive(server.address + path, len(content), hashlib.sha256(content).hexdigest())


def fetch(archive, folder, **settings):
    download(archive, folder / "file.bin", wait_s=0.01, **settings)
    return (folder / "file.bin").read_bytes()


def test_download_gives_the_file_and_tells_its_progress(server, tmp_path):
    told = []
    assert fetch(archive(server), tmp_path, progress=lambda *what: told.append(what)) == CONTENT
    assert told[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert len(told) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_connection_that_drops_midway_is_carried_on_from_there(server, tmp_path):
    server.replies = [lambda handler, content: originals.send(handler, content, upto=300_000)] * 2
    assert fetch(archive(server), tmp_path) == CONTENT
    assert server.ranges == [None, "bytes=300000-", "bytes=600000-"]


def test_next_call_carries_on_where_the_last_one_gave_up(server, tmp_path):
    server.replies = [lambda handler, content: originals.send(handler, content, upto=300_000)]
    with pytest.raises(UnreachableError, match="the connection ended after 300,000 of 1,024,000 bytes"):
        fetch(archive(server), tmp_path, tries=1)
    assert not (tmp_path / "file.bin").exists()
    assert fetch(archive(server), tmp_path) == CONTENT
    assert server.ranges == [None, "bytes=300000-"]


def test_server_that_knows_no_ranges_sends_all_again(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    server.replies = [originals.send_whole]
    assert fetch(archive(server), tmp_path) == CONTENT


def test_beginning_of_another_file_is_thrown_away(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"another file")
    assert fetch(archive(server), tmp_path) == CONTENT
    assert server.ranges == ["bytes=12-", None]
    (tmp_path / "file.bin").unlink()
    (tmp_path / "file.bin.part").write_bytes(b"x" * (len(CONTENT) + 5))  # longer than the file
    assert fetch(archive(server), tmp_path) == CONTENT


def test_file_of_another_content_is_named_and_not_kept(server, tmp_path):
    other = CONTENT[:-1] + b"x"
    server.files["/file.bin"] = other
    with pytest.raises(DataError) as error:
        fetch(archive(server), tmp_path)
    assert f"has the SHA-256 {hashlib.sha256(other).hexdigest()}, not {archive(server).sha256}" in str(error.value)
    assert str(error.value).endswith("; fetch it elsewhere, and give its folder with archives (--from)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [CONTENT + b"x", CONTENT[:-1], b"<html>log in first</html>"])
def test_file_of_another_size_is_named_before_it_is_read(server, tmp_path, other):
    server.files["/file.bin"] = other
    said = rf"file\.bin offers {len(other):,} bytes, not 1,024,000: it is not the file it was; fetch it elsewhere"
    with pytest.raises(DataError, match=said):
        fetch(archive(server), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_endless_file_is_cut_off_at_its_size(server, tmp_path):
    sent = []

    def endless(handler, content):
        handler.send_response(200)
        handler.end_headers()
        while len(sent) < 1000:
            handler.wfile.write(CONTENT)
            sent.append(len(CONTENT))

    server.replies = [endless]
    with pytest.raises(DataError, match=r"has 1,024,001 bytes, not the 1,024,000 of http"):
        fetch(archive(server), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(sent) < 1000


def test_file_that_is_not_there_is_asked_for_once(server, tmp_path):
    with pytest.raises(UnreachableError, match="the server says 404 Not Found"):
        fetch(archive(server, path="/other.bin"), tmp_path)
    assert len(server.ranges) == 1


def test_overloaded_server_is_asked_again(server, tmp_path):
    server.replies = [lambda handler, content: handler.send_error(503)] * 2
    assert fetch(archive(server), tmp_path) == CONTENT
    assert len(server.ranges) == 3


def test_silent_server_is_given_up(server, tmp_path):
    import threading

    done = threading.Event()
    server.replies = [lambda handler, content: done.wait(5)]
    with pytest.raises(UnreachableError, match="timed out"):
        fetch(archive(server), tmp_path, tries=1, timeout_s=0.1)
    done.set()


def test_no_server_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(UnreachableError, match="refused"):
        fetch(Archive("http://127.0.0.1:9/file.bin", 1, ""), tmp_path, tries=2)
