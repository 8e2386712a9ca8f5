"""The workbench of a notebook: a backbone, its SAEs, and dialogues; what is not given is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import Corpus, Question
from remind.data.readers import read, write_refmem
from remind.data.sample import sample_path
from remind.evaluation.parse import parse_answer
from remind.grounding import Grounder, GroundingConfig, GroundingTrace
from remind.grounding.ground import check_saes, load_saes
from remind.llm.auxiliary import OfflineLLM
from remind.models import BUILT_IN
from remind.models.backbone import Backbone, load_backbone
from remind.models.encoder import SentenceEncoder
from remind.models.generate import Generation, check_generates, generate
from remind.models.images import Pictures, chat_inputs, level_content
from remind.models.windows import prompt_lines
from remind.perception import Perception, PerceptionConfig, RetrieveConfig
from remind.states.pyramid import FactualState, ReflectiveState
from remind.states.records import StateRecord, record_of
from remind.train_pra.config import images_in_training
from remind.viewing.explanations import Explanation, read_explanations
from sae import TopKSAE
from sae.probe import Encoded, Probe, TopExamples

#: SAEs of two layers of nano and smollm2, made by notebooks/train_saes.py.
SAES = Path(__file__).parent / "saes"


@dataclass
class Workbench:
    """A backbone with its SAEs, and dialogues with their questions.

    Attributes:
        sae: folder of the SAEs.
        coders, idf: by layer.
        top_share: share of a dialogue that a question retrieves (Section 4.2).
    """

    backbone: Backbone
    corpus: Corpus
    sae: Path
    coders: dict[int, TopKSAE]
    idf: dict[int, Tensor]
    top_share: float = 0.3

    @property
    def layers(self) -> list[int]:
        return sorted(self.coders)

    @cached_property
    def probe(self) -> Probe:
        """Encodes texts and images with the backbone and its SAEs."""
        return Probe(self.backbone.model, self.backbone.tokenizer, self.coders)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every session of every dialogue as prompts show it: (dialogue id/session id, text)."""
        for dialogue in self.corpus.dialogues:
            for session in dialogue.sessions:
                yield f"{dialogue.id}/{session.id}", "".join(map(prompt_lines, session.turns))

    def examples(self, per_feature: int = 10) -> dict[int, TopExamples]:
        """The strongest examples of every feature over all sessions, by layer."""
        from remind.viewing.feature_pages import read_examples

        return read_examples(self, self.layers, per_feature).texts

    def explanations(self, folder: str | Path) -> dict[int, dict[int, Explanation]]:
        """Names of features that `remind feature-pages` wrote, by layer and feature. Raises as `read_explanations`."""
        return read_explanations(folder, self.coders)

    def in_session(self, turn_id: str, dialogue_id: str | None = None) -> tuple[Encoded, tuple[int, int]]:
        """The session of a turn, encoded, and the characters of the turn in it.

        Raises:
            DataError: no such dialogue or turn.
        """
        dialogue = self.corpus.dialogue(dialogue_id or self.corpus.dialogues[0].id)
        turn = dialogue.turn(turn_id)
        turns = dialogue.session_of[turn_id].turns
        texts = [prompt_lines(turn) for turn in turns]
        place = turns.index(turn)
        start = len("".join(texts[:place]))
        return self.probe.encode("".join(texts)), (start, start + len(texts[place].rstrip("\n")))

    def with_image(self, path: str | Path, text: str) -> tuple[Encoded, Tensor]:
        """A message of an image and a text, encoded, and the image's grid of patches, [1, 3].

        Tokens of the chat template do not count.

        Raises:
            ImagePathError: an image that cannot be read. ModelError: a backbone that takes no images.
        """
        parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": text}]
        inputs: dict[str, Any] = dict(chat_inputs(self.backbone, parts))
        grid = inputs["image_grid_thw"]
        inputs["position_ids"] = self.backbone.position_ids(inputs)
        encoded = self.probe.encode_inputs(inputs)[0]
        start = encoded.text.rindex(text)
        content = encoded.tokens_in(start, start + len(text)) | encoded.visual
        return replace(encoded, special=encoded.special | ~content), grid

    @cached_property
    def perception(self) -> Perception:
        """Retrieval with MiniLM, strategies by offline rules."""
        encoder = SentenceEncoder()
        config = PerceptionConfig(retrieve=RetrieveConfig(top_share=self.top_share))
        return Perception(config, encoder, OfflineLLM(encoder))

    def state(self, question: Question | str, dialogue_id: str | None = None) -> FactualState:
        """x0 of a question of the corpus, or of a new one in free text about a dialogue (None: the first).

        Raises:
            DataError: no such dialogue, or a question without text.
        """
        if isinstance(question, str):
            question = Question("own", dialogue_id or self.corpus.dialogues[0].id, question)
        return self.perception.perceive(self.corpus.dialogue(question.dialogue_id), [question])[0]

    def trace(self, state: FactualState, **settings: Any) -> GroundingTrace:
        """All intermediate results of grounding, under the default settings except those given.

        Args:
            settings: fields of `GroundingConfig`, e.g. alpha, beta, agg.

        Raises:
            ConfigError: a value out of range.
        """
        config = GroundingConfig(**settings)
        return Grounder(self.backbone, self.coders, self.idf, config, self.perception.encoder).trace(state)

    def record(self, trace: GroundingTrace) -> StateRecord:
        """The three states of a traced question, rendered; the summary of x2 is written by offline rules."""
        state = ReflectiveState(trace.state, self.perception.llm.summaries([trace.state])[0])
        return record_of(state, trace.state.factual.question.split or "test")

    def answer(self, question: Question | str | FactualState, model: Backbone, max_new_tokens: int = 48) -> str:
        """The greedy answer of a model from x0: the text between the answer tags.

        Raises:
            ModelError: a prompt the model cannot take; and as `reply`.
        """
        state = self.state(question) if isinstance(question, Question | str) else question
        output, asked = reply(model, record_of(state, "test"), "x0", max_new_tokens), state.question
        if output.failure is not None:
            raise ModelError(f"{model.name} gave no answer: {output.message}")
        return parse_answer(output.text, asked.format, asked.options, asked.visual).answer


def reply(
    model: Backbone, record: StateRecord, level: str, max_new_tokens: int, image_root: str | None = None
) -> Generation:
    """What a model writes, greedily, when it reads a state.

    A model that was trained on images as pixels, by its run or export folder, is shown them.

    Raises:
        ModelError: a model that does not generate. DataError, ConfigError: a damaged folder.
        ImagePathError: an image that is to be shown and cannot be.
    """
    check_generates(model)
    images, tokens = images_in_training(None if model.name in BUILT_IN else model.name)
    pictures = Pictures(model, tokens, image_root, "grounding.") if images == "pixels" else None
    prompt = record.level(level).text if pictures is None else level_content(record, level)
    (output,) = generate(model, [prompt], max_new_tokens, 1, pictures=pictures)
    assert output is not None
    return output


def open_workbench(
    backbone: str | Path = "nano",
    dialogues: str | Sequence[str] | None = None,
    sae: str | Path | None = None,
    out: str | Path = "runs/workbench",
    *,
    top_share: float = 0.3,
    device: str = "cpu",
    dtype: str = "float32",
) -> Workbench:
    """Load a backbone, dialogues and SAEs for a notebook; nothing is trained.

    Args:
        backbone: nano, minilm, smollm2, or a Hugging Face folder or id.
        dialogues: files or folders in any format of `remind.read`; None: three dialogues of the bundled sample, for
            the nano backbone a small synthetic world with drawn images, whose words it knows.
        sae: folder of `remind train-sae`; None: small SAEs of two layers that come with the package, for nano and
            smollm2. Enough for a first look only.
        out: folder for what is made.
        top_share: share of a dialogue that a question retrieves.
        device, dtype: of the backbone; SAEs stay in float32.

    Raises:
        ConfigError: no SAEs for another backbone.
        DataError, FormatError: no dialogues, or dialogues that cannot be read.
        ModelError: a backbone or SAEs that cannot be used.
    """
    from remind.testbed.pictures import illustrate
    from remind.testbed.world import WorldConfig, make_world

    folder = SAES / str(backbone) if sae is None else Path(sae)
    if sae is None and not folder.is_dir():
        remedy = f"train some (remind train-sae --backbone {backbone} --out runs/sae) and give the folder as sae"
        raise ConfigError(f"no SAEs of {backbone} are at hand; {remedy}")
    if dialogues is None:
        dialogues = str(sample_path() / "test.jsonl")
        if str(backbone) == "nano":
            world = make_world(WorldConfig(train=0, dev=0, test=3, contrary=(0, 1), second_voice=0.0, seed=0))
            dialogues = str(illustrate(world.corpus, Path(out) / "world"))
    files = [dialogues] if isinstance(dialogues, str | Path) else dialogues
    corpus = Corpus.merge([read(path) for path in files], files)
    if not corpus.dialogues:
        raise DataError(f"no dialogues in {dialogues}")
    coders, idf = load_saes(folder, device)
    model = load_backbone(str(backbone), dtype=dtype, device=device)
    check_saes(model, coders, folder=folder)
    return Workbench(model, corpus, folder, coders, idf, top_share)


def new_folder(path: str | Path) -> Path:
    """Create the folder `path`-1, or with the first free number, so that earlier runs of a notebook are kept."""
    number = 1
    while (folder := Path(f"{path}-{number}")).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def ask_about(
    corpus: Corpus,
    questions: Mapping[str, tuple[str | None, str | None]],
    out: str | Path,
    split: str = "train",
    dialogue_id: str = "",
) -> Path:
    """Write a dialogue with new free-text questions about it, as RefMem-Bench JSONL for `build_states`.

    Args:
        corpus: of `remind.read`; its own questions are kept.
        questions: by text, the answer, or None where it is unknown (see `data.unlabelled`), and the dimension, one of
            `remind.data.dialogue.DIMENSIONS`, or None.
        split: train, dev or test, for all of them.
        dialogue_id: the dialogue they are about; "": the first one.

    Returns:
        `out`.

    Raises:
        ConfigError: no questions. DataError: no such dialogue.
    """
    if not questions:
        raise ConfigError("give at least one question")
    about = corpus.dialogue(dialogue_id or corpus.dialogues[0].id).id
    added = []
    for number, (text, (answer, dimension)) in enumerate(questions.items(), start=len(corpus.questions) + 1):
        answers = () if answer is None else (answer,)
        added.append(Question(f"own-{number}", about, text, answers=answers, dimension=dimension, split=split))
    write_refmem(Corpus(corpus.dialogues, (*corpus.questions, *added)), out)
    return Path(out)
