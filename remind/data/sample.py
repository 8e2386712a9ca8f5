"""The bundled RefMem-Bench in miniature: synthetic dialogues whose latent states, and so whose answers, are known.

Each dialogue gives its speakers states (a changing stance, a habit, a value, an experience, an avoided subject, a
visual style, a motif) that show only in scattered turns and captions; every question asks for one of them. What the
states are and how they show is in `world.yaml`; talk without any state, for training SAEs, in `talk.yaml`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path

from remind.core.files import write_rows
from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.testbed.author import Author, Line, Record, Thread, bank

#: How many dialogues each split has; a dialogue is in one split only.
SPLITS = (("train", 7), ("dev", 2), ("test", 3))
SEED = 2024
LETTERS = "ABCD"


def sample_path() -> Path:
    """The folder of the bundled benchmark: train.jsonl, dev.jsonl and test.jsonl."""
    return Path(str(files("remind.data") / "sample"))


def corpus_path() -> Path:
    """Bundled small talk without questions (a folder of JSONL); shares no line and no speaker with the benchmark."""
    return Path(str(files("remind.data") / "corpus"))


def generate(seed: int = SEED) -> list[Record]:
    """The whole benchmark as JSONL records, each context followed by its questions; deterministic in `seed`.

    12 dialogues of 6 sessions with 16 questions each, two for every dimension. Formats rotate, so that three dialogues
    in a row have every dimension in every format.
    """
    splits = [name for name, count in SPLITS for _ in range(count)]
    dice = random.Random(f"remind-sample:{seed}:options")
    letters: dict[str, list[str]] = {name: [] for name, _ in SPLITS}
    sizes: list[int] = []
    records: list[Record] = []
    questions = 0
    for number, split in enumerate(splits):
        context_id = f"c{number + 1:02d}"
        sessions, threads = Author(seed, number).write()
        context, turns_of, images_of = _context(context_id, sessions, len(threads), dice)
        records.append(context)
        order = sorted(range(len(threads)), key=lambda t: DIMENSIONS.index(threads[t].dimension))
        for position, index in enumerate(order):
            thread = threads[index]
            kind = FORMATS[(number + position // 2 + position % 2) % 3]
            options: list[str] = []
            answers = list(thread.forms)
            if kind == "single":
                letters[split].extend([] if letters[split] else dice.sample(LETTERS, 4))
                options, answers = _single(thread, letters[split].pop(), dice)
            elif kind == "multi":
                sizes.extend([] if sizes else dice.sample([1, 2, 2, 3, 3, 4], 6))
                options, answers = _multi(thread, sizes.pop(), dice)
            questions += 1
            records.append(
                {
                    "type": "question",
                    "id": f"q{questions:04d}",
                    "context_id": context_id,
                    "question": thread.ask[kind],
                    "format": kind,
                    "options": options,
                    "answers": answers,
                    "evidence": turns_of[index],
                    "images": images_of[index],
                    "dimension": thread.dimension,
                    "split": split,
                    "category": None,
                    "time": None,
                }
            )
    return records


def _single(thread: Thread, letter: str, dice: random.Random) -> tuple[list[str], list[str]]:
    """Four options with the right one at `letter`."""
    tempting = list(dict.fromkeys(thread.tempting))[:2]
    rest = [text for text in thread.wrong if text not in tempting]
    options = dice.sample(tempting + dice.sample(rest, 3 - len(tempting)), 3)
    options.insert(LETTERS.index(letter), thread.right)
    return options, [letter]


def _multi(thread: Thread, size: int, dice: random.Random) -> tuple[list[str], list[str]]:
    """Four options of which `size` are right, or as near to it as the statements allow."""
    size = min(max(size, 4 - len(thread.fails)), len(thread.holds))
    holds = dice.sample(thread.holds, size)
    options = dice.sample(holds + dice.sample(thread.fails, 4 - size), 4)
    return options, [letter for letter, option in zip(LETTERS, options, strict=True) if option in holds]


def _context(
    context_id: str, sessions: list[list[Line]], threads: int, dice: random.Random
) -> tuple[Record, list[list[str]], list[list[int]]]:
    """The context record, and for each thread its evidence turn ids and its image indices."""
    turns_of: list[list[str]] = [[] for _ in range(threads)]
    images_of: list[list[int]] = [[] for _ in range(threads)]
    clock = datetime(2024, 1, 6) + timedelta(days=dice.randrange(120))
    image = 0
    written: list[Record] = []
    for number, lines in enumerate(sessions, start=1):
        turns: list[Record] = []
        for position, line in enumerate(lines, start=1):
            turn_id = f"s{number}:{position}"
            images = [] if line.caption is None else [{"path": None, "caption": line.caption, "source": None}]
            turns.append({"id": turn_id, "speaker": line.speaker, "text": line.text, "time": None, "images": images})
            for thread in line.threads:
                turns_of[thread].append(turn_id)
                images_of[thread].extend([image] * len(images))
            image += len(images)
        time = clock.replace(hour=dice.randrange(8, 22), minute=dice.randrange(0, 60, 5))
        written.append({"id": f"s{number}", "time": time.isoformat(timespec="minutes"), "turns": turns})
        clock += timedelta(days=dice.randrange(3, 18))
    return {"type": "context", "id": context_id, "sessions": written}, turns_of, images_of


def small_talk(seed: int = SEED, dialogues: int = 48) -> list[Record]:
    """Dialogues without states or questions, from the grammar in `talk.yaml`: a corpus to train SAEs on."""
    grammar = bank("talk")
    records = []
    for number in range(dialogues):
        rng = random.Random(f"remind-talk:{seed}:{number}")

        def filled(text: str, rng: random.Random = rng) -> str:
            text = re.sub(r"<(\w+)>", lambda match: rng.choice(grammar["slots"][match.group(1)]), text)
            return re.sub(r"(?:^|(?<=[.?!] ))[a-z]", lambda match: match.group().upper(), text)

        speakers = rng.sample(grammar["names"], 2)
        sessions = []
        for _ in range(4):
            lines: list[Line] = []
            for exchange in rng.sample(grammar["exchanges"], 6):
                voices = rng.sample(speakers, 2)
                lines.extend(Line(voices[place % 2], filled(text)) for place, text in enumerate(exchange))
            sessions.append(lines)
        records.append(_context(f"talk{number + 1:02d}", sessions, 0, rng)[0])
    return records


def texts() -> Iterator[str]:
    """Every line of the bundled files as a prompt shows it; the nano tokenizer is trained on them."""
    for path in (*sorted(sample_path().glob("*.jsonl")), *sorted(corpus_path().glob("*.jsonl"))):
        for row in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(row)
            for session in record.get("sessions", ()):
                for turn in session["turns"]:
                    yield f"{turn['speaker']}: {turn['text']}\n"
                    yield from (f"[Image #0 Caption] {image['caption']}\n" for image in turn["images"])
            if record["type"] == "question":
                yield f"Question: {record['question']}\n"
                yield from (f"{letter}. {text}\n" for letter, text in zip(LETTERS, record["options"], strict=False))
                yield from (f"<answer>{text}</answer><explanation>" for text in record["answers"])


def write(folder: str | Path) -> list[Path]:
    """Generate everything anew under `folder`: sample/<split>.jsonl and corpus/talk.jsonl."""
    records = generate()
    split_of = {record["context_id"]: record["split"] for record in records if record["type"] == "question"}
    parts: dict[str, list[Record]] = {f"sample/{name}.jsonl": [] for name, _ in SPLITS}
    for record in records:
        parts[f"sample/{split_of[record.get('context_id', record['id'])]}.jsonl"].append(record)
    parts["corpus/talk.jsonl"] = small_talk()
    for name, rows in parts.items():
        write_rows(Path(folder) / name, rows)
    return [Path(folder) / name for name in parts]


if __name__ == "__main__":
    for path in write(Path(__file__).parent):
        print(path)
