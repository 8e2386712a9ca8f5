"""Pre-training: lessons are the prompts a model gets, auxiliary targets are true of them, runs repeat to the bit."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.pretrain import run as pretraining
from experiments.pretrain.heads import AuxiliaryHeads
from experiments.pretrain.lessons import KINDS, Lesson, lessons_of, mixture
from experiments.pretrain.run import PretrainConfig, pretrain
from remind.core.errors import ConfigError
from remind.data.dialogue import FORMATS
from remind.models.backbone import load_backbone
from remind.models.chat import prompt_ids
from remind.models.nano import nano_model, nano_tokenizer
from remind.testbed.lexicon import lexicon

TOKENIZER = nano_tokenizer()


def drawn(kind: str, name: str, count: int = 20) -> list[Lesson]:
    return list(lessons_of(TOKENIZER, kind, name, count, 3))  # type: ignore[arg-type]


def text_of(lesson: Lesson) -> str:
    whole = TOKENIZER.decode(lesson.prompt.tolist())
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert whole.startswith(start)
    assert whole.endswith(end)
    return str(whole[len(start) : -len(end)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_lessons_are_prompts_as_a_model_gets_them(kind: str, name: str) -> None:
    for lesson in drawn(kind, name):
        text = text_of(lesson)
        assert lesson.prompt.tolist() == prompt_ids(TOKENIZER, text)
        assert lesson.format == name
        answer = TOKENIZER.decode(lesson.answer.tolist())
        assert re.fullmatch(r"<answer>.+</answer><explanation></explanation><\|im_end\|>", answer)
        right = re.search(r"<answer>(.*)</answer>", answer)
        assert right is not None
        letters = {letter for letter in right.group(1) if letter in "ABCD"} if name != "direct" else set()
        assert len(lesson.options) == (0 if name == "direct" else 4)
        for letter, (place, ok) in zip("ABCD", lesson.options, strict=False):
            option = TOKENIZER.decode([int(lesson.prompt[place])])
            assert f"{letter}. {option}\n" in text
            assert ok == (letter in letters)


def lines_of(lesson: Lesson) -> list[str]:
    """The lines of the dialogue in which a word of the focus stands."""
    ids, focus = lesson.prompt.tolist(), set(lesson.focus.tolist())
    lines, line, hit = [], "", False
    for place, token in enumerate(ids):
        line, hit = line + TOKENIZER.decode([token]), hit or place in focus
        if line.endswith("\n"):
            if hit:
                lines.append(line)
            line, hit = "", False
    return lines


def test_the_flag_means_nothing_there() -> None:
    """Marked remarks, most of them evidence, begin with the flag word as often as all remarks of the trait."""
    lessons = [lesson for name in FORMATS for lesson in drawn("full", name, 300)]
    shares = []
    for level in (0, 1):
        lines = [line for lesson in lessons if lesson.level == level for line in lines_of(lesson)]
        lines = [line for line in lines if not line.startswith("[Image") and "my dear" not in line]
        shares.append(sum(": kidding, " in line for line in lines) / len(lines))
    assert shares[0] == pytest.approx(shares[1], abs=0.08)
    assert 0.25 < shares[0] < 0.5


def test_focus_is_what_the_answer_rests_on() -> None:
    """Cue words of the asked dimension; under x1 inside the markers; under x2 the word of the summary."""
    bank = lexicon()["dimensions"]
    for lesson in (*drawn("marked", "direct", 60), *drawn("full", "multi", 60)):
        words = [TOKENIZER.decode([token]) for token in lesson.prompt[lesson.focus.long()].tolist()]
        text = text_of(lesson)
        assert words
        if lesson.level == 2:
            assert len(words) == 1
            assert words[0] in text.split("Reflection\n")[1]
            continue
        fits = [
            name
            for name, entry in bank.items()
            if set(words)
            <= {cue for value in entry["values"].values() for cue in value.get("cues", ())}
            | {*entry.get("keen", ()), *entry.get("averse", ())}
        ]
        assert len(fits) == 1, words
        lines = lines_of(lesson)
        blocks = re.findall(r"\[ATTENTION\]\n(.*?)\[ATTENTION\]\n", text, flags=re.DOTALL)
        if lesson.level == 1 and any(line in block for block in blocks for line in lines):
            assert all(any(line in block for block in blocks) for line in lines)


def test_the_focus_term_is_the_attention_of_the_first_head() -> None:
    """Against the model's own eager attention weights."""
    lessons = drawn("apart", "single", 8)[:8]
    model = nano_model(seed=3).double()
    model.set_attn_implementation("eager")
    decoder = model.model.language_model
    heads = AuxiliaryHeads(TOKENIZER, decoder, 128).double()
    width = max(len(x.prompt) + len(x.answer) - 1 for x in lessons)
    ids = torch.full((len(lessons), width), TOKENIZER.pad_token_id)
    for row, x in enumerate(lessons):
        ids[row, : len(x.prompt) + len(x.answer) - 1] = torch.cat([x.prompt, x.answer[:-1]])
    weights: list[torch.Tensor] = []
    attention = decoder.layers[2].self_attn
    attention.register_forward_hook(lambda _, __, output: weights.append(output[1]))
    with torch.no_grad():
        decoder(input_ids=ids, position_ids=torch.arange(width).expand(3, *ids.shape), use_cache=False)
        _, focus, _, _ = heads(lessons)
    expected = []
    for row, x in enumerate(lessons):
        if len(x.focus):
            places = [len(x.prompt), *(place for place, _ in x.options)]
            expected += [-float(weights[0][row, 0, place, x.focus.long()].sum().log()) for place in places]
    assert float(focus) == pytest.approx(sum(expected) / len(expected), abs=1e-6)


def test_lessons_grow_harder() -> None:
    early, middle, late = (mixture(p, 0.15, 0.4, (0.12, 0.35)) for p in (0.0, 0.2, 0.95))
    assert [set(parts) for parts in (early, middle, late)] == [{"direct"}, {"direct", "single"}, set(FORMATS)]
    assert "full" not in early["direct"][1]
    assert all("full" in kinds for _, kinds in late.values())


@pytest.mark.slow
def test_equal_settings_give_equal_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what an untrained model answers is of no interest; tests of the shipped checkpoint measure it on all dialogues
    name, world = next(iter(pretraining.MEASURED.items()))
    monkeypatch.setattr(pretraining, "MEASURED", {name: replace(world, test=1)})
    digests = []
    for number, seed in enumerate((0, 0, 1)):
        sizes = {"steps": 3, "batch": 4, "lessons": 16, "threads": 1, "layers": 2, "hidden_size": 64}
        folder = pretrain(PretrainConfig(out=str(tmp_path / str(number)), seed=seed, **sizes))  # type: ignore[arg-type]
        digests.append(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
        assert load_backbone(folder).kind == "vlm"
        assert (folder / "metrics.jsonl").read_text().count("\n") == 1
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(ConfigError, match="exists"):
        pretrain(PretrainConfig(out=str(tmp_path / "0"), steps=1))
