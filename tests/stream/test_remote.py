"""Shards behind an address: fetched once, whole or not at all, and never by a command nobody asked for."""

import functools
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compgen_fast.stream import OverBudget, ShardStream, StreamError
from tests.stream.stub import numbers, packed


class Handler(http.server.SimpleHTTPRequestHandler):
    """A file server that counts what it is asked for, and can be slow or break off."""

    asked: list[str]
    delay = 0.0
    broken = ""

    def do_GET(self) -> None:
        type(self).asked.append(self.path.strip("/"))
        if self.broken and self.broken in self.path:
            data = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            return
        super().do_GET()

    def copyfile(self, source, outputfile) -> None:  # type: ignore[no-untyped-def]
        while piece := source.read(8192):
            time.sleep(self.delay)
            outputfile.write(piece)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packed(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Handler]]]:
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(variable, "127.0.0.1")
    handler = type("Fresh", (Handler,), {"asked": []})
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/", handler
    serving.shutdown()
    thread.join()
    serving.server_close()


def order(data: str | Path, **options: object) -> list[int]:
    stream = ShardStream(data, **{"batch_size": 10, "epochs": 1, **options})  # type: ignore[arg-type]
    return [number for batch in stream for number in numbers(batch.keys)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_address_gives_what_the_folder_gives_and_is_fetched_once(
    folder: Path, server: tuple[str, type[Handler]], tmp_path: Path, workers: int
) -> None:
    address, handler = server
    assert order(address, cache=tmp_path / "cache", workers=workers) == order(folder)
    assert sorted(handler.asked) == sorted(
        ["manifest.json", *(p.name for p in folder.iterdir() if p.name.startswith("shard"))]
    )
    handler.asked.clear()
    assert order(address, cache=tmp_path / "cache") == order(folder)
    assert handler.asked == []


def test_a_window_fetches_only_what_is_near(folder: Path, server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    address, handler = server
    next(iter(ShardStream(address, batch_size=10, window=1, cache=tmp_path / "cache")))
    assert sum(name.endswith(".tar") for name in handler.asked) == 1


def test_a_slow_server_changes_nothing_but_the_time(
    folder: Path, server: tuple[str, type[Handler]], tmp_path: Path
) -> None:
    address, handler = server
    handler.delay = 0.02
    assert order(address, cache=tmp_path / "cache", workers=2) == order(folder)


def test_a_download_that_breaks_off_is_not_kept(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    address, handler = server
    handler.broken = "shard-000001.tar"
    with pytest.raises(OverBudget, match=r"shard-000001.tar, all 30 samples: .* its hash differs"):
        order(address, cache=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*/*shard-000001.tar")) and not list(tmp_path.glob("cache/*/.*.tmp"))
    handler.broken = ""
    assert len(order(address, cache=tmp_path / "cache")) == 100


def test_a_file_that_is_not_there_is_named(folder: Path, server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    (folder / "shard-000002.tar").unlink()
    with pytest.raises(OverBudget, match=r"shard-000002.tar cannot be fetched"):
        order(server[0], cache=tmp_path / "cache")


@pytest.mark.parametrize("address", ["pipe:touch {mark}; cat {name}", "scp://host/folder", "sftp://host/folder"])
def test_addresses_that_run_commands_are_refused(address: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(StreamError, match="may run commands"):
        ShardStream(address.replace("{mark}", str(mark)), batch_size=10, cache=tmp_path / "cache")
    assert not mark.exists()


def test_a_command_runs_when_it_is_allowed_by_name(folder: Path, tmp_path: Path) -> None:
    address = f"pipe:cat {folder}/{{name}}"
    assert order(address, allow={"pipe"}, cache=tmp_path / "cache") == order(folder)
    with pytest.raises(StreamError, match=r"has no \{name\}"):
        ShardStream("pipe:cat x", batch_size=10, allow={"pipe"}, cache=tmp_path / "cache")
