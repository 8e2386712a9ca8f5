import hashlib

import pytest

from remind import read
from remind.core.errors import DataError


def test_published_schema(tmp_path, written):
    (tmp_path / "dog.jpg").write_bytes(b"x")
    shared = ["https://example.org/2.jpg", {"image_path": "dog.jpg", "caption": "a dog"}]
    turns = [
        {"utterance": "", "speaker": "A", "shared_image": shared, "description": "a lake"},
        {"utterance": "hm", "speaker": "B", "shared_image": None, "description": "nothing shared"},
        {"utterance": "hm", "speaker": "A", "shared_image": [{}, {"image_url": "https://example.org/3.jpg"}]},
    ]
    records = [{"dialogue_id": "d:1", "dialogue": turns}, {"dialogue": [turns[1] | {"speaker": 0}]}]
    corpus = read(written("train.json", *records))
    assert [dialogue.id for dialogue in corpus.dialogues] == ["d:1", "train-00002"]
    assert [(t.id, t.speaker) for t in corpus.dialogues[0].turns] == [("S1:T1", "A"), ("S1:T2", "B"), ("S1:T3", "A")]
    assert [(i.index, i.path, i.caption, i.source) for i in corpus.dialogues[0].images] == [
        (0, None, "a lake", "https://example.org/2.jpg"),
        (1, str((tmp_path / "dog.jpg").resolve()), "a dog", None),
        (2, None, None, "https://example.org/3.jpg"),
    ]


def test_local_files_take_the_place_of_urls(tmp_path, written):
    url = "https://example.org/{}/my%20cat.jpg?size=9"
    turns = [
        {"utterance": "", "speaker": "A", "shared_image": [url.format(n), f"https://h/{n}"], "description": "a cat"}
        for n in range(2)
    ]
    path = written("train.json", {"dialogue_id": "d", "dialogue": turns})
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    # by its whole URL, by the id of its dialogue, by the end of its URL
    names = [f"{hashlib.sha256(url.format(0).encode()).hexdigest()}.png", "more/d-1", "my cat.jpg"]
    for name in names:
        (folder / name).write_bytes(b"x")
    [dialogue] = read(path, images=folder).dialogues
    assert [image.path for image in dialogue.images] == [*(str(folder / name) for name in names), None]
    assert [(image.source, image.caption) for image in dialogue.images] == [
        (image.source, image.caption) for image in read(path).dialogues[0].images
    ]
    (folder / names[0]).unlink()
    with pytest.raises(DataError, match=r"^[^\n]*my cat\.jpg \[d\]: [^\n]*/0/my[^\n]*/1/my[^\n]* end alike[^\n]*$"):
        read(path, images=folder)
    (folder / "my cat.jpg").unlink()
    (folder / "more" / "d-1").rename(folder / "other")
    with pytest.raises(DataError, match=r"^[^\n]*pictures: no file in it is named after an image of [^\n]*$"):
        read(path, images=folder)
    with pytest.raises(DataError, match=r"^[^\n]*nowhere: no such folder of images, or an empty one$"):
        read(path, images=tmp_path / "nowhere")
