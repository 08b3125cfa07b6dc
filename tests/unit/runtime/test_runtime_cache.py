"""The cache of kernels compiled on this machine."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omniattn.runtime import cache as cache_module
from omniattn.runtime import log
from omniattn.runtime.arch import Arch
from omniattn.runtime.cache import CacheEntry, KernelCache, cache_key
from omniattn.runtime.sources import Sources
from tests.unit.runtime.runtime_fakes import World, isolated, toy_spec

KEY = "ab" + "0" * 62
ENTRY = CacheEntry("toy", "sm_90a", False, (12, 9), ("-a", "-b"), "a log\nof two lines", b"\x7fELF\n\0binary\n")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        yield world


@pytest.fixture
def store(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "deep" / "cache")


def get(store: KernelCache, key: str = KEY) -> tuple[CacheEntry | None, str]:
    """The first entry that can be used, or the last reason."""
    found: tuple[CacheEntry | None, str] = None, ""
    for found in store.find(key, ENTRY.kernel):
        if found[0] is not None:
            break
    return found


def test_round_trip(store: KernelCache) -> None:
    assert get(store) == (None, f"not in {store.folder}")
    path = store.put(KEY, ENTRY)
    assert path is not None
    assert path.name == f"{KEY}.nvrtc12.9"
    assert get(KernelCache(store.folder)) == (ENTRY, "")
    assert store.entries() == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_folders_are_private(store: KernelCache) -> None:
    path = store.put(KEY, ENTRY)
    assert path is not None
    assert store.folder is not None
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (store.folder, path.parent)]
    assert modes == [0o700, 0o700]


def test_newest_compiler_comes_first(store: KernelCache) -> None:
    for version in ((12, 9), (13, 2), (12, 10)):
        store.put(KEY, CacheEntry("toy", "sm_90a", False, version, (), "", b"x"))
    assert [entry.nvrtc_version for entry, _ in store.find(KEY, "toy") if entry] == [(13, 2), (12, 10), (12, 9)]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "flipped bit in the binary": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "flipped bit in the header": lambda data: data.replace(b"sm_90a", b"sm_80a"),
    "other file": lambda data: b"hello\n" + data,
    "checksum without content": lambda data: data.split(b"\n")[0],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_removed_and_rebuilt(store: KernelCache, damage: Callable[[bytes], bytes]) -> None:
    path = store.put(KEY, ENTRY)
    assert path is not None
    path.write_bytes(damage(path.read_bytes()))
    entry, reason = get(store)
    assert entry is None
    assert "is damaged" in reason
    assert not path.exists()
    store.put(KEY, ENTRY)
    assert get(store)[0] == ENTRY


def test_a_damaged_file_falls_back_to_an_older_compilers(store: KernelCache) -> None:
    store.put(KEY, ENTRY)
    newer = store.put(KEY, CacheEntry("toy", "sm_90a", False, (13, 0), (), "", b"x"))
    assert newer is not None
    newer.write_bytes(b"junk")
    assert get(store)[0] == ENTRY


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("where", ["mkdir", "mkstemp", "replace"])
def test_unwritable_folder_keeps_kernels_in_memory(
    store: KernelCache,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    where: str,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setenv("OMNIATTN_LOG", "warning")
    log.reset()
    owner = {"mkdir": Path, "mkstemp": tempfile, "replace": os}[where]
    monkeypatch.setattr(owner, where, fail)
    assert store.put(KEY, ENTRY) is None
    assert store.put("cd" + KEY[2:], ENTRY) is None
    assert get(store) == (ENTRY, "")
    text = capsys.readouterr().err
    assert text.count("\n") == 1, "one line per process, not per kernel"
    assert os.strerror(code) in text
    assert "kept in memory" in text
    monkeypatch.undo()
    log.reset()
    leftovers = [p for p in store.folder.rglob("*") if p.is_file()] if store.folder else []
    assert leftovers == [], "a failed write leaves nothing behind"


def test_disk_fills_up_while_writing(store: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen

    class Full:
        def __init__(self, descriptor: int, mode: str) -> None:
            self.file = real(descriptor, mode)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *args: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            self.file.write(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", Full)
    assert store.put(KEY, ENTRY) is None
    monkeypatch.undo()
    assert store.folder is not None
    assert [p for p in store.folder.rglob("*") if p.is_file()] == []
    assert get(store) == (ENTRY, "")
    assert get(KernelCache(store.folder))[0] is None


def test_what_killed_processes_left_is_removed(store: KernelCache) -> None:
    """Their temporary files, once they are old; the file that another process is writing right now stays."""
    path = store.put(KEY, ENTRY)
    assert path is not None
    assert store.folder is not None
    elsewhere = store.folder / "cd"
    elsewhere.mkdir()
    old, fresh = elsewhere / ".writing-old", path.parent / ".writing-fresh"
    for file in (old, fresh):
        file.write_bytes(b"half a ker")
    os.utime(old, (time.time() - 86400,) * 2)
    os.utime(path, (time.time() - 86400,) * 2)
    assert KernelCache(store.folder).put("ef" + KEY[2:], ENTRY) is not None
    assert not old.exists()
    assert fresh.exists()
    assert path.exists()


def test_folder_below_a_file(tmp_path: Path) -> None:
    """A real failure, which also root gets."""
    (tmp_path / "file").write_text("")
    store = KernelCache(tmp_path / "file" / "cache")
    assert get(store)[0] is None
    assert store.put(KEY, ENTRY) is None
    assert get(store) == (ENTRY, "")


def test_no_folder_at_all() -> None:
    store = KernelCache(None)
    assert get(store) == (None, "there is no cache folder")
    assert store.put(KEY, ENTRY) is None
    assert get(store) == (ENTRY, "")
    assert store.entries() == []


def test_unreadable_file(store: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, ENTRY)

    def fail(self: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    entry, reason = get(store)
    assert entry is None
    assert reason.endswith("cannot be read (Permission denied)")


def test_key_follows_everything_that_decides_the_binary(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = Arch.parse("90a")

    def key(spec: object = world.spec, target: Arch = arch) -> str:
        return cache_key(spec, target, Sources(world.root))  # type: ignore[arg-type]

    base = key()
    assert key() == base
    assert key(toy_spec(name="other", smem_bytes=0)) == base, "the name and the launch do not change the binary"
    changed = [key(toy_spec(defines=(("FACTOR", "4.0f"),))), key(target=Arch.parse("80"))]
    monkeypatch.setenv("OMNIATTN_LINEINFO", "1")
    changed.append(key())
    monkeypatch.delenv("OMNIATTN_LINEINFO")
    monkeypatch.setattr(cache_module, "__version__", "99.0")
    changed.append(key())
    monkeypatch.undo()
    header = world.root / "ptx" / "scale.cuh"
    header.write_text(header.read_text() + "// changed\n")
    changed.append(key())
    assert len({base, *changed}) == 6


def test_key_does_not_follow_the_path_or_line_ends(world: World, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    for path in world.root.rglob("*.cu*"):
        target = copy / path.relative_to(world.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    arch = Arch.parse("80")
    assert cache_key(world.spec, arch, Sources(copy)) == cache_key(world.spec, arch, Sources(world.root))


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/omniattn"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/omniattn"),
        ("linux", {}, "/home/me/.cache/omniattn"),
        ("darwin", {}, "/home/me/Library/Caches/omniattn"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/omniattn/Cache"),
        ("win32", {}, "/home/me/AppData/Local/omniattn/Cache"),
        ("linux", {"OMNIATTN_CACHE_DIR": "/chosen"}, "/chosen"),
    ],
)
def test_default_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("OMNIATTN_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_module.default_folder() == Path(expected)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OMNIATTN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert cache_module.default_folder() is None
