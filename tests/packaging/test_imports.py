"""The rule of imports: no circle, and down the stair; on made-up packages, then on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools import house

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (("errors",), ("low.deep",), ("left", "right"), ("low",), ("high",), ("pkg",))


def package(folder: Path, **texts: str) -> Path:
    """A package ``pkg`` with these modules; ``__`` in a name stands for a folder, ``init`` for ``__init__``."""
    for name, text in {"init": "", **texts}.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path = path.with_name("__init__.py") if path.stem == "init" else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def arrows(folder: Path) -> list[tuple[str, str]]:
    found = house.imports(folder, "pkg")
    return [(one.source.removeprefix("pkg."), one.target.removeprefix("pkg.")) for one in found]


@pytest.mark.parametrize(
    "text",
    [
        "from pkg import errors",
        "import pkg.errors",
        "import pkg.errors as e",
        "from pkg.errors import Bad",
        "from . import errors",
        "from .errors import Bad",
        "def f():\n    from .errors import Bad",
        "class C:\n    def f(self):\n        if self:\n            import pkg.errors",
        "try:\n    from .errors import Bad\nexcept ImportError:\n    pass",
        "if TYPE_CHECKING:\n    from .errors import Bad",
        "import numpy, pkg.errors",
    ],
)
def test_every_form_of_import_is_seen(tmp_path: Path, text: str) -> None:
    assert arrows(package(tmp_path, errors="", high=text)) == [("high", "errors")]


@pytest.mark.parametrize(
    "text", ["import numpy", "from numpy import errors", "x = 'from .errors import Bad'", "import pkgs"]
)
def test_other_packages_and_texts_are_none(tmp_path: Path, text: str) -> None:
    assert arrows(package(tmp_path, errors="", high=text)) == []


def test_relative_imports_start_where_the_module_is(tmp_path: Path) -> None:
    folder = package(
        tmp_path,
        errors="",
        left="",
        low__init="from . import deep\nfrom .. import left",
        low__deep="from .. import errors",
        high__init="",
        high__one="from ..low import deep, thing\nfrom ..low.deep import x",
    )
    assert arrows(folder) == [
        ("high.one", "low"),
        ("high.one", "low.deep"),
        ("low", "left"),
        ("low", "low.deep"),
        ("low.deep", "errors"),
    ]


@pytest.mark.parametrize("closing", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_circles_are_found(tmp_path: Path, closing: str) -> None:
    """Of three modules, also closed inside a function or for a type checker; what lies below is not in it."""
    folder = package(
        tmp_path,
        errors="",
        left="from .right import x",
        right="from . import high, errors",
        high=closing.format("from .left import x"),
    )
    assert house.circles(house.imports(folder, "pkg")) == [["pkg.high", "pkg.left", "pkg.right"]]


def test_a_package_and_its_modules_can_form_a_circle(tmp_path: Path) -> None:
    folder = package(tmp_path, low__init="from .deep import x", low__deep="from ..low import y")
    assert house.circles(house.imports(folder, "pkg")) == [["pkg.low", "pkg.low.deep"]]


def test_a_tree_without_circles_has_none(tmp_path: Path) -> None:
    folder = package(tmp_path, errors="", left="from . import errors", right="from . import errors, left")
    assert len(arrows(folder)) == 3
    assert house.circles(house.imports(folder, "pkg")) == []


@pytest.mark.parametrize(
    ("source", "text", "climbs"),
    [
        ("high", "from . import left, errors", False),
        ("left", "from . import high", True),
        ("left", "def f():\n    from . import high", True),
        ("left", "from . import right", True),
        ("low__deep", "from . import other", True),
        ("low__other", "from . import deep", False),
        ("low__other", "from ..left import x", False),
        ("low__deep", "from ..left import x", True),
        ("high", "import pkg", True),
        ("high", "from . import stranger", True),
    ],
)
def test_climbing_imports_are_found(tmp_path: Path, source: str, text: str, climbs: bool) -> None:
    """Up, sideways, out of a part of a room that stands lower, and to what has no room."""
    names = ("errors", "left", "right", "high", "stranger", "low__init", "low__deep", "low__other")
    folder = package(tmp_path, **{**dict.fromkeys(names, ""), source: text})
    found = house.climbing(house.imports(folder, "pkg"), "pkg", ROOMS)
    assert [one.source for one in found] == ([f"pkg.{source.replace('__', '.')}"] if climbs else [])


def test_imports_for_types_are_told_from_others(tmp_path: Path) -> None:
    """A module that is imported both ways is imported."""
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import high\n"
    folder = package(tmp_path / "a", left=guarded, high="")
    assert [one.for_types for one in house.imports(folder, "pkg")] == [True]
    folder = package(tmp_path / "b", left=guarded + "else:\n    from . import right\n", high="", right="")
    assert {one.target: one.for_types for one in house.imports(folder, "pkg")} == {"pkg.high": True, "pkg.right": False}
    folder = package(tmp_path / "c", left=guarded + "def f():\n    from . import high\n", high="")
    assert [one.for_types for one in house.imports(folder, "pkg")] == [False]


def test_modules_without_a_room_are_named(tmp_path: Path) -> None:
    folder = package(tmp_path, errors="", errors_too="", low__deep="", low__init="")
    assert house.unplaced(house.modules(folder, "pkg"), "pkg", ROOMS) == ["pkg.errors_too"]


def test_the_command_fails_on_a_broken_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    folder = package(tmp_path / "src/omniattn", errors="", ops="from . import errors")
    assert house.main([]) == 0
    (folder / "errors.py").write_text("from . import ops", encoding="utf-8")
    assert house.main([]) == 1
    text = capsys.readouterr().out
    assert "circle: omniattn.errors, omniattn.ops" in text
    assert "climbs: omniattn.errors:1 imports omniattn.ops" in text
    (folder / "errors.py").write_text("", encoding="utf-8")
    (folder / "somewhere.py").write_text("", encoding="utf-8")
    assert house.main([]) == 1
    assert "in no room: omniattn.somewhere" in capsys.readouterr().out


FOUND = house.imports(ROOT / "src/omniattn")


def test_this_package_imports_in_no_circle() -> None:
    assert len(FOUND) > 100
    assert house.circles(FOUND) == []


def test_this_package_imports_down_the_stair() -> None:
    climbing = [str(one) for one in house.climbing(FOUND) if not one.for_types]
    assert len(climbing) <= house.MAX_CLIMBING, "\n".join(climbing)


def test_every_module_of_this_package_has_a_room() -> None:
    assert house.unplaced(house.modules(ROOT / "src/omniattn")) == []
