"""Small files in real formats under the names the documents use, from the bundled dialogues; and a tiny Qwen3-VL."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from doc_commands import blocks
from fuzzing.seeds import LONGMEMEVAL
from two_roles import save_chat

from experiments.official.longmemeval import TYPES
from remind import read
from remind.core.files import write_json, write_rows
from remind.data.dialogue import Corpus, Dialogue, Session
from remind.data.sample import sample_path
from remind.models.nano import save_nano

#: Sessions and questions that are taken of each dialogue.
SESSIONS, QUESTIONS = 2, 4
#: Models of the hub that configs name, and how many layers they have here.
HUB_MODELS = {f"Qwen/Qwen3-VL-{size}-Instruct": layers for size, layers in (("2B", 28), ("4B", 36), ("8B", 36))}
HUB_MODELS |= {"Qwen/Qwen3-4B-Instruct-2507": 2, "meta-llama/Llama-3.2-3B-Instruct": 2}


@cache
def _corpus() -> Corpus:
    return read(sample_path() / "train.jsonl")


def _dialogues() -> Iterator[tuple[Dialogue, Sequence[Session]]]:
    return ((dialogue, dialogue.sessions[:SESSIONS]) for dialogue in _corpus().dialogues)


def _turns(session: Session, number: int, key: str) -> list[dict[str, Any]]:
    """Turns as LoCoMo and REALTALK have them, but for what the text is called."""
    rows = []
    for place, turn in enumerate(session.turns, start=1):
        row: dict[str, Any] = {"speaker": turn.speaker, key: turn.text, "dia_id": f"D{number}:{place}"}
        if turn.images and turn.images[0].caption:
            row["blip_caption"] = turn.images[0].caption
        rows.append(row)
    return rows


def _questions(dialogue: Dialogue, sessions: Sequence[Session], most: int) -> list[dict[str, Any]]:
    """Direct questions with evidence among the sessions; categories 1 to 4 in turn, and one without an answer."""
    ids = {t.id: f"D{n}:{p}" for n, s in enumerate(sessions, 1) for p, t in enumerate(s.turns, 1)}
    rows: list[dict[str, Any]] = []
    for question in _corpus().questions:
        evidence = [ids[turn_id] for turn_id in question.evidence if turn_id in ids]
        if question.dialogue_id == dialogue.id and evidence and len(rows) < most:
            text, answer = question.text, question.answers[0]
            if question.options:
                answer = question.options["ABCD".index(answer)]
            rows.append({"question": text, "answer": answer, "evidence": evidence, "category": 1 + len(rows) % 4})
    rows.append({"question": "What did nobody say?", "adversarial_answer": "this", "evidence": ["D1:1"], "category": 5})
    return rows


def _locomo() -> list[dict[str, Any]]:
    samples = []
    for dialogue, sessions in list(_dialogues())[:4]:
        conversation: dict[str, Any] = dict(zip(("speaker_a", "speaker_b"), dialogue.speakers, strict=False))
        for number, session in enumerate(sessions, start=1):
            conversation[f"session_{number}_date_time"] = f"1:5{number} pm on {number} May, 2023"
            conversation[f"session_{number}"] = _turns(session, number, "text")
        questions = _questions(dialogue, sessions, QUESTIONS)
        samples.append({"sample_id": dialogue.id, "conversation": conversation, "qa": questions})
    return samples


def _realtalk(folder: Path) -> None:
    for number, (dialogue, sessions) in enumerate(list(_dialogues())[4:6], start=1):
        chat: dict[str, Any] = {"name": dialogue.id, "qa": _questions(dialogue, sessions, 2)[:-1]}
        for place, session in enumerate(sessions, start=1):
            chat[f"session_{place}_date_time"] = f"{place:02d}.01.2024, 22:42:04"
            chat[f"session_{place}"] = _turns(session, place, "clean_text")
        write_json(folder / f"Chat_{number}.json", chat)


def _corpora(folder: Path) -> None:
    """MSC, Friends and DialogCC: dialogues without questions."""
    dialogue, sessions = list(_dialogues())[6]
    dialogs = [
        [{"text": turn.text, "id": f"Speaker {n % 2 + 1}"} for n, turn in enumerate(session.turns)]
        for session in sessions
    ]
    previous = [{"dialog": d, "time_num": 1, "time_unit": "days", "time_back": "1 days ago"} for d in dialogs[:-1]]
    row = {"personas": [], "dialog": dialogs[-1], "previous_dialogs": previous, "init_personas": []}
    rows = [{**row, "metadata": {"initial_data_id": f"valid_{n}"}} for n in range(4)]
    write_rows(folder / "msc" / "session_3_valid.jsonl", rows)

    (folder / "friends").mkdir()
    with (folder / "friends" / "emorynlp_dev_final.csv").open("w", encoding="utf-8", newline="") as file:
        file.write("Utterance,Speaker,Emotion,Scene_ID,Utterance_ID,Season,Episode,Start_Time,End_Time\n")
        writer = csv.writer(file)
        for scene, session in enumerate(sessions, start=1):
            for n, turn in enumerate(session.turns, start=1):
                writer.writerow([turn.text, str([turn.speaker]), "Neutral", scene, n, 1, 2, "00:00:02.877", ""])

    shared = [{"image_url": "https://example.org/1.jpg", "caption": "a lake"}]
    records = [
        {
            "dialogue_id": f"{dialogue.id}:{place}",
            "dialogue": [
                {"utterance_idx": n, "utterance": t.text, "speaker": t.speaker, "shared_image": [] if n else shared}
                for n, t in enumerate(session.turns)
            ],
            "split": "train",
        }
        for place, session in enumerate(sessions)
    ]
    write_json(folder / "dialogcc" / "train.json", records)


def _longmemeval(folder: Path) -> None:
    """Six questions of the six types with judged answers, and one with its sessions."""
    queries = [
        {
            "id": f"q{n}",
            "query": f"What was number {n}?",
            "gold_answers": [f"number {n}"],
            "gold_ids": [f"q{n}_answer"],
            "user_id": f"q{n}",
            "meta": {"question_type": kind, "query_timestamp": "2023-05-30T00:00:00+00:00"},
        }
        for n, kind in enumerate(TYPES)
    ]
    write_json(folder / "longmemeval_s_queries.json", queries)
    write_json(folder / "longmemeval_s.json", LONGMEMEVAL)
    judged = [
        {
            "question_id": f"q{n}",
            "hypothesis": f"It was number {n}.",
            "autoeval_label": {"model": "gpt-4o-mini-2024-07-18", "label": n % 2 == 0},
        }
        for n in range(len(TYPES))
    ]
    write_rows(folder / "rag_s_cleaned.eval-results-gpt-4o-mini.jsonl", judged)


def mapped(folder: Path) -> None:
    """The mapping file of docs/data.md, and the file it is for."""
    for language, name, sign in (("yaml", "mapping.yaml", "dialogue:"), ("json", "official.json", '{"conversations"')):
        [block] = [b for b in blocks(language) if b.page == "docs/data.md" and b.lines[0].startswith(sign)]
        (folder / name).write_text("\n".join(block.lines), encoding="utf-8")


def lay_out(folder: Path) -> None:
    """Every data file the documents name."""
    for name in ("locomo10.json", "dialogues.json", "locomo_dev.json"):
        write_json(folder / name, _locomo())
    _realtalk(folder / "realtalk")
    _corpora(folder)
    _longmemeval(folder)
    mapped(folder)
    (folder / "texts.txt").write_text("Ana drinks coffee.\nBen drinks tea in the morning.\n" * 4, encoding="utf-8")


def lay_out_model(folder: Path, name: str) -> None:
    """A Qwen3-VL as deep as the one of that name, or a text model; found before the hub id."""
    if "VL" in name:
        save_nano(folder / name, hidden_size=64, layers=HUB_MODELS[name], vision_size=16)
    else:
        save_chat(folder / name, HUB_MODELS[name])
