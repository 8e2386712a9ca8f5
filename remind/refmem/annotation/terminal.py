"""The command line twin of the page: the same items in the same order, the same rows, one item after the other."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remind.data.dialogue import Corpus, Dialogue
from remind.refmem.annotation.context import Segments, demands, windows
from remind.refmem.annotation.rows import Row, read_annotations, write_annotations
from remind.refmem.annotation.shown import candidates_for, fingerprint, order_for
from remind.refmem.items import Item
from remind.states.pyramid import LETTERS

HELP = """At any prompt: :s skip this item   :b back to the one before   :r flag for removal   :w whole dialogue
:c the turns around the evidence again   :f WORDS find in the dialogue   :q stop; what is answered is saved   :? this"""
_ANSWER = {
    "single": "answer (a letter)",
    "multi": "answers (letters)",
    "direct": "answers (letters of candidates, or =your own; several apart by ;)",
}


class _Leave(Exception):
    """To another item: by -1 or 1; 0: stop."""

    def __init__(self, by: int) -> None:
        self.by = by


class _Flagged(Exception):
    """The item is to be removed."""


def plain(text: str) -> str:
    """One line for a terminal: control and direction-changing characters become ␦, so text cannot act or deceive."""
    text = " ".join(text.split())
    return "".join(
        "␦" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\u200c\u200d" else c for c in text
    )


def annotate(
    items: Sequence[Item],
    corpus: Corpus,
    annotator: str,
    path: str | Path,
    *,
    seed: int = 0,
    around: int = 4,
    segments: Mapping[str, Segments] | None = None,
    ask: Callable[[str], str] = input,
    show: Callable[[str], object] = print,
) -> list[Row]:
    """Ask for every item that `path` has no row for; the file is whole after each. Ends at :q or the end of input.

    Args:
        path: annotation file, made if missing; rows of an earlier sitting are kept and can be gone back to.
        seed, around, segments: as in `write_annotation_page`.

    Returns:
        All rows, in the annotator's order.

    Raises:
        DataError: a file of another build or annotator, an item whose dialogue or evidence is missing.
    """
    path = Path(path)
    kept = {row.item_id: row for row in read_annotations(path, items, annotator)} if path.exists() else {}
    ordered = order_for(items, annotator, seed)
    rows = lambda: [kept[item.id] for item in ordered if item.id in kept]  # noqa: E731
    show(f"{len(ordered)} items, {len(kept)} of them answered. {HELP}")
    at = next((n for n, item in enumerate(ordered) if item.id not in kept), len(ordered))
    while 0 <= at < len(ordered):
        item = ordered[at]
        dialogue = corpus.dialogue(item.dialogue_id)
        near = windows(dialogue, item, around, (segments or {}).get(dialogue.id))
        sitting = _Sitting(item, dialogue, near, candidates_for(item, annotator, seed), ask, show)
        show(f"\n[{at + 1}/{len(ordered)}, {len(kept)} answered] {item.dimension.replace('_', ' ')}, {item.format}")
        try:
            row = sitting.row(annotator, kept.get(item.id))
        except (EOFError, KeyboardInterrupt):
            break
        except _Leave as leave:
            if not leave.by:
                break
            at = max(0, at + leave.by)
            continue
        kept[item.id] = row
        write_annotations(rows(), path)
        at += 1
        while at < len(ordered) and ordered[at].id in kept:
            at += 1
    show(f"{len(kept)} of {len(ordered)} items answered.")
    return rows()


@dataclass
class _Sitting:
    """One item in front of one annotator."""

    item: Item
    dialogue: Dialogue
    near: Sequence[tuple[int, int]]
    candidates: list[str]
    ask: Callable[[str], str]
    show: Callable[[str], object]
    started: float = field(default_factory=time.monotonic)
    flagged: bool = False

    def row(self, annotator: str, before: Row | None) -> Row:
        self.context(self.near)
        self.show(f"\n{plain(self.item.question)}")
        if hint := demands().get(self.item.dimension):
            self.show(f"(It should ask for {hint}.)")
        for letter, text in zip(LETTERS, self.choices, strict=False):
            self.show(f"  {letter}. {plain(text)}")
        if before:
            self.show(f"Your answer so far: {plain(', '.join(before.answers)) or 'none'}{', removed' * before.remove}")
        answers: tuple[str, ...] = ()
        evidence: tuple[str, ...] = ()
        images: tuple[int, ...] = ()
        confidence, remove = None, False
        try:
            answers = self._until(_ANSWER[self.item.format], self.answers)
            evidence, images = self._until(
                "evidence (Enter: as proposed, marked *; +ID, -ID change it; none)", self.marks
            )
            confidence = self._until("confidence (1 guess … 5 certain)", self.confidence)
        except _Flagged:
            remove = True
        try:
            note = self._until("why remove it" if remove else "note (Enter: none)", str)
        except _Flagged:
            remove, note = True, self._until("why remove it", str)
        seconds = round(time.monotonic() - self.started + (before.seconds if before else 0.0), 1)
        return Row(
            self.item.id,
            annotator,
            answers,
            evidence,
            images,
            confidence,
            remove,
            note,
            seconds,
            fingerprint(self.item),
        )

    @property
    def choices(self) -> Sequence[str]:
        return self.item.options or self.candidates

    def _until(self, prompt: str, read: Callable[[str], object]):  # type: ignore[no-untyped-def]  # what `read` gives
        """Ask until the line is one `read` can use; it raises ValueError, with the reason, for others."""
        while True:
            line = self.ask(f"{prompt}> ").strip()
            if line.startswith(":"):
                self.command(line[1:])
                continue
            try:
                return read(line)
            except ValueError as error:
                self.show(f"  {error}")

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name in ("s", "b", "q"):
            raise _Leave({"s": 1, "b": -1, "q": 0}[name])
        if name == "r" and not self.flagged:
            self.flagged = True
            raise _Flagged
        if name == "w":
            self.context([(0, len(self.dialogue.turns) - 1)])
        elif name == "c":
            self.context(self.near)
        elif name == "f" and rest.strip():
            wanted = rest.strip().casefold()
            found = [n for n, turn in enumerate(self.dialogue.turns) if wanted in self._line(n).casefold()]
            self.show(f"  {len(found)} turns")
            self.context([(n, n) for n in found])
        else:
            self.show(HELP)

    def context(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Show turns; what lies between the ranges is told by its length."""
        session, after = None, 0
        for first, last in ranges:
            if first > after:
                self.show(f"  … {first - after} turns …")
            for n in range(first, last + 1):
                now = self.dialogue.session_of[self.dialogue.turns[n].id]
                if now is not session:
                    session = now
                    self.show(f"-- session {plain(now.id)}{f', {plain(now.time)}' if now.time else ''}")
                self.show(self._line(n))
            after = last + 1
        if after < len(self.dialogue.turns):
            self.show(f"  … {len(self.dialogue.turns) - after} turns …")

    def _line(self, n: int) -> str:
        turn = self.dialogue.turns[n]
        mark = "*" if turn.id in self.item.evidence else " "
        lines = [f"{mark} {plain(turn.id)} {plain(turn.speaker)}: {plain(turn.text)}"]
        for image in turn.images:
            mark = "*" if image.index in self.item.images else " "
            lines.append(f"{mark}   image {image.index}: {plain(image.caption or image.path or 'no caption')}")
        return "\n".join(lines)

    def answers(self, line: str) -> tuple[str, ...]:
        direct = self.item.format == "direct"
        if not line:
            raise ValueError("an answer is needed; :s skips the item, :r flags it for removal")
        found: list[str] = []
        for part in (piece.strip() for piece in line.split(";") if piece.strip()):
            if direct and part.startswith("="):
                if not part[1:].strip():
                    raise ValueError("words are missing after =")
                found.append(part[1:].strip())
                continue
            names = [one for one in re.split(r"[,\s]+", part.upper()) if one]
            if len(names) == 1 and len(names[0]) > 1 and not direct:
                names = list(names[0])
            known = LETTERS[: len(self.choices)]
            wrong = [one for one in names if len(one) != 1 or one not in known]
            if wrong:
                own = "; write =words for an answer of your own" if direct else ""
                raise ValueError(f"{plain(wrong[0])!r} is none of {', '.join(known) or 'the candidates'}{own}")
            found += [self.candidates[known.index(one)] if direct else one for one in names]
        found = list(dict.fromkeys(found))
        if self.item.format == "single" and len(found) != 1:
            raise ValueError("choose one option")
        if not found:
            raise ValueError("an answer is needed")
        return tuple(found if direct else sorted(found))

    def marks(self, line: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Proposed evidence with changes: turn ids, or imageN for a picture; plain ids replace the proposal."""
        if line.casefold() == "none":
            return (), ()
        parts = [part for part in re.split(r"[,\s]+", line) if part]
        turns, images = set(self.item.evidence), set(self.item.images)
        if parts and all(part in self.dialogue.positions or part[0] not in "+-" for part in parts):
            turns, images = set(), set()
        shown = {image.index for image in self.dialogue.images}
        for part in parts:
            known = part in self.dialogue.positions
            sign, name = (part[0], part[1:]) if part[0] in "+-" and not known else ("+", part)
            picture = re.fullmatch(r"(?:image|#)(\d{1,9})", name, re.IGNORECASE)
            if name in self.dialogue.positions:
                (turns.add if sign == "+" else turns.discard)(name)
            elif picture and int(picture[1]) in shown:
                (images.add if sign == "+" else images.discard)(int(picture[1]))
            else:
                raise ValueError(f"{plain(name)!r} is no turn of this dialogue, and no image (image0, image1, …)")
        return tuple(sorted(turns, key=self.dialogue.positions.__getitem__)), tuple(sorted(images))

    @staticmethod
    def confidence(line: str) -> int:
        if line not in ("1", "2", "3", "4", "5"):
            raise ValueError("a whole number from 1 to 5")
        return int(line)
