"""Packs of prebuilt cubins: opened once, kept in the disk cache, and never a wrong kernel."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_tools import kernels, packs
from build_tools.jobs import Job
from build_tools.objects import Compiled
from omniattn import runtime
from omniattn.runtime import opened
from omniattn.runtime.sources import Sources
from omniattn.runtime.store import get_store
from tests.unit.runtime.runtime_fakes import World, isolated, toy_spec


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        yield world


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the packs that are opened from now on."""
    names: list[str] = []
    real = opened.open_pack

    def counting(path: Path, size: int) -> bytes | str:
        names.append(path.name)
        return real(path, size)

    monkeypatch.setattr(opened, "open_pack", counting)
    return names


def kept(world: World) -> list[Path]:
    return sorted(path for path in world.cache.rglob("*") if path.is_file())


def fill(world: World, count: int, size: int = 1000) -> None:
    """Install ``count`` rows of one family for sm_90a, so that they share a pack."""
    built = []
    for index in range(count):
        image = f"\x7fELF prebuilt {index} ".encode() * (size // 20)
        entry = {"size": len(image), "sha256": hashlib.sha256(image).hexdigest(), "registers": 1,
                 "smem_static_bytes": 0, "spill_bytes": 0}  # fmt: skip
        built.append((Job(toy_spec(name=f"toy_{index}"), "90a", ""), Compiled(entry, image, "")))
    manifest, files = packs.make(built, "0", "NVRTC 12.9.86", Sources(world.root))
    kernels.publish(world.cubins, manifest, files)
    world.reopen()


def load(world: World, name: str) -> tuple[str, bytes]:
    loaded = runtime.load(toy_spec(name=name), 0)
    return loaded.origin, world.driver.images[-1]


def test_a_pack_is_opened_once_on_a_machine(world: World, opening: list[str]) -> None:
    fill(world, 3)
    assert load(world, "toy_1")[0] == "prebuilt sm_90a"
    (pack,) = {entry.pack for alike in get_store().entries.values() for entry in alike}
    assert kept(world) == [world.cache / "opened" / pack.sha256]
    assert hashlib.sha256(kept(world)[0].read_bytes()).hexdigest() == pack.sha256
    for index in (0, 2, 1):
        world.reopen()  # as a new process does
        origin, image = load(world, f"toy_{index}")
        assert (origin, image[:15]) == ("prebuilt sm_90a", f"\x7fELF prebuilt {index}".encode())
    assert len(opening) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:-30], lambda data: b"", lambda data: data.replace(b"2", b"3")])
def test_what_is_kept_is_checked_and_written_anew(world: World, opening: list[str], damage: object) -> None:
    fill(world, 3)
    load(world, "toy_2")
    (path,) = kept(world)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))  # type: ignore[operator]
    world.reopen()
    origin, image = load(world, "toy_2")
    assert origin == "prebuilt sm_90a"
    assert image in whole
    assert path.read_bytes() == whole
    assert len(opening) == 2


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.99])
def test_a_flipped_bit_is_found(world: World, at: float) -> None:
    fill(world, 40)
    (path,) = world.cubins.glob("packs/90a/*.xz")
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 4
    path.write_bytes(data)
    loaded = runtime.load(toy_spec(name="toy_39"), 0)
    # The kernel that was asked for, or another way to it; nothing damaged is kept.
    if loaded.origin == "jit":
        assert "damaged" in loaded.tried[0][1]
    else:
        assert world.driver.images[-1].startswith(b"\x7fELF prebuilt 39 ")
    assert not any("opened" in path.parts for path in kept(world))


def test_a_pack_that_expands_without_end_is_not_followed(world: World) -> None:
    fill(world, 2)
    (path,) = world.cubins.glob("packs/90a/*.xz")
    path.write_bytes(lzma.compress(bytes(50_000_000)))
    tracemalloc.start()
    loaded = runtime.load(toy_spec(name="toy_1"), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.origin == "jit"
    assert peak < 5_000_000


def test_python_without_lzma(world: World, opening: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 2)
    monkeypatch.setitem(sys.modules, "lzma", None)
    loaded = runtime.load(toy_spec(name="toy_1"), 0)
    assert loaded.origin == "jit"
    assert "this Python was built without the module lzma" in loaded.tried[0][1]
    monkeypatch.undo()
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(world.cache))


def test_without_lzma_an_opened_pack_serves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 2)
    load(world, "toy_0")
    monkeypatch.setitem(sys.modules, "lzma", None)
    world.reopen()
    assert load(world, "toy_1")[0] == "prebuilt sm_90a"


@pytest.mark.parametrize("state", ["a file", "another's"])
def test_a_cache_that_cannot_be_used(world: World, opening: list[str], state: str) -> None:
    """The pack is opened by every process, and nothing else changes."""
    fill(world, 2)
    if state == "a file":
        world.cache.mkdir(mode=0o700)
        (world.cache / "opened").write_text("in the way")
    else:
        world.cache.mkdir()
        world.cache.chmod(0o777)
    for count in (1, 2):
        world.reopen()
        assert load(world, "toy_1")[0] == "prebuilt sm_90a"
        assert len(opening) == count
    assert [path for path in kept(world) if path.stat().st_size > 20] == []


def test_what_another_user_may_have_written_is_not_read(world: World, opening: list[str]) -> None:
    fill(world, 2)
    load(world, "toy_0")
    (path,) = kept(world)
    path.chmod(0o666)
    world.reopen()
    assert load(world, "toy_1")[0] == "prebuilt sm_90a"
    assert len(opening) == 2
    assert path.stat().st_mode & 0o077 == 0, "written anew, private"


def test_an_installation_may_be_read_only(world: World) -> None:
    """Loading writes nothing into it."""
    fill(world, 2)
    before = {path: path.stat().st_mtime_ns for path in [world.cubins, *world.cubins.rglob("*")]}
    assert load(world, "toy_1")[0] == "prebuilt sm_90a"
    assert {path: path.stat().st_mtime_ns for path in [world.cubins, *world.cubins.rglob("*")]} == before


def test_packs_of_long_ago_are_removed(world: World) -> None:
    fill(world, 2)
    folder = world.cache / "opened"
    folder.mkdir(parents=True, mode=0o700)
    world.cache.chmod(0o700)
    (folder / "old").write_bytes(b"x")
    (folder / "recent").write_bytes(b"x")
    (folder / ".writing-killed").write_bytes(b"x")
    os.utime(folder / ".writing-killed", (time.time() - 7200, time.time() - 7200))
    long_ago = time.time() - 400 * 24 * 3600
    os.utime(folder / "old", (long_ago, long_ago))
    load(world, "toy_0")
    assert {path.name for path in folder.iterdir()} - {"recent"} == {
        entry.pack.sha256 for alike in get_store().entries.values() for entry in alike
    }


def test_threads_and_memory(world: World, opening: list[str]) -> None:
    """Eight threads that want eight kernels of a pack open it once, and give its memory back."""
    fill(world, 8, 400_000)
    tracemalloc.start()
    threads = [threading.Thread(target=load, args=(world, f"toy_{index}")) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(opening) == 1
    images = sum(map(len, world.driver.images))
    assert held - images < 400_000, "the driver's stand-in keeps the eight images, and nobody the pack"


def test_a_fork_opens_for_itself(world: World) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    fill(world, 2)
    load(world, "toy_0")
    shutil.rmtree(world.cache)
    pid = os.fork()
    if pid == 0:
        world.reopen()
        os._exit(load(world, "toy_1")[0] != "prebuilt sm_90a")
    assert os.waitpid(pid, 0)[1] == 0


def test_fp16_and_bf16_stand_beside_each_other() -> None:
    names = ["k_bf16_d64", "k_fp16_d64_mods", "k_fp16_d64", "k_bf16_d64_mods"]
    ordered = sorted(names, key=lambda name: packs.order_of(toy_spec(name=name)))
    assert ordered == ["k_bf16_d64", "k_fp16_d64", "k_bf16_d64_mods", "k_fp16_d64_mods"]


def test_the_same_content_gives_the_same_pack() -> None:
    content = os.urandom(3000) * 5
    assert packs.compress(content) == packs.compress(content)
    assert lzma.decompress(packs.compress(content)) == content
    assert lzma.decompress(packs.compress(b"")) == b""


def test_many_cubins_are_several_packs_of_about_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "MOST_BYTES", 1000)
    names = [f"k_{dtype}_{index:02}" for index in range(15) for dtype in ("fp16", "bf16")]
    members = [(Job(toy_spec(name=name), "90a", ""), Compiled({}, bytes(100), "")) for name in names]
    found = packs.portions(members)
    assert [len(part) for part in found] == [10, 10, 10]
    assert [job.spec.name for part in found for job, _ in part] == sorted(
        names, key=lambda name: (name[-2:], name[2:6] == "fp16")
    )
    assert packs.portions(members[:2]) == [sorted(members[:2], key=lambda member: member[0].spec.name)]
    large = [(Job(toy_spec(name=f"k_{index}"), "90a", ""), Compiled({}, bytes(3000), "")) for index in range(3)]
    assert [len(part) for part in packs.portions(large)] == [1, 1, 1]
