"""From dialogue files to a folder of states: plan, build what is missing, put it together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from remind.core.errors import ConfigError, DataError, FormatError
from remind.core.files import input_hashes, sha256_json
from remind.core.processes import locked
from remind.core.progress import ProgressBar
from remind.data.readers import mapping_files
from remind.grounding.load import check_saes, folder_of_saes, load_saes
from remind.llm.auxiliary import ChatLLM, open_llm
from remind.models.encoder import SentenceEncoder
from remind.models.load import BackboneSize, load_backbone, model_folder, size_of
from remind.perception import Perception
from remind.pipeline.assemble import Parts, assemble, check_built, manifest_of, summary_of
from remind.pipeline.config import BuildStatesConfig
from remind.pipeline.dialogue import DialogueBuilder
from remind.pipeline.identity import build_identity, picture_hashes
from remind.pipeline.outline import STAGES, Outline, Task, outline, tasks
from remind.pipeline.record import Tally
from remind.pipeline.shards import shard_of
from remind.pipeline.workers import build_all
from remind.states.parquet import read_manifest
from remind.states.pyramid import AttentionalState

#: Share of its context that the dialogue may fill where a backbone reads all of x0 at once. The rest is for
#: instructions, strategy and question, and because the cap is counted in other tokens, those of the sentence encoder.
_DIALOGUE_SHARE = 0.75


def build_states(cfg: BuildStatesConfig) -> Path:
    """Read, build and write; prints what dangles and the evidence recall of x0 by category.

    What a dialogue's states are made from names them in the cache, so that nothing is built twice: a run that was
    killed goes on, and ends with the same bytes; one that has nothing to do says so and changes nothing.

    Returns:
        The states folder; in a dry run the file of the prompts. Where other shards have yet to end, it is not there.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used, or that changes meanwhile.
        ConfigError: the output exists and is of another build, or the corpus has no questions.
        ModelError: backbone and SAEs do not fit, or too much of what the LLM was asked for failed.
        OSError: no room, or no right to write.
    """
    return _Build(cfg).run()


def with_cap(cfg: BuildStatesConfig, size: BackboneSize) -> BuildStatesConfig:
    """The settings with a `max_context_tokens` where there is none and the backbone is to read all of x0 at once.

    Args:
        size: of the backbone.
    """
    retrieve, codes = cfg.perception.retrieve, cfg.grounding.context_codes
    joint = size.causal if codes == "auto" else codes == "joint"
    if retrieve.max_context_tokens is not None or not joint:
        return cfg
    cap = max(1, int(_DIALOGUE_SHARE * size.max_length))
    return replace(cfg, perception=replace(cfg.perception, retrieve=replace(retrieve, max_context_tokens=cap)))


class _Build:
    def __init__(self, cfg: BuildStatesConfig) -> None:
        self.cfg, self.out, self.cache = cfg, Path(cfg.out), Path(cfg.cache).expanduser()
        self.shard = shard_of(cfg.shard)
        if self.shard.count > 1 and cfg.overwrite:
            raise ConfigError("overwrite does not work with shards; remove the folder first")
        self.encoder = SentenceEncoder(device=cfg.device, load=False)
        self.llm = open_llm(cfg.llm, self.encoder)
        self.chat = self.llm if isinstance(self.llm, ChatLLM) else None

    def run(self) -> Path:
        cfg = self.cfg
        if cfg.llm.dry_run is not None:
            return self._dry_run()
        self._check_out()
        corpus: Outline | None = None
        if cfg.sae is None and (cfg.overwrite or not self.out.exists()):
            # an input that is refused is refused before SAEs are trained for it
            corpus = outline(cfg)
        with locked(self.cache / "sae.lock"):
            self.saes = folder_of_saes(cfg.sae, cfg.sae_inputs, cfg.backbone, cfg.cache, cfg.device, cfg.dtype)
        if cfg.backbone != "nano-untrained" and model_folder(cfg.backbone) is None:
            # a model of the hub is known by its files, so they are fetched first
            load_backbone(cfg.backbone, dtype=cfg.dtype)
        size = size_of(cfg.backbone)
        cfg = self.cfg = with_cap(cfg, size)
        self.identity = build_identity(cfg, self.llm.name, self.saes)
        self.parts = Parts(self.cache)
        inputs = self._inputs()
        if cfg.grounding.images == "pixels":
            corpus = corpus or outline(cfg)
        stamp = self._stamp(inputs, corpus)
        if self.out.exists() and not cfg.overwrite:
            check_built(self.out, stamp)
            print(f"states: {self.out} (unchanged: built before from the same input with the same settings)")
            return self.out
        # before hours of work, of which the first dialogue's is minutes already
        check_saes(size, *load_saes(self.saes), cfg.grounding, self.saes)
        corpus = corpus or outline(cfg)
        keys = self._build(corpus)
        if self.shard.count > 1 and (left := sum(self.parts.account(key) is None for key in keys)):
            print(f"shard {self.shard} is done; {left} of {len(keys)} dialogues belong to other shards, not built yet")
            return self.out
        self._assemble(corpus, keys, inputs, stamp)
        return self.out

    def _check_out(self) -> None:
        """Refuse at once what is in the way, before hours of work."""
        # in the innermost folder there is: nothing is made before there is something to put into it
        with TemporaryFile(dir=next(folder for folder in self.out.parents if folder.exists())):
            pass
        if not self.out.exists() or self.cfg.overwrite:
            return
        try:
            built = read_manifest(self.out).get("build")
        except (DataError, FormatError):
            built = None
        if built is None:
            raise ConfigError(f"{self.out} exists; choose another out or set overwrite")

    def _inputs(self) -> dict[str, str]:
        """Hashes of the input files, and of the mapping file they are read by."""
        return input_hashes([*self.cfg.inputs, *mapping_files(self.cfg.format)])

    def _stamp(self, inputs: dict[str, str], corpus: Outline | None) -> str:
        """Hash of all that decides the finished folder.

        Args:
            corpus: needed where grounding shows images as pixels.
        """
        cfg = self.cfg
        rest = [cfg.split, cfg.limit, cfg.ask, cfg.abstention, cfg.format, cfg.sae, cfg.sae_data, cfg.max_failed]
        parts: list[Any] = [inputs, self.identity, [str(value) for value in rest]]
        if cfg.grounding.images == "pixels":
            assert corpus is not None
            parts.append([picture_hashes(cfg.grounding, task.dialogue) for task in tasks(cfg, corpus)])
        return sha256_json(parts)

    def _build(self, corpus: Outline) -> list[str]:
        """Build what is missing of this shard.

        Returns:
            The keys of all dialogues, those of other shards included.
        """
        keys: list[str] = []
        mine = [work for number, work in enumerate(corpus.work) if self.shard.holds(number)]
        finished = 0
        seconds = dict.fromkeys(STAGES, 0.0)
        # for the keys alone; its models are loaded by the first dialogue that it builds, which is never
        namer = DialogueBuilder(self.cfg, self.identity, self.saes, self.cfg.device)

        def missing() -> Iterator[Task]:
            nonlocal finished
            for task in tasks(self.cfg, corpus):
                keys.append(namer.key(task))
                if not self.shard.holds(task.number):
                    continue
                account = self.parts.account(keys[-1])
                if account is None or (account["report"] or {}).get("failures"):
                    yield task
                else:
                    finished += 1
                    bar.skip(task.work)

        def step(units: float, stage: str) -> None:
            bar.step(units, f"{finished} of {len(mine)} dialogues{stage and f', {stage}'}")

        with ProgressBar("states", sum(mine), percent=True) as bar:
            for task in build_all(self.cfg, self.identity, self.saes, missing(), step):
                finished += 1
                account = self._account(keys[task.number])
                for stage, spent in account["seconds"].items():
                    seconds[stage] += spent
                if self.chat is not None:
                    self.chat.merge(account["report"])
                    self.chat.check(self.cfg.max_failed, done=False)
                step(0.0, "")
        if any(seconds.values()):
            print("time by stage: " + ", ".join(f"{stage} {spent:.1f} s" for stage, spent in seconds.items()))
        return keys

    def _assemble(self, corpus: Outline, keys: list[str], inputs: dict[str, str], stamp: str) -> None:
        tally = Tally()
        if self.chat is not None:
            self.chat.take()
        for key in keys:
            account = self._account(key)
            tally.merge(account["tally"])
            if self.chat is not None:
                self.chat.merge(account["report"])
        if self.chat is not None:
            self.chat.check(self.cfg.max_failed)
        if self._inputs() != inputs:
            raise DataError("the input has changed while the states were built; start again", self.cfg.inputs[0])
        manifest = manifest_of(self.cfg, stamp, inputs, corpus, tally, self.chat or self.llm.name, self.saes)
        assemble(self.out, self.parts, keys, manifest, self.cfg.overwrite)
        print(summary_of(tally, corpus, self.cfg.perception.retrieve.max_context_tokens))
        if self.chat is not None:
            print(self.chat.report_text())
        print(f"states: {self.out}")

    def _account(self, key: str) -> dict[str, Any]:
        account = self.parts.account(key)
        if account is None:
            raise DataError("the states of a dialogue were removed from the cache during the build", self.cache)
        return account

    def _dry_run(self) -> Path:
        """Note all that building would ask, summaries without marked blocks; print the costs."""
        if self.chat is None or self.chat.dry is None:
            raise ConfigError("a dry run needs llm.default or another endpoint; the offline fallback sends no requests")
        # the cap decides which segments a summary would be asked about
        cfg = with_cap(self.cfg, size_of(self.cfg.backbone))
        perception = Perception(cfg.perception, self.encoder, self.chat)
        for task in tasks(cfg, outline(cfg)):
            states = perception.perceive_all(task.dialogue, task.questions, task.abstention)
            self.chat.summaries([AttentionalState(state, ()) for state in states])
        print(self.chat.dry.report())
        return self.chat.dry.path
