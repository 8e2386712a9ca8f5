import ast
import csv

from remind import read

HEADER = "Utterance,Speaker,Emotion,Scene_ID,Utterance_ID,Season,Episode,Start_Time,End_Time\n"


def test_seasons_are_the_episodes_of_all_files_in_order(remind_data):
    folder = remind_data / "friends" / "emorynlp_csv"
    rows = []
    for path in folder.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    corpus = read(folder, "friends_seasons")
    assert [dialogue.id for dialogue in corpus.dialogues] == ["s01", "s02", "s03", "s04"]
    for season, dialogue in enumerate(corpus.dialogues, start=1):
        # stable: rows of an episode stay in the order of their file
        own = sorted((r for r in rows if int(r["Season"]) == season), key=lambda r: int(r["Episode"]))
        ids = [f"s{season:02}e{int(r['Episode']):02}:S{r['Scene_ID']}:T{r['Utterance_ID']}" for r in own]
        assert [(t.id, t.text, t.speaker) for t in dialogue.turns] == [
            (name, r["Utterance"], " & ".join(ast.literal_eval(r["Speaker"]))) for name, r in zip(ids, own, strict=True)
        ]
    assert len(read(folder).dialogues) == 77 + 11 + 9  # episodes


def test_a_bad_row_is_named(tmp_path, refused):
    path = tmp_path / "friends.csv"
    path.write_text(
        HEADER + 'Hi,Monica,Neutral,1,1,1,2,0,1\n"Hi","[\'a\', [b]]",Neutral,1,2,1,2,0,1\n', encoding="utf-8"
    )
    assert refused(path).startswith("[line 3]: the speaker \"['a', [b]]\" is not a list of names")
