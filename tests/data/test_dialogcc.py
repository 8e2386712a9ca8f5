from remind import read


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
