"""Chat JSON Lines: one's own dialogues, a whole one or one turn per line; OpenAI messages too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from remind.data.dialogue import Corpus, Image
from remind.data.readers.builder import CorpusBuilder, Draft, check_complete, complete
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
            lists of turns in a dialogue or two different texts in a turn, a file that changes while it is read.
        ImagePathError: a local image that is missing or leaves the folder of the file.
    """
    out = CorpusBuilder()
    for source in sources:
        # a first pass finds the last line of each dialogue
        last = {line.name: line.number for line in _lines(source)}
        drafts: OrderedDict[str, _Chat] = OrderedDict()
        number = 0
        for line in _lines(source):
            number = line.number
            _add(drafts, source, line)
            for chat in complete(source.place, drafts, last, line.name, number):
                out.add_dialogue(chat.draft)
                yield out.piece()
        check_complete(source.place, last, number)
    out.end(sources)


class _Line(NamedTuple):
    """A line, and the dialogue it is or belongs to; `turns` is None for a single turn."""

    number: int
    place: Place
    record: dict[str, Any]
    turns: object
    name: str


def _lines(source: Source) -> Iterator[_Line]:
    for number, (place, value) in enumerate(source.records, start=1):
        record = place.mapping(value, "a line")
        turns = _one_of(place, record, _TURNS)
        key, default = ("dialogue", source.path.stem) if turns is None else ("id", f"{source.path.stem}-{number:05d}")
        given = record.get(key)
        yield _Line(number, place, record, turns, default if given is None else place.name(given, key))


def _one_of(place: Place, record: dict[str, Any], keys: tuple[str, str]) -> object:
    """The value under either key. Raises DataError if both have one and they differ."""
    given = [record[key] for key in keys if record.get(key) is not None]
    if len(given) > 1 and given[0] != given[1]:
        raise place.error(f"{keys[0]} and {keys[1]} are both given and differ; keep one")
    return given[0] if given else None


def _add(drafts: OrderedDict[str, _Chat], source: Source, line: _Line) -> None:
    chat = drafts.get(line.name)
    if line.turns is None:
        if chat is None:
            chat = drafts[line.name] = _Chat(source.place.at(line.name), line.name)
        if chat.whole:
            raise line.place.error(f"dialogue id {shown(line.name)} occurs twice: this turn follows a whole dialogue")
        chat.add(line.place, line.record)
        return
    if chat is not None:
        raise line.place.error(f"dialogue id {shown(line.name)} occurs twice")
    place = line.place.at(line.name)
    chat = drafts[line.name] = _Chat(place, line.name, whole=True)
    for count, turn in enumerate(place.sequence(line.turns, "messages"), start=1):
        where = place.at(f"turn {count}")
        chat.add(where, where.mapping(turn, "a turn"))


class _Chat:
    """A dialogue to which turns are added one by one; `whole` if one line holds them all."""

    def __init__(self, place: Place, name: str, whole: bool = False) -> None:
        self.draft = Draft(place, name)
        self.whole = whole
        self._sessions: dict[str, int] = {}
        self._session: str | None = None

    def add(self, place: Place, turn: dict[str, Any]) -> None:
        given = turn.get("session")
        session = (self._session or "S1") if given is None else place.name(given, "session")
        time = place.optional_text(turn.get("time"), "time")
        if session != self._session:
            if session in self._sessions:
                raise place.error(f"session {shown(session)} comes back after another; keep its turns together")
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
