"""Kernels from the disk cache: which entries are tried, and which are not trusted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omniattn import runtime
from omniattn.errors import CacheError, KernelNotFoundError
from omniattn.runtime import log
from omniattn.runtime.cache import get_cache
from tests.unit.runtime.runtime_fakes import FakeCompiler, World, isolated, no_nvrtc, toy_spec


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        yield world


def test_cached_ptx_gives_way_to_a_newer_nvrtc(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.driver.ccs = [(12, 1), (12, 1)]
    world.use_compiler(FakeCompiler((12, 8), (80, 120)))
    runtime.load(world.spec, 0)
    world.reopen()
    assert runtime.load(world.spec, 0).origin == "cache", "the same NVRTC cannot do better"
    world.use_compiler(FakeCompiler((12, 9), (80, 120, 121)))
    world.reopen()
    loaded = runtime.load(world.spec, 0)
    assert (loaded.origin, loaded.arch) == ("jit", "sm_121a")
    assert "holds compute_120 PTX, and the installed NVRTC can compile for sm_121a" in loaded.tried[1][1]


def _cache_with(world: World, *versions: tuple[int, int], archs: tuple[int, ...] = (80, 90, 120)) -> None:
    """Fill the cache by one NVRTC after the other; each starts with an empty cache, as on a machine of its own."""
    kept: dict[Path, bytes] = {}
    for version in versions:
        world.use_compiler(FakeCompiler(version, archs))
        for path in get_cache().entries():
            kept[path] = path.read_bytes()
            path.unlink()
        world.reopen()
        assert runtime.load(world.spec, 0).origin == "jit"
    for path, data in kept.items():
        path.write_bytes(data)
        path.chmod(0o600)
    world.reopen()


@pytest.mark.parametrize("compiler", ["forbidden", "newest", "missing"])
def test_every_cached_entry_is_tried(world: World, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    """An older driver refuses what the newest NVRTC made; an older one's entry is there and good."""
    _cache_with(world, (12, 9), (13, 0), (13, 2))
    world.driver.refuse = {b"(13, 2)": "CUDA_ERROR_INVALID_IMAGE", b"(13, 0)": "CUDA_ERROR_NO_BINARY_FOR_GPU"}
    newest = FakeCompiler((13, 2))
    if compiler == "missing":
        no_nvrtc(monkeypatch)
    else:
        world.use_compiler(newest)
        monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1" if compiler == "forbidden" else "0")
    world.driver.images.clear()
    loaded = runtime.load(world.spec, 0)
    assert (loaded.origin, loaded.arch) == ("cache", "sm_90a")
    assert [image[-7:] for image in world.driver.images] == [b"(13, 2)", b"(13, 0)", b"(12, 9)"]
    refused = [(what, reason) for what, reason in loaded.tried if what.startswith("cache")]
    assert [what for what, _ in refused] == ["cache (sm_90a, NVRTC 13.2)", "cache (sm_90a, NVRTC 13.0)"]
    assert "CUDA_ERROR_INVALID_IMAGE" in refused[0][1]
    assert newest.compiled == []


def test_the_error_names_every_cached_entry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _cache_with(world, (12, 9), (13, 0))
    world.driver.refuse = {b"jit": "CUDA_ERROR_INVALID_IMAGE"}
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    with pytest.raises(KernelNotFoundError) as caught:
        runtime.load(world.spec, 0)
    named = [line.partition(": ")[0].strip() for line in str(caught.value).splitlines() if "cache" in line]
    assert named == ["- cache (sm_90a, NVRTC 13.0)", "- cache (sm_90a, NVRTC 12.9)"]


def test_cached_ptx_is_the_last_resort(world: World) -> None:
    """A newer NVRTC could do better, but the driver takes nothing that it makes."""
    world.driver.ccs = [(12, 1), (12, 1)]
    _cache_with(world, (12, 8))
    newer = FakeCompiler((13, 2), (80, 120, 121))
    world.use_compiler(newer)
    world.driver.refuse = {b"(13, 2)": "CUDA_ERROR_INVALID_IMAGE"}
    for compiled in (1, 1):  # the second process finds the refused binary in the cache: no reason to compile it again
        loaded = runtime.load(world.spec, 0)
        assert (loaded.origin, loaded.arch) == ("cache", "compute_120")
        assert len(newer.compiled) == compiled
        world.reopen()


def _own_by_another(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)


OPENINGS: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "a folder that everybody can write to": lambda _, path: path.parent.parent.chmod(0o707),
    "a folder that its group can write to": lambda _, path: path.parent.parent.chmod(0o770),
    "a folder in it that others can write to": lambda _, path: path.parent.chmod(0o777),
    "a file that others can write to": lambda _, path: path.chmod(0o666),
    "another user's folder": _own_by_another,
}


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX owners and modes")
@pytest.mark.parametrize("where", OPENINGS)
def test_machine_code_that_others_may_have_put_there_is_not_run(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    done = runtime.compile_to(world.spec, "90a")
    before = done.path.read_bytes()
    files = sorted(world.cache.rglob("*"))
    monkeypatch.setenv("OMNIATTN_LOG", "warning")
    log.reset()
    OPENINGS[where](monkeypatch, done.path)
    world.reopen()
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    ((_, reason),) = [entry for entry in loaded.tried if entry[0] == "disk cache"]
    expected = "belongs to user" if where == "another user's folder" else "can be written by others (mode "
    assert expected in reason
    if where == "a file that others can write to":
        assert get_cache().entries() == [done.path], "its folder is ours: the file was replaced by a private one"
        assert done.path.stat().st_mode & 0o777 == 0o600
    else:
        assert done.path.read_bytes() == before
        assert sorted(world.cache.rglob("*")) == files


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX owners and modes")
def test_a_refused_cache_folder_warns_once_and_leaves_kernels_in_memory(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.cache.mkdir()
    world.cache.chmod(0o777)
    monkeypatch.setenv("OMNIATTN_LOG", "warning")
    log.reset()
    assert [runtime.load(world.spec, ordinal).origin for ordinal in (0, 1)] == ["jit", "cache"]
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert f"{world.cache} can be written by others (mode 777), and is not used" in text
    assert "What to do: chmod go-w" in text
    assert list(world.cache.iterdir()) == []
    with pytest.raises(CacheError, match=r"can be written by others"):
        runtime.compile_to(world.spec, "90a")


def test_a_cached_binary_of_another_kernel_is_not_run(world: World) -> None:
    """Whole and of this user, but under the name of another: the header says whose it is."""
    theirs = runtime.compile_to(toy_spec(name="theirs", symbol="theirs"), "90a").path
    ours = runtime.compile_to(world.spec, "90a").path
    ours.write_bytes(theirs.read_bytes())
    world.reopen()
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    assert "is damaged (it holds kernel 'theirs')" in loaded.tried[-1][1]
    world.reopen()
    assert runtime.load(world.spec, 0).origin == "cache", "it has been replaced"
