from remind import read


def turn(index, **fields):
    words = {"utterance_idx": index, "utterance": f"utterance {index}", "speaker": "AB"[index % 2]}
    return {**words, "rationale": None, "shared_image": [], "description": None, **fields}


def test_published_schema(tmp_path, written):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "dog.jpg").write_bytes(b"x")
    shared = [
        {"image_url": "https://example.org/1.jpg", "caption": "a lake"},
        "https://example.org/2.jpg",
        {"image_path": "img/dog.jpg"},
    ]
    turns = [
        turn(0),
        turn(1, utterance="", shared_image=shared, rationale="shows it", description="unused"),
        turn(2, shared_image=[{"url": "https://example.org/3.jpg"}, {}], description="a red door"),
        turn(3, shared_image=None, description="nothing shared"),
        turn(4, shared_image="https://example.org/4.jpg"),
    ]
    records = [{"dialogue_id": "d:1", "dialogue": turns}, {"dialogue": [turn(0, speaker=0)], "split": "train"}]
    path = written("train.json", *records)
    corpus = read(path)
    assert corpus == read(path, format="dialogcc")
    assert [dialogue.id for dialogue in corpus.dialogues] == ["d:1", "train-00002"]
    first = corpus.dialogues[0]
    assert [(t.id, t.speaker, len(t.images)) for t in first.turns][1:3] == [("S1:T2", "B", 3), ("S1:T3", "A", 1)]
    assert [(i.index, i.path, i.caption, i.source) for i in first.images] == [
        (0, None, "a lake", "https://example.org/1.jpg"),
        (1, None, None, "https://example.org/2.jpg"),
        (2, str((tmp_path / "img" / "dog.jpg").resolve()), None, None),
        (3, None, "a red door", "https://example.org/3.jpg"),
        (4, None, None, "https://example.org/4.jpg"),
    ]
    assert corpus.dialogues[1].speakers == ("0",)
    assert read(written("train.jsonl", *records)).dialogues[0].turns == first.turns
