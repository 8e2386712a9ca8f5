"""The workbench of a notebook, a backbone with its SAEs and dialogues; and `feature-pages`, which starts from one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.progress import ProgressBar
from remind.core.run_folder import RunFolder
from remind.data.dialogue import Corpus, Dialogue, Question
from remind.data.readers import read, write_refmem
from remind.data.sample import sample_path
from remind.evaluation.parse import parse_answer
from remind.grounding import Grounder, GroundingConfig, GroundingTrace
from remind.grounding.ground import check_saes, load_saes
from remind.llm.client import Chats
from remind.models import BUILT_IN
from remind.models.backbone import Backbone, load_backbone
from remind.models.encoder import SentenceEncoder
from remind.models.generate import Generation, generate
from remind.models.images import Pictures, level_content, thumbnail
from remind.models.windows import Window, batches, make_windows, prompt_lines, window_size
from remind.perception import Perception, PerceptionConfig, RetrieveConfig
from remind.perception.auxiliary import Failure, OfflineLLM
from remind.states.pyramid import FactualState, ReflectiveState
from remind.states.records import StateRecord, record_of
from remind.train_pra.config import images_in_training
from remind.viewing import explanations as naming
from remind.viewing.config import FeaturePagesConfig
from sae import SAEError, TopKSAE
from sae.dashboard import strongest, write_dashboard
from sae.probe import Encoded, Probe, TopExamples
from sae.probe.pictures import TopPictures

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

    def examples(self, per_feature: int = 10) -> dict[int, TopExamples]:
        """The strongest examples of every feature over all sessions, by layer."""
        return read_examples(self, self.layers, per_feature).texts

    def explanations(self, folder: str | Path) -> dict[int, dict[int, naming.Explanation]]:
        """Names of features that `remind feature-pages` wrote, by layer and feature. Raises as `read_explanations`."""
        return naming.read_explanations(folder, self.coders)

    def in_session(self, turn_id: str, dialogue_id: str | None = None) -> tuple[Encoded, tuple[int, int]]:
        """The session of a turn, or as much around it as the backbone takes, encoded, and the turn's characters in it.

        Raises:
            DataError: no such dialogue or turn.
        """
        dialogue = self.corpus.dialogue(dialogue_id or self.corpus.dialogues[0].id)
        turn = dialogue.turn(turn_id)
        turns = dialogue.session_of[turn_id].turns
        texts = [prompt_lines(turn) for turn in turns]
        place = turns.index(turn)
        first, end, most = 0, len(texts), self.probe.max_length or math.inf
        while end - first > 1 and len(self.backbone.tokenizer("".join(texts[first:end]))["input_ids"]) > most:
            first, end = (first + 1, end) if place - first > end - 1 - place else (first, end - 1)
        start = len("".join(texts[first:place]))
        return self.probe.encode("".join(texts[first:end])), (start, start + len(texts[place].rstrip("\n")))

    def with_image(self, path: str | Path, text: str) -> tuple[Encoded, Tensor]:
        """A message of an image and a text, encoded, and the image's grid of patches, [1, 3].

        Tokens of the chat template do not count.

        Raises:
            ImagePathError: an image that cannot be read. ConfigError: a backbone that takes no images.
        """
        parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": text}]
        pictures = Pictures(self.backbone, None)
        ids = torch.tensor([pictures.ids(self.backbone.tokenizer, parts)])
        inputs: dict[str, Any] = {"input_ids": ids, **pictures.tensors([str(path)])}
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


def ask_about(corpus: Corpus, questions: Mapping[str, Sequence[Any]], out: str | Path) -> Path:
    """Write dialogues with new free-text training questions about the first, as RefMem-Bench JSONL for `build_states`.

    Args:
        corpus: of `remind.read`; its own questions are kept.
        questions: by text, the answer, or None where it is unknown (see `data.unlabelled`); the dimension, one of
            `remind.data.dialogue.DIMENSIONS`, or None; and, where it is known, ids of the turns with the evidence.

    Returns:
        `out`.

    Raises:
        ConfigError: no questions.
    """
    if not questions:
        raise ConfigError("give at least one question")
    about = corpus.dialogues[0].id
    added = []
    for number, (text, (answer, dimension, *known)) in enumerate(questions.items(), start=len(corpus.questions) + 1):
        answers, evidence = () if answer is None else (answer,), tuple(*known)
        given = {"answers": answers, "evidence": evidence, "dimension": dimension}
        added.append(Question(f"own-{number}", about, text, **given, split="train"))
    write_refmem(Corpus(corpus.dialogues, (*corpus.questions, *added)), out)
    return Path(out)


#: Tokens to the left and right of an example's peak, and examples drawn at random of all that a feature fires on.
_CONTEXT, _DRAWN = (16, 16), 5
#: Windows of a forward, and windows of the sample.
_BATCH, _SAMPLE = 8, 64
_SHOWN = 1000
#: Examples shown to the chat model of each feature, and as many held out for scoring.
_NAMED = 10


def write_feature_pages(cfg: FeaturePagesConfig) -> list[Path]:
    """Write the page of each layer's features and, beside it, their names where a chat model is there; prints where.

    Sessions are read as prompts show them. A dry run (llm.dry_run) writes no pages.

    Returns:
        The pages.

    Raises:
        ConfigError: pages exist already.
        ImagePathError: an image that cannot be read.
        DataError, FormatError: dialogues that cannot be read.
        ModelError: a backbone or SAEs that cannot be used, a layer without one, or a chat model that cannot be used.
    """
    chats = Chats(cfg.llm)
    chat = chats.stage("explain")  # an endpoint that cannot be used is reported before any work
    bench = open_workbench(cfg.backbone, cfg.data or None, cfg.sae, device=cfg.device, dtype=cfg.dtype)
    layers = bench.layers if cfg.layers is None else cfg.layers
    RunFolder(cfg.out).check(resume=True)
    pages = {layer: Path(cfg.out) / f"layer_{layer}.html" for layer in layers}
    if existing := [page for page in pages.values() if page.exists() and not cfg.overwrite]:
        raise ConfigError(f"{existing[0]} exists; choose another out or set overwrite")
    images = (image for dialogue in bench.corpus.dialogues for turn in dialogue.turns for image in turn.images)
    captions = {image.path: naming.caption_excerpt(image.caption) for image in images if image.path and image.caption}
    kept = max(cfg.per_feature, 0 if chat is None else 2 * _NAMED)
    try:
        found = read_examples(bench, layers, kept, cfg.image_tokens, cfg.limit, context=_CONTEXT, drawn=_DRAWN)
        for layer, page in pages.items():
            coder, record, pictures = bench.coders[layer], found.texts[layer], found.pictures[layer]
            features, failures = strongest(record, cfg.most, pictures), list[Failure]()
            names: dict[Any, Any] = {}
            if chat is not None:
                alone: dict[int, list[naming.Excerpt]] = {}
                for feature in (one for one in features if not record.examples(one)):
                    paths = [image.source for image in pictures.examples(feature)]
                    alone[feature] = list(dict.fromkeys(captions[path] for path in paths if path in captions))
                background = naming.background_of(found.sample, layer, sum(record.context) + 1)
                at_large = [(captions[path], on) for path, on in found.shown[layer].items() if path in captions]
                named = features[: cfg.named]
                names, failures = naming.explain(chat, record, background, named, _NAMED, (alone, at_large))
            if chats.dry is not None:
                continue
            if chat is not None:
                costs = chats.ledger.summary()["total"]
                summary = naming.write_explanations(cfg.out, layer, coder, names, failures, chat.name, costs)
                for kind, score in summary.items():
                    if kind != "failures" and score is not None:
                        figures = f"{score['value']:.2f} [{score['low']:.2f}, {score['high']:.2f}], n {score['n']}"
                        print(f"layer {layer}: {kind} {figures}")
            if failures:
                print(f"layer {layer}: {len(failures)} requests failed, the last: {failures[-1].message}")
            write_dashboard(
                page,
                coder,
                record,
                features=features,
                per_feature=cfg.per_feature,
                probe=bench.probe,
                names={feature: asdict(name) for feature, name in names.items()},
                pictures=pictures if cfg.image_tokens else None,
                show=lambda path: (thumbnail(path, 160), captions[path].text if path in captions else "no caption"),
                title=f"{cfg.backbone}, layer {layer}",
            )
            print(f"layer {layer}: {page}")
    except SAEError as error:
        raise ModelError(str(error)) from None
    if chats.dry is not None:
        print(chats.dry.report())
        return []
    return list(pages.values())


class Found(NamedTuple):
    """What `read_examples` found.

    Attributes:
        texts, pictures: by layer the strongest examples on text, and on images, whose sources are paths.
        sample: the text of a few windows, drawn at random.
        shown: by layer of at most 1000 images, by path, the features that fire on them.
    """

    texts: dict[int, TopExamples]
    pictures: dict[int, TopPictures]
    sample: list[Encoded]
    shown: dict[int, dict[str, frozenset[int]]]


def read_examples(
    bench: Workbench,
    layers: Sequence[int],
    per_feature: int,
    image_tokens: int = 0,
    limit: int | None = None,
    **kept: Any,
) -> Found:
    """The strongest examples of every feature over all sessions, read in windows as `remind train-sae` reads them.

    Contexts of text leave out special tokens and tokens of images.

    Args:
        image_tokens: of each image that lies on disk, at most; 0: images are not shown.
        limit: sessions that are read, the first ones.
        kept: further settings of `TopExamples`.

    Raises:
        ModelError: a layer without an SAE, or a backbone that takes no images. ImagePathError: an image that cannot be
            read.
    """
    backbone, probe = bench.backbone, bench.probe
    if missing := [layer for layer in layers if layer not in probe.coders]:
        raise ModelError(f"layer {missing[0]} does not exist; there are SAEs of {sorted(probe.coders)}")
    dialogues: list[Dialogue] = []
    for dialogue in bench.corpus.dialogues:
        left = None if limit is None else limit - sum(len(one.sessions) for one in dialogues)
        if dialogue.sessions[:left] and left != 0:
            dialogues.append(replace(dialogue, sessions=dialogue.sessions[:left]))
    label_of_turn = [f"{one.id}/{session.id}" for one in dialogues for session in one.sessions for _ in session.turns]
    windows = make_windows(backbone, dialogues, window_size(backbone, None), "tokenise", image_tokens)
    drawn = set(random.Random(0).sample(range(len(windows)), min(_SAMPLE, len(windows))))
    found = Found({}, {}, [], {layer: {} for layer in layers})
    for layer in layers:
        d_sae = probe.coders[layer].d_sae
        kept |= {"tokenizer": probe.tokenizer, "metadata": {"layer": layer}}
        found.texts[layer] = TopExamples(d_sae, per_feature, **kept)
        found.pictures[layer] = TopPictures(d_sae, per_feature)
    with ProgressBar("examples", len(windows)) as bar:
        for number, (inputs, _) in enumerate(batches(backbone, windows, _BATCH, image_tokens)):
            first = number * _BATCH
            group = windows[first : first + _BATCH]
            encoded = probe.encode_inputs(inputs)
            words = [_chosen(one, (~(one.visual | one.special)).nonzero().flatten()) for one in encoded]
            found.sample.extend(one for place, one in enumerate(words, start=first) if place in drawn)
            images = list(_images(backbone, encoded, group, inputs.get("image_grid_thw")))
            for layer in layers:
                found.texts[layer].add(words, layer, [label_of_turn[window.turns[0]] for window in group])
                for path, one, columns in images:
                    codes, shown = one.layer(layer), found.shown[layer]
                    found.pictures[layer].add(path, codes, columns)
                    if path in shown or len(shown) < _SHOWN:
                        shown[path] = shown.get(path, frozenset()) | set(codes.indices[codes.active()].tolist())
            bar.advance_to(first + len(group))
    return found


def _images(
    backbone: Backbone, encoded: Sequence[Encoded], windows: Sequence[Window], grids: Tensor | None
) -> Iterator[tuple[str, Encoded, int]]:
    """Each image of a batch: its path, its tokens, and how many of them are a row."""
    rest = [] if grids is None else grids.tolist()
    for one, window in zip(encoded, windows, strict=True):
        tokens, start = one.visual.nonzero().flatten(), 0
        for path in window.images:
            _, height, width = rest.pop(0)
            merge = int(backbone.processor.image_processor.merge_size)
            count = height * width // merge**2
            yield path, _chosen(one, tokens[start : start + count]), width // merge
            start += count


def _chosen(encoded: Encoded, numbers: Tensor) -> Encoded:
    """Some of the tokens of a text, by number; their offsets are those in the whole text."""
    return replace(
        encoded,
        ids=encoded.ids[numbers],
        tokens=tuple(encoded.tokens[n] for n in numbers.tolist()),
        offsets=encoded.offsets[numbers],
        codes={layer: codes[numbers] for layer, codes in encoded.codes.items()},
        special=encoded.special[numbers],
        sink=encoded.sink[numbers],
        visual=encoded.visual[numbers],
    )
