import ast
import csv

import pytest

from remind import read

HEADER = "Utterance,Speaker,Emotion,Scene_ID,Utterance_ID,Season,Episode,Start_Time,End_Time\n"


def test_real_transcripts(remind_data):
    folder = remind_data / "friends" / "emorynlp_csv"
    corpus = read(folder)
    assert sum(len(dialogue.turns) for dialogue in corpus.dialogues) == 7551 + 954 + 984
    assert len(corpus.dialogues) == 77 + 11 + 9
    path = folder / "emorynlp_dev_final.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    turns = [(t.text, t.speaker) for dialogue in read(path, format="friends").dialogues for t in dialogue.turns]
    assert turns == [(r["Utterance"], " & ".join(ast.literal_eval(r["Speaker"]))) for r in rows]


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
        assert [turn.text for turn in dialogue.turns] == [row["Utterance"] for row in own]
        assert [turn.id for turn in dialogue.turns] == [
            f"s{season:02}e{int(r['Episode']):02}:S{r['Scene_ID']}:T{r['Utterance_ID']}" for r in own
        ]


def write(folder, *rows):
    path = folder / "friends.csv"
    path.write_text(HEADER + "".join(rows), encoding="utf-8")
    return path


def line(text="Hi", speaker="['Monica Geller']", scene=1, utterance=1, episode=2):
    return f'"{text}","{speaker}",Neutral,{scene},{utterance},1,{episode},00:00:02.877,00:00:07.548\n'


def test_schema_corners(tmp_path):
    first = line("one\ntwo", "['Monica Geller', 'Ross Geller']")
    corpus = read(write(tmp_path, first, line(utterance=2, speaker="Chandler"), line(scene=3), line(episode=12)))
    assert [dialogue.id for dialogue in corpus.dialogues] == ["s01e02", "s01e12"]
    first = corpus.dialogues[0]
    assert [[t.id for t in s.turns] for s in first.sessions] == [["S1:T1", "S1:T2"], ["S3:T1"]]
    assert [turn.speaker for turn in first.turns] == ["Monica Geller & Ross Geller", "Chandler", "Monica Geller"]
    assert first.turns[0].text == "one\ntwo"
    assert first.turns[0].time == "00:00:02.877"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(speaker="[]", utterance=2), "[line 3]: speaker is missing or blank"),
        (line(utterance=1), "[line 3]: turn id 'S1:T1' occurs twice"),
        (line().strip() + ",1\n", "[line 3]: the row should have 9 columns"),
        ('"no end,\n', "[line 2]: not CSV: unexpected end of data"),
    ],
)
def test_bad_rows_are_named(tmp_path, refused, bad, message):
    assert refused(write(tmp_path, line(), bad)).startswith(message)
    assert refused(write(tmp_path)) == ": holds no dialogues"
