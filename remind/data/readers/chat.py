"""Chat JSON Lines: one's own dialogues, a whole one or one turn per line; OpenAI messages too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from remind.data.dialogue import Corpus, Image
from remind.data.readers.builder import CorpusBuilder, Draft
from remind.data.readers.source import Place, Source, shown

#: Where a turn may name its speaker, most specific first.
_SPEAKER = ("speaker", "name", "role")
_TURNS = ("messages", "turns")
_WORDS = ("text", "content")


def matches(source: Source) -> bool:
    first = source.first
    return any(isinstance(first.get(key), list) for key in _TURNS) or any(key in first for key in _WORDS)


def stream(sources: Sequence[Source]) -> Iterator[Corpus]:
    """A line is a dialogue `{"id"?, "messages" | "turns": […]}` or a turn.

    A turn is `{"speaker" | "name" | "role", "text" | "content", "time"?, "session"?, "dialogue"?, "id"?, "images"?}`;
    `content` may be a list of OpenAI text and image_url parts; an image is a path, a URL or an object
    `{"path" | "url", "caption"?, "source"?}`. Default ids: `<file>-<line>` for a whole dialogue, `<file>` for single
    turns, sessions `S1`, turns `<session>:T<n>`. A session begins at the time of its first turn.

    Raises:
        DataError: a turn without speaker or text, an id twice, a session that comes back after another, two different
            lists of turns in a dialogue or two different texts in a turn.
        ImagePathError: a local image that is missing or leaves the folder of the file.
    """
    out = CorpusBuilder()
    for source in sources:
        whole: set[str] = set()
        # a later turn may belong to any dialogue of single turns: from the first one on all are held till the file ends
        held: dict[str, _Chat] = {}
        for number, (place, value) in enumerate(source.records, start=1):
            record = place.mapping(value, "a line")
            turns = _one_of(place, record, _TURNS)
            stem = source.path.stem
            key, default = ("dialogue", stem) if turns is None else ("id", f"{stem}-{number:05d}")
            name = default if record.get(key) is None else place.name(record[key], key)
            if turns is None:
                if name in whole:
                    what = f"dialogue id {shown(name)} occurs twice: this turn follows a whole dialogue"
                    raise place.error(what)
                held.setdefault(name, _Chat(source.place.at(name), name)).add(place, record)
                continue
            if name in whole or name in held:
                raise place.error(f"dialogue id {shown(name)} occurs twice")
            whole.add(name)
            chat = _Chat(place.at(name), name)
            for count, turn in enumerate(chat.draft.place.sequence(turns, "messages"), start=1):
                where = chat.draft.place.at(f"turn {count}")
                chat.add(where, where.mapping(turn, "a turn"))
            if held:
                held[name] = chat
            else:
                out.add_dialogue(chat.draft)
                yield out.piece()
        for chat in held.values():
            out.add_dialogue(chat.draft)
            yield out.piece()
    out.end(sources)


def _one_of(place: Place, record: dict[str, Any], keys: tuple[str, str]) -> object:
    """The value under either key. Raises DataError if both have one and they differ."""
    given = [record[key] for key in keys if record.get(key) is not None]
    if len(given) > 1 and given[0] != given[1]:
        raise place.error(f"{keys[0]} and {keys[1]} are both given and differ; keep one")
    return given[0] if given else None


class _Chat:
    """A dialogue to which turns are added one by one."""

    def __init__(self, place: Place, name: str) -> None:
        self.draft = Draft(place, name)
        self._sessions: dict[str, int] = {}
        self._session: str | None = None

    def add(self, place: Place, turn: dict[str, Any]) -> None:
        given = turn.get("session")
        session = (self._session or "S1") if given is None else place.name(given, "session")
        time = place.time(turn.get("time"), "time")
        if session != self._session:
            if session in self._sessions:
                raise place.error(f"session {shown(session)} appears again after another; keep its turns together")
            self.draft.session(session, time)
            self._session, self._sessions[session] = session, 0
        self._sessions[session] += 1
        given = turn.get("id")
        turn_id = f"{session}:T{self._sessions[session]}" if given is None else place.name(given, "id")
        speaker = next((turn[key] for key in _SPEAKER if turn.get(key) is not None), None)
        text, images = self._content(place, _one_of(place, turn, _WORDS))
        images += [self._image(place, entry) for entry in place.sequence(turn.get("images") or [], "images")]
        self.draft.turn(place, turn_id, speaker, text, time, images)

    def _content(self, place: Place, content: object) -> tuple[object, list[Image]]:
        if not isinstance(content, list):
            return content, []
        texts: list[str] = []
        images: list[Image] = []
        for value in content:
            part = place.mapping(value, "a content part")
            kind = part.get("type")
            if kind == "text":
                texts.append(place.text(part.get("text"), "a text part"))
            elif kind == "image_url":
                images.append(self._image(place, part))
            else:
                raise place.error(f"content part of type {shown(kind)}; known: text, image_url")
        return "\n".join(texts), images

    def _image(self, place: Place, entry: object) -> Image:
        if isinstance(entry, str):
            return self.draft.image(place, place.name(entry, "an image path"))
        fields = place.mapping(entry, "an image")
        reference = next((fields[key] for key in ("path", "url", "image_url") if fields.get(key)), None)
        if isinstance(reference, dict):
            reference = reference.get("url")
        caption = place.optional_text(fields.get("caption"), "caption")
        origin = place.optional_text(fields.get("source"), "source")
        if reference is None and caption is None and origin is None:
            raise place.error("an image without path, url, source or caption")
        return self.draft.image(place, place.optional_text(reference, "the image"), caption, origin)
