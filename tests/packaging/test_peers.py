"""Names of other packages: what their sources say, what differs from ours, and the page of it. Without a network."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from build_tools import peer_checks, peer_wheels, peers
from build_tools.peer_list import PEERS
from build_tools.peer_source import Tree, differences, operators

ROOT = Path(__file__).resolve().parents[2]
OURS = Tree(ROOT / "src")


def tree(folder: Path, **files: str) -> Tree:
    """Sources by module; ``p___init__`` is that of package p."""
    for name, text in files.items():
        path = folder.joinpath(*name.replace("___init__", ".__init__").split("."))
        path = path.with_name(path.name + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Tree(folder)


def pair(folder: Path, theirs: str, ours: str) -> list[str]:
    """Differences of two functions f."""
    made = [
        tree(folder / name, m=f"def f({text}): ...\n").signature("m.f") for name, text in (("a", theirs), ("b", ours))
    ]
    assert made[0] is not None
    assert made[1] is not None
    return differences(made[0], made[1])


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        ("q, k, scale=None", "q, k, scale=None", []),
        ("q, k, scale=None, *, new=1", "q, k, scale=None", ["`new=1` refused"]),
        ("q, new=1", "q, **options", ["`new=1` swallowed by **options"]),
        ("q, k", "q, k, more=None", ["`more=None` in ours alone"]),
        ("q, **kwargs", "q, more=None", []),
        ("q, causal=False", "q, causal=True", ["`causal=False` is `causal=True` in ours"]),
        ("q, layout='NHD'", 'q, layout="NHD"', []),
        ("q, a=1, b=2", "q, b=2, a=1", ["another order"]),
        ("q, *, a=1", "q, a=1", []),
        ("q, a=1", "q, *, a=1", ["`a` by keyword only in ours"]),
        ("ctx, grad", "ctx, *gradients", []),
    ],
)
def test_differences(tmp_path: Path, theirs: str, ours: str, found: list[str]) -> None:
    assert pair(tmp_path, theirs, ours) == found


def test_names_are_followed_to_their_end(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        p___init__="from .inner import f, Maker as Made\nfrom .stars import *\n__all__ = ['f', 'Made']\n"
        "try:\n    from .fast import g\nexcept ImportError:\n    g = None\n",
    )
    for name, text in {
        "inner": "import functools\nfrom typing import overload\n"
        "@overload\ndef f(a): ...\ndef f(a, b=1, *args, c, **kw): ...\nh = functools.partial(f, 1)\n"
        "class Base:\n    def __init__(self, x, y=2): self.kept = x\n    def run(self, q): ...\n"
        "class Maker(Base):\n    forward = run = None\n    def again(self): ...\n    start = again\n",
        "stars": "def starred(z): ...\n",
        "fast": "def g(u, v): ...\n",
    }.items():
        (tmp_path / "p" / f"{name}.py").write_text(text, encoding="utf-8")
    f = found.signature("p.f")
    assert f is not None
    assert (f.names, f.star, f.keywords) == (("a", "b", "c"), "args", "kw")
    assert found.signature("p.inner.h") == f
    assert found.names("p") == ["f", "Made"]
    assert found.signature("p.Made").names == ("x", "y")  # type: ignore[union-attr]
    assert found.signature("p.Made.start").names == ()  # type: ignore[union-attr]
    assert found.signature("p.starred").names == ("z",)  # type: ignore[union-attr]
    assert found.signature("p.g").names == ("u", "v")  # type: ignore[union-attr]
    assert found.find("p.Made.kept") is not None
    assert found.find("p.Made.gone") is None
    assert found.find("p.inner") is not None
    assert found.find("q") is None


def test_fields_are_arguments(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        m="from dataclasses import dataclass\nfrom typing import ClassVar, NamedTuple\n"
        "@dataclass\nclass A:\n    a: int\n    kind: ClassVar[int] = 0\n"
        "@dataclass\nclass B(A):\n    b: int = 1\n    def f(self): ...\n"
        "class C(NamedTuple):\n    x: int\n",
    )
    assert found.signature("m.B").names == ("a", "b")  # type: ignore[union-attr]
    assert found.signature("m.C").names == ("x",)  # type: ignore[union-attr]


def test_functions_and_methods_of_a_class(tmp_path: Path) -> None:
    theirs = tree(
        tmp_path / "a", m="def f(q): ...\ndef sparse_attn(q): ...\nclass W:\n    def run(self, q, out): ...\n"
    )
    ours = tree(tmp_path / "b", m="__all__ = ['f', 'g', 'W']\ndef f(q): ...\ndef g(q): ...\n"
                "class Base:\n    def run(self, q): ...\nclass W(Base): ...\n")  # fmt: skip
    outcome = peer_checks.functions("m", "m")(theirs, ours)
    assert outcome.found == ["g: in ours alone", "W.run: `out` refused", "sparse_attn: not in ours"]
    assert outcome.tried == "signatures of `m` (4)"


def test_needs_say_what_is_gone(tmp_path: Path) -> None:
    theirs = tree(tmp_path, m="class Layer:\n    def __init__(self, a): self.b = a\n    def run(self, q, new): ...\n")
    check = peer_checks.needs({"m.Layer": ("a", "b", "c"), "m.Layer.run": ("self", "q"), "m.gone": ()})
    assert check(theirs, OURS).found == ["`m.Layer` without `c`", "`m.gone` is not there"]
    assert peer_checks.needs({"m.Layer.run": ("self", "q")}, exact=True)(theirs, OURS).found == [
        "`m.Layer.run` with `new`"
    ]


def test_what_our_sources_declare_is_read() -> None:
    values = peer_checks.constants_of(OURS, "omniattn.integrations.vllm.versions")
    assert "vllm.v1.attention.backend.MLAAttentionImpl.forward_mqa" in values["_LATENT_CALLED"]
    assert "query_start_loc" in values["_FIELDS"]
    expected = peer_checks.constants_of(OURS, "omniattn.integrations.sglang_backend")["_EXPECTED"]
    assert expected["ForwardMode.is_decode"] == ("sglang.srt.model_executor.forward_batch_info", ())


def test_uses_are_imports_and_what_is_read_of_them(tmp_path: Path) -> None:
    text = "import p\nimport p.deep as d\nfrom p import x\nfrom .p import own\nd.f(1)\np.other.g.h()\nx.y\nq.p.z\n"
    assert peer_checks.used(ast.parse(text), "p") == {"p.deep.f", "p.other.g.h", "p.x.y"}
    ours = tree(tmp_path / "ours", o___init__="from p import f, gone\nimport p\np.Kind.A\np.Kind.B\np.value.any\n")
    theirs = tree(tmp_path / "theirs", p="def f(): ...\nclass Kind:\n    A = 1\nvalue = f()\n")
    outcome = peer_checks.uses("p", "o")(theirs, ours)
    assert outcome.found == ["`p.Kind.B` is not there", "`p.gone` is not there"]
    assert peer_checks.uses("p", "o", aside=r"p\.Kind\.B|p\.gone")(theirs, ours).found == []


def test_operators_of_aten(tmp_path: Path) -> None:
    text = (
        "- func: f(Tensor query, Tensor? bias, SymInt[2] size=[1, 2], float p=0.0, *, float? scale=None, "
        "int? more=None) -> (Tensor, Tensor)\n- func: f.out(Tensor query, *, Tensor(a!) out) -> Tensor(a!)\n"
    )
    assert operators(text)["f"].names == ("query", "bias", "size", "p", "scale", "more")
    ours = tree(
        tmp_path,
        h="class Handlers:\n    def __init__(self):\n        self.functions = {'f': self._f, 'g': self._g}\n"
        "    def _f(self, keys, query, bias, size=(1, 2), *, scale=None): ...\n    def _g(self, keys): ...\n",
    )
    (tmp_path / "list.yaml").write_text(text, encoding="utf-8")
    assert peer_checks.aten("h", "list.yaml")(Tree(tmp_path), ours).found == [
        "`aten::f`: (query, bias, size, p) in place of (query, bias, size)", "`aten::f`: `more=None` refused",
        "`aten::g` is not there",
    ]  # fmt: skip


def test_keywords_and_entries(tmp_path: Path) -> None:
    theirs = tree(tmp_path, m="def forward(x):\n    attend(x, scaling=1, fresh=2)\n    kw = {'q': 1, 'extra': 2}\n")
    check = peer_checks.keywords("layers", "attend", "*.py", lambda ours: ("scaling",))
    assert check(theirs, OURS).found == ["`fresh` is not known (1 calls)"]
    assert peer_checks.keywords("layers", "gone", "*.py", lambda ours: ())(theirs, OURS).found == ["no call of `gone`"]
    ours = tree(tmp_path / "ours", o="def make():\n    def attention(q): ...\n")
    assert peer_checks.entries("m.forward", "o.make.attention")(theirs, ours).found == ["`extra` is dropped"]


def test_each_check_fails_on_an_empty_package(tmp_path: Path) -> None:
    empty = Tree(tmp_path)
    for peer in PEERS.values():
        for check in peer.checks:
            assert check(empty, OURS).found, (peer.name, check)


def test_no_code_of_an_sdist_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is given a backend that refuses, and what it unpacked is read."""

    def pip(package: str, folder: Path, options: list[str], variables: dict[str, str]) -> str:
        backend = Path(variables["PYTHONPATH"]) / "setuptools" / "__init__.py"
        with pytest.raises(RuntimeError, match="nothing of this package is run"):
            exec(backend.read_text(encoding="utf-8"), {})
        made = Path(variables["TMPDIR"]) / "pip-download-x" / "p_1"
        made.mkdir(parents=True)
        (made / "PKG-INFO").write_text("Name: p\nVersion: 1.2\n", encoding="utf-8")
        return ""

    monkeypatch.setattr(peer_wheels, "_pip", pip)
    release = peer_wheels.fetch("p", tmp_path / "new", sdist=True)
    assert release.version == "1.2"
    monkeypatch.setattr(peer_wheels, "_pip", lambda *_: "ERROR: No matching distribution found for p\n")
    with pytest.raises(peer_wheels.PeerError, match=r"^No matching distribution found for p$"):
        peer_wheels.fetch("p", tmp_path / "other")


def test_the_page_is_what_the_record_gives() -> None:
    text = (ROOT / peers.PAGE).read_text(encoding="utf-8")
    known = peers.records()
    assert set(known) == {name for name, peer in PEERS.items() if not peer.elsewhere}
    assert peers.page(text, known) == text
    assert len(text.splitlines()) <= 100
    for name in PEERS:
        assert f"| `{name}` |" in text


def test_a_folder_is_compared_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    for path in (peers.PAGE, peers.RECORD):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / peers.PAGE).write_text("# T\n\n<!-- peers:begin -->\n<!-- peers:end -->\n", encoding="utf-8")
    (root / "src").symlink_to(ROOT / "src")
    monkeypatch.setattr(peers, "ROOT", root)
    monkeypatch.setattr(peers.records, "__defaults__", (root,))
    (tmp_path / "kernels.py").write_text("def get_kernel(repo_id): ...\n", encoding="utf-8")
    given = ["--tree", f"kernels={tmp_path}"]
    assert peers.main(given) == 1  # nothing is recorded yet
    assert "`kernels.get_local_kernel` is not there" in capsys.readouterr().out
    assert peers.main([*given, "--write"]) == 0
    assert json.loads((root / peers.RECORD).read_text(encoding="utf-8"))["kernels"]["source"] == "folder"
    assert "`kernels.get_local_kernel` is not there |" in (root / peers.PAGE).read_text(encoding="utf-8")
    assert peers.main(given) == 0
    (tmp_path / "kernels.py").write_text("def get_kernel(name): ...\n", encoding="utf-8")
    assert peers.main(given) == 1
    assert peers.main(["--page"]) == 0
    (tmp_path / "kernels.py").write_text("def get_kernel(:\n", encoding="utf-8")
    assert peers.main(given) == 1
    assert "kernels.py, line 1: syntax that Python" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        peers.main(["nothing"])
