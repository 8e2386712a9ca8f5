import json

import pytest

from remind import read
from remind.core.errors import DataError, ImagePathError


def turn(index, **fields):
    return {
        "utterance_idx": index,
        "utterance": f"utterance {index}",
        "speaker": "A" if index % 2 == 0 else "B",
        "rationale": None,
        "shared_image": [],
        "description": None,
        **fields,
    }


def write(folder, *records, name="train.json"):
    path = folder / name
    path.write_text(json.dumps(list(records)), encoding="utf-8")
    return path


def test_published_schema(tmp_path):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "dog.jpg").write_bytes(b"x")
    shared = [
        {"image_url": "https://example.org/1.jpg", "caption": "a lake"},
        "https://example.org/2.jpg",
        {"image_path": "img/dog.jpg"},
    ]
    path = write(
        tmp_path,
        {
            "dialogue_id": "d:1",
            "dialogue": [
                turn(0),
                turn(1, utterance="", shared_image=shared, rationale="shows it", description="unused"),
                turn(2, shared_image=[{"url": "https://example.org/3.jpg"}, {}], description="a red door"),
                turn(3, shared_image=None, description="nothing shared"),
                turn(4, shared_image="https://example.org/4.jpg"),
            ],
            "split": "train",
        },
        {"dialogue": [turn(0, speaker=0)], "split": "train"},
    )
    corpus = read(path)
    assert corpus == read(path, format="dialogcc")
    assert [dialogue.id for dialogue in corpus.dialogues] == ["d:1", "train-00002"]
    first = corpus.dialogues[0]
    assert [(t.id, t.speaker, len(t.images)) for t in first.turns] == [
        ("S1:T1", "A", 0),
        ("S1:T2", "B", 3),
        ("S1:T3", "A", 1),
        ("S1:T4", "B", 0),
        ("S1:T5", "A", 1),
    ]
    assert [(i.index, i.path, i.caption, i.source) for i in first.images] == [
        (0, None, "a lake", "https://example.org/1.jpg"),
        (1, None, None, "https://example.org/2.jpg"),
        (2, str((tmp_path / "img" / "dog.jpg").resolve()), None, None),
        (3, None, "a red door", "https://example.org/3.jpg"),
        (4, None, None, "https://example.org/4.jpg"),
    ]
    assert corpus.dialogues[1].speakers == ("0",)


def test_json_lines_too(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"dialogue_id": n, "dialogue": [turn(0)]}) for n in range(2)]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [dialogue.id for dialogue in read(path).dialogues] == ["0", "1"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shared_image": ["../x.jpg"]}, ImagePathError, "leaves the data folder"),
        ({"shared_image": ["none.jpg"]}, ImagePathError, "no such file"),
        ({"shared_image": [3]}, DataError, "a shared image should be an object, not a number"),
        ({"utterance": ""}, DataError, "text is missing or blank"),
        ({"speaker": None}, DataError, "speaker is missing or blank"),
    ],
)
def test_bad_records_are_named(tmp_path, changes, error, message):
    path = write(tmp_path, {"dialogue_id": "d", "dialogue": [turn(0), turn(1, **changes)]})
    with pytest.raises(error, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} [item 1, d, S1:T2]: ")


def test_a_dialogue_id_twice(tmp_path):
    record = {"dialogue_id": "d", "dialogue": [turn(0)]}
    with pytest.raises(
        DataError, match=r"\[item 2, d\]: dialogue id 'd' occurs twice, first in train.json \[item 1, d\]"
    ):
        read(write(tmp_path, record, record))


def test_an_empty_dialogue(tmp_path):
    with pytest.raises(DataError, match=r"\[item 2, d\]: the dialogue has no turns"):
        read(write(tmp_path, {"dialogue_id": "c", "dialogue": [turn(0)]}, {"dialogue_id": "d", "dialogue": []}))
    with pytest.raises(DataError, match=r"\[item 1, train-00001\]: the dialogue has no turns"):
        read(write(tmp_path, {"dialogue": []}))
