"""What a notebook works on: a backbone, dialogues, and SAEs of the backbone; made where they are not given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Corpus, Question
from remind.data.readers import read
from remind.models.windows import prompt_lines

if TYPE_CHECKING:
    from remind.grounding import GroundingTrace
    from remind.models.backbone import Backbone
    from remind.perception import Perception
    from remind.states.parquet import StateRecord
    from remind.states.pyramid import FactualState
    from sae import TopKSAE
    from sae.probe import Encoded, Probe, TopExamples


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
    _grounders: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> list[int]:
        return sorted(self.coders)

    @cached_property
    def probe(self) -> Probe:
        """Encodes texts and images with the backbone and its coders."""
        from sae.probe import Probe

        return Probe(self.backbone.model, self.backbone.tokenizer, self.coders)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every session of every dialogue as prompts show it, under the ids of both."""
        for dialogue in self.corpus.dialogues:
            for session in dialogue.sessions:
                yield f"{dialogue.id}/{session.id}", "".join(map(prompt_lines, session.turns))

    def examples(self, per_feature: int = 10) -> dict[int, TopExamples]:
        """The strongest examples of every feature over all sessions, by layer."""
        from sae.probe import collect

        return collect(self.probe, self.texts(), per_feature=per_feature)

    def in_session(self, turn_id: str, dialogue_id: str | None = None) -> tuple[Encoded, tuple[int, int]]:
        """The session of a turn, encoded, and the characters of the turn in it.

        Raises:
            DataError: no such dialogue or turn.
        """
        dialogue = self.corpus.dialogue(dialogue_id or self.corpus.dialogues[0].id)
        dialogue.turn(turn_id)
        parts = {turn.id: prompt_lines(turn) for turn in dialogue.session_of[turn_id].turns}
        before = "".join(text for _, text in _until(list(parts.items()), turn_id))
        encoded = self.probe.encode("".join(parts.values()))
        return encoded, (len(before), len(before) + len(parts[turn_id].rstrip("\n")))

    def with_image(self, path: str | Path, text: str) -> tuple[Encoded, Tensor]:
        """A message of an image and a text, encoded, and the image's grid of patches, [1, 3].

        Tokens of the chat template do not count.

        Raises:
            ImagePathError: an image that cannot be read. ModelError: a backbone that takes none.
        """
        parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": text}]
        inputs: dict[str, Any] = dict(self.backbone.encode_messages([{"role": "user", "content": parts}]))
        grid = inputs["image_grid_thw"]
        inputs["position_ids"] = self.backbone.position_ids(inputs)
        encoded = self.probe.encode_inputs(inputs)[0]
        # the words of the chat template are nobody's
        start = encoded.text.rindex(text)
        said = encoded.tokens_in(start, start + len(text)) | encoded.visual
        return replace(encoded, special=encoded.special | ~said), grid

    # grounding

    @cached_property
    def perception(self) -> Perception:
        """Retrieval by MiniLM, strategies by the offline stand-in."""
        from remind.llm.offline import OfflineLLM
        from remind.models.encoder import SentenceEncoder
        from remind.perception import Perception, PerceptionConfig, RetrieveConfig

        encoder = SentenceEncoder()
        config = PerceptionConfig(retrieve=RetrieveConfig(top_share=self.top_share))
        return Perception(config, encoder, OfflineLLM(encoder))

    def state(self, question: Question | str, dialogue_id: str | None = None) -> FactualState:
        """x0 of a question: one of the corpus, or one's own words about a dialogue (the first one).

        Raises:
            DataError: no such dialogue, or a question without text.
        """
        if isinstance(question, str):
            about = dialogue_id or self.corpus.dialogues[0].id
            question = Question("own", about, question)
        return self.perception.perceive(self.corpus.dialogue(question.dialogue_id), question)

    def trace(self, state: FactualState, **settings: Any) -> GroundingTrace:
        """Everything on the way from x0 to x1, under the paper's settings but for those given.

        Args:
            settings: fields of `GroundingConfig`, e.g. alpha, beta, agg.

        Raises:
            ConfigError: a setting that is not there, or a value it cannot have.
        """
        from remind.grounding import Grounder, GroundingConfig

        key = repr(sorted(settings.items()))
        if key not in self._grounders:
            try:
                config = GroundingConfig(**settings)
            except TypeError:
                wrong = sorted(set(settings) - set(GroundingConfig.__dataclass_fields__))
                raise ConfigError(f"grounding has no setting {', '.join(wrong)}") from None
            self._grounders[key] = Grounder(self.backbone, self.coders, self.idf, config, self.perception.encoder)
        found: GroundingTrace = self._grounders[key].trace(state)
        return found

    def record(self, trace: GroundingTrace) -> StateRecord:
        """The three states of a traced question, rendered; the offline stand-in writes the summary of x2."""
        from remind.pipeline import record_of
        from remind.states.pyramid import ReflectiveState

        state = ReflectiveState(trace.state, self.perception.llm.summary(trace.state))
        return record_of(state, trace.state.factual.question.split or "test")

    def answer(self, question: Question | str | FactualState, model: Backbone, max_new_tokens: int = 48) -> str:
        """What a model answers from x0, greedily; the text between the answer tags.

        Raises:
            ModelError: a model that does not generate, or a prompt it cannot take.
        """
        from remind.core.errors import ModelError
        from remind.evaluation.parse import parse_answer
        from remind.models.generate import generate
        from remind.states.pyramid import render

        state = self.state(question) if isinstance(question, Question | str) else question
        output = generate(model, [render(state).text], max_new_tokens, 1)[0]
        if output is None or output.failure is not None:
            raise ModelError(f"{model.name} gave no answer: {output.message if output else 'nothing was run'}")
        asked = state.question
        return parse_answer(output.text, asked.format, asked.options, asked.visual).answer


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
    """Open what is given and make what is not.

    Args:
        backbone: nano, minilm, or a Hugging Face folder or id.
        dialogues: files or folders of any format `remind.read` knows; None: a small synthetic world with drawn images.
        sae: folder of `scripts/train_sae.py`; None: small SAEs are trained in seconds and kept under `out`, on talk of
            the same kind for the nano backbone, else on the bundled small talk: a first look and no more.
        out: folder for what is made.
        top_share: share of a dialogue that a question retrieves.
        device, dtype: of the backbone; SAEs stay in float32.

    Raises:
        DataError, FormatError: dialogues that cannot be read, or none.
        ModelError: a backbone or SAEs that cannot be used.
    """
    from remind.grounding.load import load_saes
    from remind.models.load import load_backbone

    name, folder = str(backbone), Path(out)
    corpus = _world(folder / "world", 0) if dialogues is None else _corpus(dialogues)
    trained = Path(sae) if sae is not None else _small_saes(name, folder, device, dtype)
    coders, idf = load_saes(trained, device)
    return Workbench(load_backbone(name, dtype=dtype, device=device), corpus, trained, coders, idf, top_share)


def _corpus(paths: str | Sequence[str]) -> Corpus:
    files = [paths] if isinstance(paths, str | Path) else paths
    found = Corpus.merge([read(path) for path in files], files)
    if not found.dialogues:
        raise DataError(f"no dialogues in {paths}")
    return found


def _world(folder: Path, seed: int, dialogues: int = 3) -> Corpus:
    from remind.testbed.pictures import illustrate
    from remind.testbed.world import WorldConfig, make_world

    world = make_world(WorldConfig(train=0, dev=0, test=dialogues, contrary=(0, 1), second_voice=0.0, seed=seed))
    return read(illustrate(world.corpus, folder))


def _small_saes(backbone: str, out: Path, device: str, dtype: str) -> Path:
    from remind.data.sample import corpus_path
    from remind.sae_training import TrainSAEConfig, quick_sae, train_sae
    from remind.testbed.pictures import illustrate
    from remind.testbed.world import WorldConfig, make_world
    from sae.config import SAETrainConfig

    if backbone != "nano":
        return quick_sae(backbone, [str(corpus_path())], out, device, dtype)
    folder = out / "sae"
    if not folder.exists():
        talk = make_world(WorldConfig(train=6, dev=0, test=0, rule="none", by_template=False, seed=90_000))
        train_sae(
            TrainSAEConfig(
                out=str(folder),
                backbone=backbone,
                layers=[2, 3],
                data=str(illustrate(replace(talk.corpus, questions=()), out / "talk")),
                image_tokens=9,
                held_out=0.2,
                idf_turns=300,
                loss_windows=0,
                checkpoint_every=0,
                trainer=SAETrainConfig(
                    d_sae=512,
                    k=16,
                    steps=150,
                    batch_size=512,
                    lr=1e-3,
                    warmup_steps=10,
                    decay_share=0.5,
                    init_tokens=4096,
                    dead_tokens=20_000,
                    log_every=5,
                ),
                device=device,
                dtype=dtype,
                overwrite=True,
            )
        )
    return folder


def _until(items: Sequence[tuple[str, str]], name: str) -> Sequence[tuple[str, str]]:
    return items[: [key for key, _ in items].index(name)]
