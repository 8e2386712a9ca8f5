"""Which tests hold each promise of docs/security.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
#: The words in bold a promise begins with → node ids below tests/.
HELD = {
    "Nothing is unpickled": [
        "security/test_source.py::test_nothing_is_unpickled_run_from_text_or_fetched",
        "security/test_source.py::test_every_loader_is_told_to_read_safetensors_and_to_run_no_code",
        "security/test_loading.py::test_a_model_folder_with_code_or_pickles_is_refused_in_one_line",
        "security/test_loading.py::test_a_pickle_in_an_sae_folder_is_not_opened",
        "security/test_loading.py::test_a_pickle_in_a_checkpoint_is_not_opened",
        "security/test_loading.py::test_yaml_makes_no_objects",
        "security/test_offline.py::test_states_pages_training_export_and_evaluation_stay_on_the_machine",
        "alignment/test_checkpoint.py::test_nothing_is_pickled",
        "models/test_backbone.py::test_pickled_weights_are_not_opened",
    ],
    "No code of a model folder is run": [
        "security/test_loading.py::test_a_model_folder_with_code_or_pickles_is_refused_in_one_line",
        "security/test_loading.py::test_code_beside_a_model_that_needs_none_is_left_alone",
        "security/test_loading.py::test_a_clip_folder_with_code_is_not_run",
        "security/test_loading.py::test_kernels_that_a_model_folder_names_are_not_fetched",
        "security/test_loading.py::test_kernels_that_other_folders_name_are_not_fetched",
        "security/test_loading.py::test_bitsandbytes_fetches_no_kernel",
        "models/test_backbone.py::test_model_code_in_the_folder_is_never_run",
        "models/test_backbone.py::test_tokenizer_code_in_the_folder_is_never_run",
    ],
    "Nothing leaves the machine by itself": [
        "security/test_offline.py::test_states_pages_training_export_and_evaluation_stay_on_the_machine",
        "security/test_source.py::test_no_module_opens_a_socket",
        "security/test_source.py::test_the_chat_client_alone_speaks_to_a_server",
    ],
    "Chat servers": [
        "security/test_keys.py::test_what_a_request_holds",
        "llm/test_client.py::test_a_server_gets_the_key_and_no_header_of_the_environment",
        "llm/test_client.py::test_a_redirect_is_not_followed",
        "docs/test_page_commands.py::test_a_dry_run_asks_nothing",
        "states/test_prompts.py::test_gold_is_in_no_request",
        "llm/test_auxiliary.py::test_gold_reaches_no_model",
    ],
    "The model hub": [
        "security/test_offline.py::test_states_pages_training_export_and_evaluation_stay_on_the_machine",
        "models/test_backbone.py::test_unknown_hub_id",
        "models/test_backbone.py::test_no_such_folder",
    ],
    "States folders": [
        "viewing/test_run.py::test_a_manifest_makes_nobody_ask_the_hub",
        "viewing/test_run.py::test_a_manifest_may_name_a_model_folder_and_no_folder_to_write_to",
        "alignment/test_pixels.py::test_images_may_be_confined_to_a_folder",
    ],
    "Trackers": ["security/test_offline.py::test_no_tracker_is_on"],
    "Keys": [
        "security/test_keys.py::test_a_key_is_in_nothing_that_is_written_or_said",
        "security/test_keys.py::test_a_refused_key_is_not_in_the_error",
        "security/test_keys.py::test_addresses_that_hold_a_key_are_refused_without_telling_it",
        "llm/test_client.py::test_the_key_is_sent_and_appears_nowhere_else",
        "llm/test_client.py::test_keys_that_are_missing_or_not_meant_for_the_server",
        "llm/test_client.py::test_mistakes_in_an_endpoint",
        "llm/test_client.py::test_a_server_gets_the_key_and_no_header_of_the_environment",
        "llm/test_endpoints.py::test_names_that_could_hold_a_key_are_refused_wherever_they_stand",
        "llm/test_endpoints.py::test_an_address_that_is_refused_is_not_told",
        "llm/test_endpoints.py::test_a_key_in_place_of_its_name_is_not_told",
        "llm/test_endpoints.py::test_https_needs_a_key_however_it_is_written",
    ],
    "Dialogues are data": [
        "models/test_chat.py::test_special_tokens_in_text_stay_text",
        "models/test_chat.py::test_prompt_keeps_the_template_special_and_the_text_plain",
        "states/test_prompts.py::test_hostile_words_stay_inside_the_fence",
        "states/test_prompts.py::test_a_fence_code_is_in_no_text_and_repeats",
    ],
    "Pages": [
        "security/test_pages.py::test_hostile_text_stays_text_and_nothing_is_asked_for",
        "security/test_pages.py::test_the_policy_of_a_page_lets_nothing_in",
        "viewing/test_pages.py::test_text_stays_text",
        "viewing/test_pages.py::test_the_policy_lets_no_other_script_run",
        "sae/test_dashboard.py::test_the_page_in_a_browser",
        "refmem/test_annotation_page.py::test_hostile_text_stays_text",
        "evaluation/test_report.py::test_hostile_text_is_shown_as_text",
        "evaluation/test_report.py::test_the_page_needs_no_network",
    ],
    "Pictures": [
        "security/test_loading.py::test_postscript_starts_no_interpreter",
        "security/test_loading.py::test_pictures_of_the_formats_named_are_read",
        "security/test_loading.py::test_a_picture_of_too_many_pixels_is_refused",
        "security/test_loading.py::test_an_image_on_the_web_is_not_fetched",
        "data/test_chat.py::test_local_images_stay_in_the_data_folder",
        "data/test_chat.py::test_links_within_the_data_folder_are_followed",
        "models/test_chat.py::test_a_file_too_large_to_be_a_picture_is_not_read",
        "models/test_windows.py::test_a_picture_far_longer_than_wide_is_named",
        "models/test_windows.py::test_pictures_are_opened_one_by_one",
        "refmem/test_images.py::test_pictures_are_opened_one_by_one",
    ],
    "Files": [
        "security/test_keys.py::test_a_key_is_in_nothing_that_is_written_or_said",
        "security/test_files.py::test_rights_are_those_of_the_umask",
        "core/test_files.py::test_a_failed_write_leaves_the_old_file",
        "core/test_files.py::test_a_failed_folder_leaves_the_old_one",
    ],
    "Notebooks": [
        "test_notebooks.py::test_a_notebook_is_kept_with_small_outputs",
        "viewing/test_workbench.py::test_text_stays_text_and_nothing_runs",
    ],
}


@cache
def names_in(file: str) -> set[str]:
    """Names of the tests in a file below tests/."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("promise", HELD)
def test_the_tests_of_a_promise_are_there(promise: str) -> None:
    assert HELD[promise]
    for node in HELD[promise]:
        file, _, name = node.partition("::")
        assert name in names_in(file), f"{promise}: no test {node}"


def test_every_promise_has_tests() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Promises", 1)[1]
    leads = [lead.rstrip(".") for lead in re.findall(r"^- \*\*([^*]+)\*\*", section, re.MULTILINE)]
    assert len(leads) == len(re.findall(r"^- ", section, re.MULTILINE)), (
        "a line does not begin with its promise in bold"
    )
    assert leads == list(HELD)


def test_the_page_names_the_picture_formats_that_are_read() -> None:
    from remind.models.chat import PICTURE_FORMATS

    text = PAGE.read_text(encoding="utf-8")
    assert all(re.search(rf"\b{name}\b", text, re.IGNORECASE) for name in PICTURE_FORMATS)
