"""DialSim's own pickles, such as `friends_dialsim.pickle`: scripts of TV shows with questions (Kim et al., 2024)."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import FormatError, brief
from remind.data.readers import refmem
from remind.data.readers.builder import Draft, Place, iso_time, time_form

#: "September 22, 1994".
_DATE = time_form("{month} {day}, {year}")


class _Plain(pickle.Unpickler):
    """Reads texts, numbers, lists and dictionaries; a pickle that names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per file, its id the file's name without suffix: a session per scene, `e001:S1`, in the order of the
    file, at the scene's date; turns `e001:S1:T1`.

    Questions (`hard_q`, `easy_q`) have the ids `<scene>-<category>-<number>`, the date of their scene, and the words
    that fit any asker. Left out are those whose answer is none of their options, as DialSim leaves them out, and those
    whose gold only holds while later scenes are unknown, since the dialogue has them all: `before_event_unans`, and
    categories with `fu`.

    Raises:
        DataError: a scene or question that lacks what it needs. FormatError: no pickle of plain values.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                show = _Plain(file).load()
        except Exception as error:  # whatever bytes that are no pickle lead to
            raise FormatError(f"no pickle of plain values: {brief(error)}", path) from None
        place = Place(path)
        draft = Draft(place.at(path.stem), path.stem)
        for number, scenes in enumerate(place.mapping(show, "a show").values(), start=1):
            for key, value in place.mapping(scenes, "an episode").items():
                where = place.at(f"e{number:03d}:S{key}")
                _add(draft, where, f"e{number:03d}:S{key}", where.mapping(value, "a scene"))
        yield draft


def _add(draft: Draft, place: Place, name: str, scene: dict[str, Any]) -> None:
    date = place.name(scene.get("date"), "date")
    draft.session(name, iso_time(date, _DATE))
    said: list[list[str]] = []
    for line in filter(str.strip, place.text(scene.get("script"), "script").splitlines()):
        speaker, colon, words = line.partition(":")
        if colon and speaker.strip() and "Teleplay: " not in line and "Story: " not in line:
            said.append([speaker.strip(), words.strip()])
        elif said:  # a line without a speaker goes on with the one before
            said[-1][1] += f"\n{line.strip()}"
    for number, (speaker, words) in enumerate(said, start=1):
        draft.turn(place, f"{name}:T{number}", speaker, words)
    hard, easy = (place.mapping(scene.get(kind) or {}, kind) for kind in ("hard_q", "easy_q"))
    for category, asked in {**hard, **easy}.items():
        if "fu" in category or category == "before_event_unans":
            continue
        for key, value in asked.items() if isinstance(asked, dict) else enumerate(place.sequence(asked, category)):
            here = place.at(f"{category}-{key}")
            question = here.mapping(value, "a question")
            forms = here.mapping(question.get("questions"), "questions")
            given = here.sequence(question.get("options"), "options")
            options = list(dict.fromkeys(here.text(option, "an option") for option in given))
            lowered = [option.lower() for option in options]
            answer = here.text(question.get("answer"), "answer").lower()
            row: dict[str, Any] = {"id": f"{name}-{category}-{key}", "format": "single", "options": options}
            row |= {"question": forms.get("default") or next(iter(forms.values()), None), "time": iso_time(date, _DATE)}
            if answer in lowered[:26]:
                row |= {"category": category, "answers": [chr(ord("A") + lowered.index(answer))]}
                refmem.add_question(draft, here, row)
