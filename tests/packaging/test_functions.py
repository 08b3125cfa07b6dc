"""Functions and their lengths, as build_tools/functions.py finds them."""

from __future__ import annotations

import re
from pathlib import Path

from build_tools import kernels
from build_tools.functions import Function, device_functions, python_functions

ROOT = Path(__file__).resolve().parents[2]

DEVICE = """\
#define OPEN {  // } no function: a directive
namespace inner {
// f() {
template <typename T>
OA_DEVICE T f(T x, Shift shift = {}) {
    auto g = [&](int y) { return y; };
    for (int i = 0; i < 2; ++i) {
        if (x) call([&] { x = '{'; });
    }
    return "}" + g(x);
}
struct alignas(16) S {
    int data[2] = {1, 2};
    OA_DEVICE S(int x)
        : a{x, x}, b(x) {
        go();
    }
    OA_DEVICE S() : a{} {}
    OA_DEVICE float operator()(int, int) const { return 0.0f; }
    OA_DEVICE explicit operator bool() const noexcept {
        return true;
    }
};
}  // namespace inner
template <>
OA_DEVICE int f<true>(int x) { return x; }
extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) kernel(
    const __grid_constant__ Params p) {
    /* } */
}
"""


def test_device_functions() -> None:
    assert device_functions(DEVICE) == [
        Function("f", 4, 8),
        Function("S", 14, 4),
        Function("S", 18, 1),
        Function("operator()", 19, 1),
        Function("operator bool", 20, 3),
        Function("f<true>", 25, 2),
        Function("kernel", 27, 4),
    ]


def test_python_functions() -> None:
    text = "@x.mark\n@x\ndef f():\n    def g(): ...\n    return g\n\nclass C:\n    async def m(self):\n        pass\n"
    assert sorted(python_functions(text), key=lambda found: found.line) == [
        Function("f", 1, 5),
        Function("g", 4, 1),
        Function("m", 8, 2),
    ]


def test_every_device_function_is_found() -> None:
    """Each definition that says so begins in a function that was found."""
    missed = []
    for path in kernels.kernel_sources(ROOT / "kernels_cu"):
        text = path.read_text(encoding="utf-8")
        found = {
            line for function in device_functions(text) for line in range(function.line, function.line + function.lines)
        }
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(r"\s*(?:template <.*> )?(?:extern \"C\" |static )?(?:OA_DEVICE|__global__)\b", line):
                missed += [f"{path.name}:{number}"] if number not in found else []
    assert missed == []
