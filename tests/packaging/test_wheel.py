"""The wheel and the sdist of this checkout: built for real, installed for real."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

from build_tools import jobs, kernels, native

from .conftest import Checkout

ROOT = Path(__file__).resolve().parents[2]


def load_smoke_test() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke_test", ROOT / "wheels/smoke_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


smoke = load_smoke_test()


#: Rows of this checkout's wheel: some of each kind of source, not the hour that all of them take.
ROWS = "attn_fwd_sm80_fp16_d64 attn_fwd_sm90_?f16_d64_m128n128 merge_states_* quantize_delta_*_d64*"


def environment_of(source: Path) -> dict[str, str]:
    """An environment to build ``source`` in; of the real checkout some rows."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMNIATTN_CUDA_ARCHS")}
    return {**kept, kernels.ROWS_VARIABLE: ROWS} if (source / "docs").is_dir() else kept


def build(source: Path, out: Path, kind: str, objects: Path | None = None) -> Path:
    """Build ``kind`` ("wheel" or "sdist") of ``source``; return the file."""
    environment = environment_of(source)
    if objects is not None:
        environment[jobs.OBJECTS_VARIABLE] = str(objects)
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def contents(wheel: Path) -> dict[str, str]:
    with ZipFile(wheel) as archive:
        return {info.filename: hashlib.sha256(archive.read(info)).hexdigest() for info in archive.infolist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel") / "out", "wheel")


def test_a_user_can_install_and_use_the_wheel(wheel: Path) -> None:
    lines = smoke.smoke_test(wheel)
    print("\n".join(lines))
    assert len(lines) == 7


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    # Keys are digests of sources, options and compiler: sharing objects spares work, it cannot hide a difference.
    objects = jobs.store_of(ROOT).folder
    sdist = build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    again = build(source, tmp_path / "again", "wheel", objects)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)
    assert again.read_bytes() == wheel.read_bytes()


def test_pip_makes_the_same_wheel_of_a_checkout(wheel: Path, tmp_path: Path) -> None:
    """``pip install .``: the compiler comes into pip's isolated environment, and is found there and nowhere else."""
    environment = environment_of(ROOT)
    # This environment has the compiler too, so pip runs in one that has nothing.
    venv.create(tmp_path / "empty", with_pip=True)
    (python,) = (tmp_path / "empty").glob("*/python.exe" if os.name == "nt" else "bin/python")
    command = [str(python), "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "out"), str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tmp_path / "out").iterdir()
    same, other = contents(wheel), contents(made)
    for name in [
        name for name in same if name.endswith(("/WHEEL", "/RECORD"))
    ]:  # name the version of the build backend
        del same[name], other[name]
    assert other == same


def test_the_sdist_holds_no_build_output(tmp_path: Path) -> None:
    with tarfile.open(build(ROOT, tmp_path / "sdist", "sdist")) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py"} <= set(names)
    assert [
        name for name in names if name.endswith((".cubin", ".pyc", ".whl")) or name.startswith(("build/", "."))
    ] == [name for name in names if name in (".clang-format", ".gitignore")]


def test_an_editable_build_compiles_nothing(checkout: Checkout, tmp_path: Path) -> None:
    code = "import backend, sys; print(backend.build_editable(sys.argv[1]))"
    done = checkout.python("-c", code, str(tmp_path), PYTHONPATH=str(checkout.root / "build_tools"))
    assert done.returncode == 0, done.stderr
    assert not checkout.out.exists()
    with ZipFile(tmp_path / done.stdout.split()[-1]) as archive:
        assert not [name for name in archive.namelist() if "_kernels" in name]


def test_only_a_wheel_asks_for_the_compiler(checkout: Checkout) -> None:
    code = (
        "import backend; wheel = backend.get_requires_for_build_wheel(); "
        "others = backend.get_requires_for_build_sdist() + backend.get_requires_for_build_editable(); "
        "print(sum('nvrtc' in text for text in wheel), sum('nvrtc' in text or 'cuda' in text for text in others))"
    )
    done = checkout.python("-c", code, PYTHONPATH=str(checkout.root / "build_tools"))
    assert done.stdout.split() == ["1", "0"], done.stderr


def test_a_spilling_kernel_makes_no_wheel(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.root / "kernels_cu/entry/tiny.cu").write_text("#error broken on purpose\n", encoding="utf-8")
    done = checkout.python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    assert done.returncode != 0
    assert "broken on purpose" in done.stdout + done.stderr
    assert list(tmp_path.glob("*.whl")) == []


@pytest.fixture
def small_wheel(checkout: Checkout, tmp_path: Path) -> Path:
    return build(checkout.root, tmp_path / "out", "wheel")


def rewrite(wheel: Path, **changes: bytes | None) -> None:
    """Replace members (by the end of their name; None removes) in place, as a broken build would."""
    with ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for ending, body in changes.items():
        for name in [name for name in members if name.endswith(ending.replace("__", "/").replace("_dot_", "."))] or [
            ending
        ]:
            if body is None:
                del members[name]
            else:
                members[name] = body
    with ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)


def test_the_content_check_accepts_a_good_wheel(checkout: Checkout, small_wheel: Path) -> None:
    assert "4 cubins in 2 packs by NVRTC 12.9" in smoke.check_contents(small_wheel, checkout.root / "kernels_cu")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"80__tiny_dot_xz": None}, "in the manifest, not in the wheel"),
        ({"80__tiny_dot_xz": b"\xfd7zXZ damaged"}, "does not match its checksum"),
        ({"omniattn/_kernels/packs/80/stray.xz": b"\xfd7zXZ"}, "in the wheel, not in the manifest"),
        ({"src__ptx__math_dot_cuh": None}, "kernel source ptx/math.cuh is missing"),
        ({"src__ptx__math_dot_cuh": b"// old"}, "differs from the checkout's"),
        ({"tests/test_a.py": b""}, "does not belong into the wheel"),
        ({"licenses__LICENSE": None}, "the license is missing"),
        ({"sboms__omniattn_dot_cdx_dot_json": None}, "expected one bill of materials"),
        ({"omniattn/_native.abi3.so": b"\x7fELF"}, "expected 0 C module for the tag py3-none-any"),
    ],
)
def test_the_content_check_refuses(
    checkout: Checkout, small_wheel: Path, change: dict[str, bytes | None], complaint: str
) -> None:
    rewrite(small_wheel, **change)
    with pytest.raises(smoke.SmokeTestError) as caught:
        smoke.check_contents(small_wheel, checkout.root / "kernels_cu")
    assert complaint in str(caught.value)


def test_a_wheel_with_the_native_module(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.compiler() is None:
        pytest.skip("needs Linux, a C compiler and Python's headers")
    shutil.copytree(ROOT / "native", checkout.root / "native")
    monkeypatch.setenv("OMNIATTN_BUILD_NATIVE", "1")
    made = build(checkout.root, tmp_path / "out", "wheel")
    assert made.name.split("-", 2)[2] == f"{native.wheel_tag()}.whl"
    assert f"omniattn/{native.NAME}" in contents(made)
    assert "4 cubins" in smoke.check_contents(made, checkout.root / "kernels_cu")
    again = build(checkout.root, tmp_path / "again", "wheel")
    assert again.read_bytes() == made.read_bytes()
    rewrite(made, **{f"omniattn/{native.NAME}": b"text"})
    with pytest.raises(smoke.SmokeTestError, match="is no library"):
        smoke.check_contents(made, checkout.root / "kernels_cu")


def test_the_native_module_by_setuptools(tmp_path: Path) -> None:
    """The way of Windows, with this system's compiler."""
    if native.compiler() is None:
        pytest.skip("needs Linux, a C compiler and Python's headers")
    sources = sorted(str(path) for path in (ROOT / "native").glob("*.c"))
    made = native.by_setuptools(sources, tmp_path / native.NAME, "-std=c11")
    code = (
        f"import importlib.util as u; s = u.spec_from_file_location('_native', {str(made)!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.counts())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["(0,", "0)"], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [native.NAME]


def test_platforms_of_native_wheels() -> None:
    program = shutil.which("cibuildwheel")
    if program is None:
        pytest.skip("cibuildwheel is not installed")
    for platform, arch, name in (
        ("linux", "x86_64", "manylinux_x86_64"), ("linux", "aarch64", "manylinux_aarch64"),
        ("windows", "AMD64", "win_amd64"), ("macos", "arm64", ""),
    ):  # fmt: skip
        command = [program, "--print-build-identifiers", "--platform", platform, "--archs", arch, "--allow-empty"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.stdout.split() == ([f"cp310-{name}"] if name else []), done.stderr
