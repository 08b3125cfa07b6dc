"""Environment variables and the logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from omniattn.errors import ArgumentError
from omniattn.runtime import env, log
from omniattn.runtime.arch import Arch


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    log.reset()
    yield
    log.reset()


def test_table_is_complete_and_documented() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("OMNIATTN_") for name in names)
    assert all(variable.meaning and variable.values for variable in env.VARIABLES)


def test_defaults() -> None:
    assert {v.name: env.get(v.name) for v in env.VARIABLES} == {v.name: v.default for v in env.VARIABLES}
    assert env.jit_policy() == (True, True)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("OMNIATTN_LOG", "DEBUG", "debug"),
        ("OMNIATTN_FORCE_JIT", "yes", True),
        ("OMNIATTN_DISABLE_JIT", "0", False),
        ("OMNIATTN_DRIVER", "cupy", "cupy"),
        ("OMNIATTN_CUDA_ARCHS", "80;90a, sm_89", ("80", "90a", "89")),
        ("OMNIATTN_FORCE_KERNEL", " toy ", "toy"),
        ("OMNIATTN_DUMP", "", None),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(name, text)
    assert env.get(name) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("OMNIATTN_LOG", "loud", "one of debug, info, warning"),
        ("OMNIATTN_FORCE_JIT", "maybe", "1 or 0"),
        ("OMNIATTN_DISABLE_JIT", "2", "1 or 0"),
        ("OMNIATTN_LINEINFO", "x", "1 or 0"),
        ("OMNIATTN_DRIVER", "hip", "one of cuda, cupy"),
        ("OMNIATTN_CUDA_ARCHS", "80 hopper", "a target such as"),
        ("OMNIATTN_CUDA_ARCHS", ",", "targets such as"),
    ],
)
def test_bad_values_name_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError) as caught:
        env.get(name)
    assert caught.value.argument == name
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["OMNIATTN_CACHE_DIR", "OMNIATTN_DUMP"])
def test_a_folder_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(name, str(file))
    with pytest.raises(ArgumentError, match=f"{name}.*expected a folder.*which is a file"):
        env.get(name)


@pytest.mark.parametrize("name", ["OMNIATTN_CACHE_DIR", "OMNIATTN_DUMP"])
def test_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "~no-such-user/kernels")
    with pytest.raises(ArgumentError, match=f"{name}.*expected a folder.*~no-such-user/kernels"):
        env.get(name)


def test_a_folder_that_this_user_may_not_look_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", "/closed/kernels")
    assert env.get("OMNIATTN_CACHE_DIR") == Path("/closed/kernels")


@pytest.mark.parametrize(("text", "value"), [(None, None), ("", None), ("  ", None), (" a,b ", "a,b")])
def test_forced_kernels(monkeypatch: pytest.MonkeyPatch, text: str | None, value: str | None) -> None:
    if text is None:
        monkeypatch.delenv("OMNIATTN_FORCE_KERNEL", raising=False)
    else:
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", text)
    assert env.forced_kernels() == env.get("OMNIATTN_FORCE_KERNEL") == value


def test_contradictory_jit_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_JIT", "1")
    assert env.jit_policy() == (False, True)
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    with pytest.raises(ArgumentError, match=r"OMNIATTN_FORCE_JIT.*OMNIATTN_DISABLE_JIT=1.*Unset one"):
        env.jit_policy()


def test_silent_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    log.get().info("nothing to see")
    assert capfd.readouterr() == ("", "")


def test_log_goes_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMNIATTN_LOG", "info")
    log.get().debug("too fine")
    log.get().info("loaded")
    log.warn_once("careful")
    log.warn_once("careful")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "omniattn: INFO: loaded\nomniattn: WARNING: careful\n"


def test_applications_can_use_their_own_handlers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="omniattn"):
        log.get().debug("seen")
    assert caplog.messages == ["seen"]


@pytest.mark.parametrize(
    ("text", "number", "shown"),
    [
        ("sm_90a", "90a", "sm_90a"),
        ("80", "80", "sm_80"),
        ("compute_80", "80", "compute_80"),
        ("103f", "103f", "sm_103f"),
    ],
)
def test_arch_names(text: str, number: str, shown: str) -> None:
    arch = Arch.parse(text)
    assert (arch.number, str(arch)) == (number, shown)


@pytest.mark.parametrize("text", ["", "90b", "sm90", "9", "ampere", "sm_1234"])
def test_bad_arch_names(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"argument 'arch': expected a target such as 'sm_90a'"):
        Arch.parse(text)


@pytest.mark.parametrize(
    ("arch", "cc", "runs"),
    [
        ("80", (8, 0), True),
        ("80", (8, 6), True),
        ("89", (8, 6), False),
        ("80", (9, 0), False),
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("100a", (10, 3), False),
        ("100f", (10, 3), True),
        ("100f", (12, 0), False),
        ("compute_80", (12, 0), True),
        ("compute_90a", (10, 0), False),
        ("compute_100", (9, 0), False),
    ],
)
def test_what_runs_where(arch: str, cc: tuple[int, int], runs: bool) -> None:
    assert Arch.parse(arch).runs_on(cc) is runs


def test_target_of_a_device() -> None:
    assert [str(Arch.of_device(cc)) for cc in ((8, 0), (8, 9), (9, 0), (12, 1))] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_121a",
    ]
