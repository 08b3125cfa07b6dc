"""Cases of exact attention, which rows are run through on a GPU: each can be made, and is right on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn.testing.case_tables import Case
from omniattn.testing.cases import call, cases_for, outputs_of, problem

CASES = [(op, case) for op in ("attention", "attention_split") for case in cases_for(op)]


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}, {case.name}" for op, case in CASES])
def test_it_is_right_on_the_cpu(op: str, case: Case) -> None:
    numbers = problem(case, op, "float16", 64)

    def array(values: Any, kind: str) -> Any:
        return values.astype(kind)

    outputs = outputs_of(call(getattr(omniattn, case.function), numbers, array, "float16"))
    got = {name: np.asarray(x, np.float32) for name, x in outputs.items()}
    assert [str(grade) for grade in numbers.expected.grade(got, "float16", 1e-4) if not grade.ok] == []
