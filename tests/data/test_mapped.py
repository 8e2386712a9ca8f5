"""JSON of other shapes, read by a mapping: known corpora are written in them and must come out as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import seeds
from fuzzing.seeds import changed

from remind import Corpus, read
from remind.core.errors import ConfigError
from remind.data.readers import stream
from remind.data.sample import sample_path

DATA = seeds.SHAPED
# BaseLoader makes text, lists and dictionaries alone: `no` is a key here, and nothing can be constructed
MAPPING = yaml.load(seeds.MAPPING, yaml.BaseLoader)


def write(folder: Path, mapping: Any, **files: Any) -> tuple[Path, str]:
    """The JSON files and the mapping; what `read` takes."""
    (folder / "data").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    path = folder / "mapping.yaml"
    path.write_text(mapping if isinstance(mapping, str) else yaml.safe_dump(mapping), encoding="utf-8")
    return folder / "data", str(path)


@pytest.mark.parametrize(("nested", "answers"), [(True, "letter"), (False, "index"), (True, "text")])
def test_the_bundled_sample_in_other_shapes(tmp_path: Path, nested: bool, answers: str) -> None:
    """Other names and values; questions in their dialogues, or in files of their own; sessions by name."""
    corpus = read(sample_path() / "dev.jsonl")
    dialogues, asked = [], []
    for dialogue, questions in corpus.by_dialogue():
        rows = []
        for q in questions:
            places = ["ABCDEF".index(letter) for letter in q.answers] if q.options else []
            told = {"letter": q.answers, "index": [n + 1 for n in places], "text": [q.options[n] for n in places]}
            about = {"ask": q.text, "kind": f"<{q.format}>", "dim": q.dimension}
            row = {"qid": q.id, "meta": about, "of": dialogue.id, "choices": [{"says": text} for text in q.options]}
            row |= {"gold": told[answers] if q.options else q.answers, "part": q.split}
            rows.append({**row, "why": q.evidence, "shown": [index + 1 for index in q.images]})
        asked += rows
        parts = {
            s.id: {"when": s.time, "log": [[t.id, t.speaker, t.text, [[i.caption] for i in t.images]] for t in s.turns]}
            for s in dialogue.sessions
        }
        dialogues.append({"name": dialogue.id, "parts": parts, **({"qa": rows} if nested else {})})
    mapping = f"""\
        count_from: 1
        dialogue: {{id: name, sessions: parts, {"records: all.those, questions: qa" if nested else "file: talk*"}}}
        session: {{time: when, turns: log}}
        turn: {{id: 0, speaker: 1, text: 2, images: "3?"}}
        image: {{caption: 0}}
        question: {{id: qid, text: meta.ask, format: meta.kind, dimension: meta.dim, split: part, options: choices,
                   answers: gold, evidence: why, images: shown{"" if nested else ", dialogue: of, file: 'ask?.json'"}}}
        option: {{text: says}}
        answer: {{{answers}: .}}
        values: {{format: {{<single>: single, <multi>: multi, <direct>: direct}}}}
    """
    files = {"x": {"all": {"those": dialogues}}} if nested else {"talks": dialogues, "ask1": asked}
    folder, format = write(tmp_path, mapping, **files)
    assert read(folder, format) == corpus
    pieces = list(stream(folder, format))
    assert (Corpus.merge(pieces), len(pieces)) == (corpus, len(corpus.dialogues))


@pytest.mark.parametrize(
    ("path", "message"), [("turn.txt", "unknown key"), ("turn.text", "turn.text: 'a..b' is not a")]
)
def test_a_mapping_that_is_none(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"mapping\.yaml: {message}"):
        read(*write(tmp_path, changed(MAPPING, path, "a..b"), x=DATA))
