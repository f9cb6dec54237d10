"""Assertions of the contract's checks explain themselves like those of tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("engines.by_hand", "engines.contract")
