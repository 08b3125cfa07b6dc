"""Rules for the whole test suite: what runs where."""

from __future__ import annotations

import pytest


def _asks_for_gpu(config: pytest.Config) -> bool:
    return "gpu" in (config.getoption("markexpr") or "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out of a run that did not name them.

    They are deselected, not skipped: a plain run on a machine without a GPU shows no skips, so that any skip there is news.
    ``-m gpu`` on such a machine does run them, and they fail: asked-for tests never pass by not running.
    """
    if _asks_for_gpu(config):
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
