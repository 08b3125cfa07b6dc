"""A release as a whole, and the bill of materials of each wheel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest

from build_tools import native, release, sbom
from build_tools.table import Table
from omniattn.version import __version__

from .conftest import Checkout
from .test_wheel import build, rewrite

VERSION = __version__
MANIFEST = {
    "package_version": VERSION,
    "compiler": "NVRTC 12.9.86",
    "packs": [{"file": "packs/80/b.xz", "file_sha256": "2" * 64}, {"file": "packs/80/a.xz", "file_sha256": "1" * 64}],
}


@pytest.fixture
def folder(checkout: Checkout, tmp_path: Path) -> Path:
    """An sdist and both kinds of wheels of the small checkout; the C module stands in as a file of its kind."""
    made = tmp_path / "dist"
    build(checkout.root, made, "sdist")
    plain = build(checkout.root, made, "wheel")
    with ZipFile(plain) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(made / f"omniattn-{VERSION}-cp310-abi3-manylinux_2_17_x86_64.whl", "w") as archive:
        for name, body in members.items():
            if name.endswith("/WHEEL"):
                body = body.replace(b"Purelib: true", b"Purelib: false").replace(b"py3-none-any", b"cp310-abi3-x")
            elif name.endswith(sbom.NAME):
                body = sbom.document(
                    json.loads(members["omniattn/_kernels/manifest.json"]), "Apache-2.0", [], native.NAME
                ).encode()
            archive.writestr(name, body)
        archive.writestr("omniattn/_native.abi3.so", b"\x7fELF")
        archive.writestr("omniattn/_kernels/packs/", b"")  # as auditwheel does
    return made


WANTED = [(arch, name) for arch in ("80", "90a") for name in ("tiny2", "tiny3")]


@pytest.fixture
def table(checkout: Checkout) -> Table:
    """The small checkout's, renewed."""
    done = checkout.build("--table")
    assert done.returncode == 0, done.stderr
    return Table.load(checkout.root)


def test_a_release(checkout: Checkout, folder: Path, table: Table) -> None:
    lines = release.check(folder, VERSION, checkout.root / "kernels_cu", table, WANTED)
    assert len(lines) == 4
    assert "twine check --strict: 3 files pass" in lines[-1]


def test_kernels_that_the_table_does_not_vouch_for(checkout: Checkout, folder: Path, table: Table) -> None:
    def refusal(wanted: list[tuple[str, str]] = WANTED) -> str:
        with pytest.raises(release.ReleaseError) as caught:
            release.check(folder, VERSION, checkout.root / "kernels_cu", table, wanted)
        return str(caught.value)

    assert "lacks 1 kernels of the registry: tiny2 (sm_120)" in refusal([*WANTED, ("120", "tiny2")])
    table["90a", "tiny3"] = table["90a", "tiny3"]._replace(sha256="0" * 16)
    assert "has 1 kernels that build_tools/compiled.csv does not vouch for: tiny3 (sm_90a)" in refusal()
    del table["90a", "tiny3"]
    assert "does not vouch for: tiny3 (sm_90a)" in refusal()


def test_what_is_no_release(checkout: Checkout, folder: Path, table: Table) -> None:
    sources = checkout.root / "kernels_cu"
    platform = folder / f"omniattn-{VERSION}-cp310-abi3-manylinux_2_17_x86_64.whl"
    plain = folder / f"omniattn-{VERSION}-py3-none-any.whl"

    def refusal() -> str:
        with pytest.raises(release.ReleaseError) as caught:
            release.check(folder, VERSION, sources, table, WANTED)
        return str(caught.value)

    twin = shutil.copy(platform, folder / f"omniattn-{VERSION}-1-cp310-abi3-manylinux_2_17_x86_64.whl")
    assert "has the tag cp310-abi3-manylinux_2_17_x86_64 too" in refusal()
    Path(twin).unlink()
    other = shutil.copy(platform, folder / "omniattn-99.0.0-cp310-abi3-win_amd64.whl")
    assert f"expected version {VERSION}" in refusal()
    Path(other).unlink()
    (folder / "notes.txt").write_text("")
    assert "received" in refusal()
    assert "notes.txt" in refusal()
    (folder / "notes.txt").unlink()
    rewrite(plain, **{"omniattn/version.py": b"__version__ = '0'\n"})
    assert f"differs from omniattn-{VERSION}-py3-none-any.whl in omniattn/version.py" in refusal()
    plain.unlink()
    assert f"expected {plain.name}" in refusal()


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([str(folder)]) == 1  # of other kernels than this checkout's
    assert "kernels of the registry" in capsys.readouterr().err


def test_a_bill() -> None:
    text = sbom.document(MANIFEST, "Apache-2.0", ["numpy>=1.24", "Cuda_Bindings>=12; sys_platform == 'linux'"], None)
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    root = bill["metadata"]["component"]
    assert root["purl"] == f"pkg:pypi/omniattn@{VERSION}"
    assert [x["name"] for x in root["components"]] == [f"omniattn/_kernels/packs/80/{x}.xz" for x in "ab"]
    assert root["components"][0]["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert [x["purl"] for x in bill["components"]] == ["pkg:pypi/cuda-bindings", "pkg:pypi/numpy"]
    assert bill["dependencies"][0]["dependsOn"] == ["pkg:pypi/cuda-bindings", "pkg:pypi/numpy"]
    with pytest.raises(ValueError, match="received '>=1'"):
        sbom.document(MANIFEST, "Apache-2.0", [">=1"], None)
