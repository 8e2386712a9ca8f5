"""What the demo prints and leaves behind, held against its files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from remind.core.files import read_json
from remind.states.dataset import read_manifest, read_states
from remind.train_pra.run import read_config


def check_demo(text: str, out: Path) -> None:
    """Its report, plot, exported model, tables and states.

    Args:
        text: what it printed.
    """
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    exported = next(out.glob("run-pra-exported"))
    for word in ("kidding", "before", "PRA without a label", "SFT, 40% of the labels wrong", exported.name):
        assert word in text
    model = Qwen3VLForConditionalGeneration.from_pretrained(exported)
    ids = AutoTokenizer.from_pretrained(exported)("hello", return_tensors="pt")
    assert torch.isfinite(model(**ids).logits).all()
    ladder = read_json(out / "ladder.json")
    assert list(ladder["before"]) == ["single", "multi", "direct", "all"]
    assert (out / "ladder.png").read_bytes().startswith(b"\x89PNG")
    _check_before_and_after(text, out)
    _check_held_out(text, out)
    _check_states(out)


def _rows(text: str, title: str) -> list[list[str]]:
    """The lines of the table under a title, each cut at wide gaps."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[1:]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def _check_before_and_after(text: str, out: Path) -> None:
    """One table: measures by format from x0, of the shipped backbone and of the exported one."""
    sides = [read_json(out / name / "report.json") for name in ("evaluation-before", "evaluation")]
    models = [Path(side["config"]["model"]).name for side in sides]
    assert models == ["nano", "run-pra-exported"]
    assert [side["config"]["level"] for side in sides] == ["x0", "x0"]
    title = "Answers from x0 before and after alignment without a label: percent of 40 test questions"
    rows = _rows(text[text.index(title) :].split("\n\n", 1)[1], "n  first  second  change")
    for name in ("single", "multi", "direct", "all"):
        parts = [side["overall"] if name == "all" else side["by_format"][name] for side in sides]
        cells = [f"{100 * part['accuracy']['value']:.1f}" for part in parts]
        assert [f"{name} accuracy", str(parts[0]["accuracy"]["n"]), *cells] in [row[:4] for row in rows]
    assert (out / "evaluation" / "report.html").is_file()


def _check_held_out(text: str, out: Path) -> None:
    """The losses printed are the first and last of metrics.jsonl, and what PRA minimises falls."""
    head, *rows = _rows(text, "Held-out loss on 20 dev questions")
    assert head == ["loss before", "loss after", "CE(x0) before", "CE(x0) after"]
    for name, row in zip(("pra", "sft"), rows, strict=False):
        lines = map(json.loads, (out / f"run-{name}" / "metrics.jsonl").read_text().splitlines())
        measured = [line for line in lines if line["kind"] == "eval"]
        assert [line["step"] for line in measured] == [0, 16]
        assert row[1:] == [f"{line[name]:.3f}" for name in ("total", "ce0") for line in measured]
        if row[0].startswith("PRA"):
            assert float(row[2]) < float(row[1])
    assert [row[0][:3] for row in rows[:2]] == ["PRA", "SFT"]
    # both are measured on the same questions with the same targets
    assert rows[0][3] == rows[1][3]


def _check_states(out: Path) -> None:
    """What PRA is trained on names no answer and no evidence of training questions; SFT reads labels."""
    unlabelled, labelled = (list(read_states(read_config(out / f"run-{name}").states)) for name in ("pra", "sft"))
    train = [record for record in unlabelled if record.split == "train"]
    assert train
    assert not any(record.answers or record.evidence or record.images for record in train)
    assert all(record.target for record in labelled)
    questions = [json.loads(line) for line in (out / "states.jsonl").read_text().splitlines()]
    assert not any(row.get("answers") or row.get("evidence") for row in questions if row.get("split") == "train")
    # what the simulated LLM wrote is there, and the stand-in has written nothing
    assert all("\nConclusion: " in record.x2.text for record in unlabelled)
    report = read_manifest(out / "states")["llm_report"]
    assert all(stage["failed"] == 0 for stage in report["stages"].values())
