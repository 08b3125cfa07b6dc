"""Every exception that omniattn raises, each saying what to do about it.

This module imports nothing of the package, so that every part of it, build tools included, can use it.
All classes survive pickling, because an error raised in a worker process has to reach its parent whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "AlignmentError",
    "ArgumentError",
    "CacheError",
    "CommunicationError",
    "CompileError",
    "DeviceError",
    "DriverError",
    "DriverMissingError",
    "DtypeError",
    "KernelNotFoundError",
    "OmniattnError",
    "OutOfBlocksError",
    "OutOfHostBlocksError",
    "OutOfSlotsError",
    "ShapeError",
    "StrideError",
    "UnsupportedError",
]


#: In the documents of this package.
_PAGE = "docs/troubleshooting.md"


def _rebuild(cls: type[OmniattnError], args: tuple[Any, ...], state: dict[str, Any]) -> OmniattnError:
    """Unpickle without running ``__init__``, whose arguments differ from ``args``."""
    # Of the base whose memory an error has, which OSError decides for its subclasses.
    error: OmniattnError = cls.__base__.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class _Notes:
    """``__notes__`` of an error, made when they are first asked for: the page about its class.

    Tracebacks of Python 3.11 and newer show them. No instance has them before, so that pickles and comparisons of
    errors are of what was raised; what ``add_note`` appends stays.
    """

    def __get__(self, error: OmniattnError | None, cls: type[OmniattnError]) -> list[str]:
        if error is None:
            raise AttributeError("__notes__")
        notes: list[str] = error.__dict__.setdefault("__notes__", [f"About this error: {error.page}"])
        return notes


class OmniattnError(RuntimeError):
    """Base of all errors of this package.

    A RuntimeError, as torch and the packages that `compat` stands in for raise for invalid calls: code that is written
    for those catches it.
    """

    __notes__ = _Notes()

    @property
    def page(self) -> str:
        """Where the documents say what to do: a page with the heading of this class."""
        for cls in type(self).__mro__:
            if cls.__module__ == __name__ and cls is not OmniattnError:
                return f"{_PAGE}#{cls.__name__.lower()}"
        return f"{_PAGE}#by-error"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ArgumentError(OmniattnError, ValueError):
    """An argument that the function cannot take.

    Parameters
    ----------
    argument : str
        Name of the argument (or environment variable).
    expected : str
        What would have been accepted.
    received : object
        What came; shown with ``str``.
    function : str, optional
        Public function that was called, without parentheses.
    hint : str, optional
        One sentence on how to put it right.
    """

    def __init__(
        self,
        argument: str,
        expected: str,
        received: object,
        *,
        function: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.argument = argument
        self.expected = expected
        self.received = received if isinstance(received, (str, int, float, bool, tuple)) else str(received)
        self.function = function
        self.hint = hint
        where = f"{function}(): " if function else ""
        tail = f". {hint}" if hint else ""
        super().__init__(f"{where}argument {argument!r}: expected {expected}, received {received}{tail}")

    def named(self, function: str, **arguments: str) -> ArgumentError:
        """The same error, told of the public function ``function``, which left the check to another one.

        ``arguments``: what that function calls arguments of the other one, ``other="own"``.
        """
        argument = arguments.get(self.argument, self.argument)
        return type(self)(argument, self.expected, self.received, function=function, hint=self.hint)


class DtypeError(ArgumentError, TypeError):
    """An array of an element type that the function cannot take."""


class ShapeError(ArgumentError):
    """An array of a wrong rank or extent."""


class StrideError(ArgumentError):
    """An array whose strides the kernels cannot read or write."""


class AlignmentError(ArgumentError):
    """An array whose address is not aligned as the kernels need it."""


class DeviceError(ArgumentError):
    """An array on another device than the rest, or on one that cannot be used."""


class UnsupportedError(OmniattnError, ValueError):
    """A feature that this version, or this GPU, does not have.

    Parameters
    ----------
    what : str
        The feature that was asked for, and why it is not there.
    instead : str, optional
        What would work.
    """

    def __init__(self, what: str, *, instead: str | None = None) -> None:
        self.what = what
        self.instead = instead
        super().__init__(what if instead is None else f"{what}. What works: {instead}")


def telling(function: str, do: Callable[..., Any], *arguments: Any) -> Any:
    """``do(*arguments)``, whose errors name the public function ``function`` unless they name one already."""
    try:
        return do(*arguments)
    except ArgumentError as error:
        if error.function is not None:
            raise
        raise error.named(function) from error.__cause__
    except UnsupportedError as error:
        if not error.what.startswith("argument "):
            raise
        raise UnsupportedError(f"{function}(): {error.what}", instead=error.instead) from error.__cause__


def told_of(error: ArgumentError | UnsupportedError, function: str, names: Mapping[str, str]) -> OmniattnError:
    """An error of a function that ``function`` has called, told of that one: ``names`` is what it calls arguments."""
    if isinstance(error, ArgumentError):
        return error.named(function, **names)
    name, of_function, what = error.what.partition("(): ")
    if not of_function or name == function or not name.replace(".", "").isidentifier():
        return error
    what = re.sub(r"argument '(\w+)'", lambda found: f"argument {names.get(found[1], found[1])!r}", what)
    return UnsupportedError(f"{function}(): {what}", instead=error.instead)


class OutOfBlocksError(OmniattnError):
    """A paged cache has fewer free blocks than a call needs; nothing has changed.

    Parameters
    ----------
    needed, free, num_blocks : int
        Blocks that the call needs more, that are free, and of the whole cache.
    block_size : int
        Tokens of a block.
    """

    def __init__(self, needed: int, free: int, num_blocks: int, block_size: int) -> None:
        self.needed = needed
        self.free = free
        self.num_blocks = num_blocks
        self.block_size = block_size
        super().__init__(
            f"{needed} more blocks of {block_size} tokens are needed, {free} of {num_blocks} are free. What to do: "
            "free(), swap_out() or truncate() sequences, let some wait, or make the cache larger"
        )


class OutOfHostBlocksError(OmniattnError):
    """A `SwapSpace` has less room than a sequence needs that is to leave the cache; nothing has changed.

    Parameters
    ----------
    needed, free, num_blocks : int
        Blocks that the sequence needs there, that are free, and of the whole space.
    """

    def __init__(self, needed: int, free: int, num_blocks: int) -> None:
        self.needed = needed
        self.free = free
        self.num_blocks = num_blocks
        super().__init__(
            f"{needed} more blocks of the swap space are needed, {free} of {num_blocks} are free. What to do: free() "
            "the sequence and compute it again later, swap_in() or free() others, or make the space larger"
        )


class OutOfSlotsError(OmniattnError):
    """Every slot of a cache's recent window belongs to a sequence; nothing has changed.

    Parameters
    ----------
    num_slots : int
        Slots in all.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        super().__init__(
            f"all {num_slots} slots of the recent window belong to sequences. What to do: free() sequences, let some "
            "wait, or make a cache with more recent_slots"
        )


class KernelNotFoundError(OmniattnError):
    """No binary of a kernel could be had for a GPU.

    Parameters
    ----------
    kernel : str
        Name of the kernel in the registry.
    arch : str
        The GPU's target, for example ``"sm_90a"``.
    tried : iterable of (what, reason)
        Every place that was looked in, in order, and why it did not serve.
    advice : str
        What to install or change.
    """

    def __init__(self, kernel: str, arch: str, tried: Iterable[tuple[str, str]], advice: str) -> None:
        self.kernel = kernel
        self.arch = arch
        self.tried = tuple(tried)
        self.advice = advice
        lines = [f"no usable binary of kernel {kernel!r} for {arch}. Tried, in this order:"]
        lines += [f"  - {what}: {reason}" for what, reason in self.tried] or ["  - nothing"]
        lines.append(f"What to do: {advice}")
        super().__init__("\n".join(lines))


class CompileError(OmniattnError):
    """NVRTC is missing, or rejected a kernel's source.

    Parameters
    ----------
    message : str
        What went wrong, and what to do.
    log : str, optional
        The compiler's log, word for word.
    """

    def __init__(self, message: str, *, log: str = "") -> None:
        self.message = message
        self.log = log
        super().__init__(f"{message}\n{log.rstrip()}" if log.strip() else message)


class DriverError(OmniattnError):
    """A call of the CUDA driver failed.

    Parameters
    ----------
    call : str
        The driver function, for example ``"cuLaunchKernel"``.
    code : str
        Name of the return code, for example ``"CUDA_ERROR_OUT_OF_MEMORY"``.
    description : str
        What the code means.
    advice : str, optional
        What to do.
    launch : str, optional
        Of the launch of a kernel: which one, of which call, and what the kernel and the GPU have.
    """

    def __init__(self, call: str, code: str, description: str, advice: str = "", launch: str = "") -> None:
        self.call = call
        self.code = code
        self.description = description
        self.advice = advice
        self.launch = launch
        middle = f". Launch: {launch}" if launch else ""
        tail = f". What to do: {advice}" if advice else ""
        super().__init__(f"{call} failed with {code}: {description}{middle}{tail}")

    def at(self, launch: str) -> DriverError:
        """The same error, told of this launch; what is known of its kernel and the GPU comes behind it."""
        told = f"{launch}; {self.launch}" if self.launch else launch
        return type(self)(self.call, self.code, self.description, self.advice, told)


class DriverMissingError(DriverError):
    """There is no CUDA driver, or no Python binding to reach it."""


class CacheError(OmniattnError, OSError):
    """An explicit command on the kernel cache failed (implicit use of the cache never raises).

    Parameters
    ----------
    path : str
        File or folder concerned.
    problem : str
        What went wrong.
    advice : str
        What to do.
    """

    def __init__(self, path: str, problem: str, advice: str) -> None:
        self.path = path
        self.problem = problem
        self.advice = advice
        super().__init__(f"kernel cache {path}: {problem}. What to do: {advice}")


class CommunicationError(OmniattnError):
    """An exchange between the ranks of a group failed, or another rank refused the call.

    Parameters
    ----------
    what : str
        What failed, where, and what the transport said.
    advice : str
        What to do.
    """

    def __init__(self, what: str, advice: str) -> None:
        self.what = what
        self.advice = advice
        super().__init__(f"{what}. What to do: {advice}")
