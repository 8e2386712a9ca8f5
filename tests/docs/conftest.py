"""A desk for each file of tests, so that files can be run by different workers."""

from __future__ import annotations

import pytest
from doc_desk import Desk


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A folder in which the documents' commands run."""
    return Desk(tmp_path_factory.mktemp("desk"))
