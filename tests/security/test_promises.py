"""Which test files hold each promise of docs/security.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
#: The words in bold that begin a promise, and its test files below tests/.
TESTS = {
    "Nothing is unpickled": "security/test_source security/test_loading security/test_offline "
    "alignment/test_checkpoint",
    "No code of a model folder is run": "security/test_loading",
    "Nothing leaves the machine by itself": "security/test_offline security/test_source",
    "Chat servers": "security/test_keys llm/test_client llm/test_auxiliary docs/test_page_commands states/test_prompts",
    "The model hub": "security/test_offline models/test_backbone",
    "States folders": "viewing/test_run alignment/test_pixels states/test_dataset",
    "Trackers": "security/test_offline",
    "Keys": "security/test_keys llm/test_client llm/test_endpoints",
    "The meter": "memory/test_meter",
    "Dialogues are data": "models/test_chat states/test_prompts",
    "Pages": "security/test_pages viewing/test_pages sae/test_dashboard refmem/test_annotation_page "
    "evaluation/test_report",
    "Pictures": "security/test_loading data/test_chat models/test_pictures refmem/test_clusters",
    "Files": "security/test_keys security/test_files security/test_loading core/test_files sae/test_topk",
    "Notebooks": "test_notebooks viewing/test_workbench",
}


@pytest.mark.parametrize("promise", TESTS)
def test_the_tests_of_a_promise_exist(promise: str) -> None:
    missing = [name for name in TESTS[promise].split() if not (ROOT / "tests" / f"{name}.py").is_file()]
    assert missing == []


def test_every_promise_is_in_the_table() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Promises", 1)[1]
    promises = [lead.rstrip(".") for lead in re.findall(r"^- \*\*([^*]+)\*\*", section, re.MULTILINE)]
    assert len(promises) == len(re.findall(r"^- ", section, re.MULTILINE)), "a promise does not begin in bold"
    assert promises == list(TESTS)


def test_the_page_names_the_image_formats() -> None:
    from remind.models.images import PICTURE_FORMATS

    text = PAGE.read_text(encoding="utf-8")
    assert all(re.search(rf"\b{name}\b", text, re.IGNORECASE) for name in PICTURE_FORMATS)
