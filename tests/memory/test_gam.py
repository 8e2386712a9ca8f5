"""GAM, played by a script: pages, the rounds of research, where the notes come from, and the number of calls."""

from __future__ import annotations

import json
from pathlib import Path

from scripted import ScriptedChat, held, opened, parts, session

from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.gam import GAMSystem

SESSIONS = (
    session("s1", "2023-05-08", "Ann: I have a cat called Tom.", "Bob: How nice."),
    session("s2", "2023-06-01", "Bob: I live in Rome.", "Ann: The weather is fine."),
    session("s3", None, "Ann: My pet ran away.", "Bob: Oh no."),
)
PLAN = {"info_needs": [], "tools": [], "keyword_collection": [], "vector_queries": [], "page_index": []}


def asks(request: Request) -> str:
    """Name of the template a request was made from."""
    return request.prompt_id.rpartition("-")[0]


def researcher(request: Request) -> str:
    """Looks for the cat by its name, then by what it lacks, and cites the pages that tell of it."""
    shown, template = parts(request), asks(request)
    if template == "gam_page":
        return f"Of {shown['page'].splitlines()[-1].split(':')[0]} and others."
    if template == "gam_plan":
        first = shown["question"].startswith("What became")
        tool = {"tools": ["keyword"], "keyword_collection": ["Tom"]} if first else {"tools": ["vector"]}
        return json.dumps({**PLAN, "vector_queries": [shown["question"]], **tool})
    if template == "gam_integrate":
        pages = [page.split("\n", 1) for page in shown.get("pages", "").split("\n\n") if page]
        told = [line for _, page in pages for line in page.splitlines() if "Tom" in line or "ran away" in line]
        cited = [int(head[5:-1]) for head, page in pages if "Tom" in page or "ran away" in page]
        return json.dumps({"content": "\n".join(filter(None, [shown.get("notes"), *told])), "sources": [*cited, 77]})
    if template == "gam_check":
        return json.dumps({"enough": "ran away" in shown["notes"]})
    return '{"new_requests": ["Did a pet run away?"]}'


def test_pages_and_research(tmp_path: Path) -> None:
    chat = ScriptedChat(researcher)
    with opened(GAMSystem(top=1), tmp_path / "b", chat, *SESSIONS) as memory:
        assert list(held(memory).values()) == [("s1:1", "s1:2"), ("s2:1", "s2:2"), ("s3:1", "s3:2")]
        assert parts(chat.asked[2])["abstracts"] == "Page 0: Of Bob and others.\nPage 1: Of Ann and others."
        found = memory.retrieve(Query("What became of Ann's cat?", "q"), k=1)
        (notes,) = found.memories
        assert notes.text == "Ann: I have a cat called Tom.\nAnn: My pet ran away."
        assert notes.sources == ("s1:1", "s1:2", "s3:1", "s3:2")
        assert [asks(request) for request in chat.asked[3:]] == [
            *("gam_plan", "gam_integrate", "gam_check", "gam_ask"),
            *("gam_plan", "gam_integrate", "gam_check"),
        ]
        assert [part["pages"] for part in found.trace["rounds"]] == [[0], [2]]
