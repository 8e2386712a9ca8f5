from remind import read


def turn(index, **fields):
    words = {"utterance_idx": index, "utterance": f"utterance {index}", "speaker": "AB"[index % 2]}
    return {**words, "rationale": None, "shared_image": [], "description": None, **fields}


def test_published_schema(tmp_path, written):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "dog.jpg").write_bytes(b"x")
    shared = ["https://example.org/2.jpg", {"image_path": "img/dog.jpg", "caption": "a dog"}]
    turns = [
        turn(0, utterance="", shared_image=shared, description="a lake"),
        turn(1, shared_image=None, description="nothing shared"),
        turn(2, shared_image=[{}, {"image_url": "https://example.org/3.jpg"}], description="a red door"),
    ]
    records = [{"dialogue_id": "d:1", "dialogue": turns}, {"dialogue": [turn(0, speaker=0)], "split": "train"}]
    corpus = read(written("train.json", *records))
    assert [dialogue.id for dialogue in corpus.dialogues] == ["d:1", "train-00002"]
    assert [(t.id, t.speaker, len(t.images)) for t in corpus.dialogues[0].turns][1:] == [
        ("S1:T2", "B", 0),
        ("S1:T3", "A", 1),
    ]
    assert [(i.index, i.path, i.caption, i.source) for i in corpus.dialogues[0].images] == [
        (0, None, "a lake", "https://example.org/2.jpg"),
        (1, str((tmp_path / "img" / "dog.jpg").resolve()), "a dog", None),
        (2, None, "a red door", "https://example.org/3.jpg"),
    ]
