"""What a digest of code is made of: the same for the same code, from every version of Python."""

from __future__ import annotations

import pytest

from build_tools.code_text import device_code, python_code

#: Every construct whose syntax tree has changed since Python 3.10, with what all versions have to make of it.
SAMPLE = '''"""A docstring."""

class C:
    """Another."""

    x: int = -1

    def f(self, *, y=None, **more):
        return f"a{y!r:>{self.x}}b" "c" f"{y}"
'''
EXPECTED = (
    "Module(body=[ClassDef(body=[AnnAssign(annotation=Name(id='int'),simple=1,target=Name(id='x'),"
    "value=UnaryOp(op=USub(),operand=int 1)),FunctionDef(args=arguments(args=[arg(arg='self')],"
    "kw_defaults=[NoneType None],kwarg=arg(arg='more'),kwonlyargs=[arg(arg='y')]),body=[Return(value=JoinedStr["
    "'a',FormattedValue(conversion=114,format_spec=JoinedStr['>',FormattedValue(conversion=-1,"
    "value=Attribute(attr='x',value=Name(id='self')))],value=Name(id='y')),'bc',"
    "FormattedValue(conversion=-1,value=Name(id='y'))])],name='f')],name='C')])"
)


def test_the_tree_is_the_same_from_every_python() -> None:
    assert python_code(SAMPLE) == EXPECTED


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1  # one", "x = (1)"),
        ("def f():\n    'Text.'\n    return 1", "def f():\n\n    return 1"),
        ("f(a,\n  b)", "f(a, b)"),
        ("x = 'a' 'b'", 'x = "ab"'),
    ],
)
def test_python_that_is_the_same(one: str, other: str) -> None:
    assert python_code(one) == python_code(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = 'a'", "x = b'a'"),
        ("x = 'a'", "x = 'b'"),
        ("x: 'a' = 1", "x: 'b' = 1"),
        ("x = f'{a}b'", "x = f'{a}c'"),
        ("x = f'{a}'", "x = f'{a!r}'"),
        ("x = {**a}", "x = {a: a}"),
        ("def f(a, /): pass", "def f(a): pass"),
        ("def f(*, a, b=1): pass", "def f(*, a=1, b): pass"),
        ("from . import a", "from .. import a"),
        ("del x", "x"),
    ],
)
def test_python_that_differs(one: str, other: str) -> None:
    assert python_code(one) != python_code(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int x = 1;  // one", "int  x=1 ;"),
        ("int/* a\nb */x;", "int x;"),
        ("#define N 1  // one\nint x;", "#define  N  1\n\nint x;"),
        ("#define N a \\\n    + b\nint x;", "#define N a + b\nint x;"),
        ("int x;\r\nint y;\r\n", "int x;\nint y;"),
        ("// it's a comment\nint x; // don't\n", "int x;"),
    ],
)
def test_device_code_that_is_the_same(one: str, other: str) -> None:
    assert device_code(one) == device_code(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int x;", "intx;"),
        ("a + +b", "a ++b"),
        ("a > > b", "a >> b"),
        ("1e-5f", "1e - 5f"),
        ('asm("a; // b");', 'asm("a; // c");'),
        ('asm("a b");', 'asm("a  b");'),
        ('R"(/* a */)"', 'R"(/* b */)"'),
        ("'/'", "'*'"),
        ("#define F(x) x", "#define F (x) x"),
        ("#define N 1\nint x;", "#define N 1 int x;"),
        ("#if A\nx\n#endif", "#if A x\n#endif"),
    ],
)
def test_device_code_that_differs(one: str, other: str) -> None:
    assert device_code(one) != device_code(other)
