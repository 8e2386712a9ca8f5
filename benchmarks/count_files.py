"""How many files and functions of ours something enters: what one has to read to know what it does.

    python -m benchmarks.count_files pra-step
    python -m benchmarks.count_files question --input locomo10.json --sae runs/sae_minilm
    python -m benchmarks.count_files memory --system mem0

Counted are functions of `remind` and `sae` that run on the thread of the caller. What only stands in the way of others
(class bodies, modules on their first import, finders that Python's import asks, methods that dataclasses generate) is
not; lambdas and generator expressions belong to the function that they are written in, and templates are text.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import remind
import sae
from remind.data.sample import sample_path


class Entered:
    """What is entered between `start` and `stop`, or inside `with`; several stretches add up.

    Attributes:
        functions: names by file, relative to the folder that holds `remind` or `sae`.
    """

    _ROOTS = tuple(Path(str(package.__file__)).parent for package in (remind, sae))

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = {}
        self._seen: set[CodeType] = set()

    def start(self) -> None:
        sys.setprofile(self._saw)

    def stop(self) -> None:
        sys.setprofile(None)

    def __enter__(self) -> Entered:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _saw(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        if frame.f_back is not None and frame.f_back.f_code.co_filename.startswith("<frozen importlib"):
            return
        self._seen.add(code)
        root = next((root for root in self._ROOTS if root in Path(code.co_filename).parents), None)
        name = code.co_qualname.split(".<locals>.<")[0]
        function = code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.endswith(".py")
        if root is not None and function and not name.startswith("<"):
            self.functions.setdefault(str(Path(code.co_filename).relative_to(root.parent)), set()).add(name)

    def __str__(self) -> str:
        return f"{len(self.functions)} files, {sum(map(len, self.functions.values()))} functions"


def pra_step(entered: Entered, _: object = None) -> None:
    """One optimiser step of alignment, the third: all from the end of the second to its own end."""
    from transformers import TrainerCallback

    from remind.alignment.arguments import PRAConfig
    from remind.alignment.trainer import PRATrainer

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            (entered.start if state.global_step == 2 else entered.stop)()

    said = [f"Ana: I sold {n} lamps." for n in range(6)]
    rows = [{"x0": x0, "x1": f"* {x0}", "x2": f"* {x0}\nLamps.", "target": x0[12:13]} for x0 in said]
    with TemporaryDirectory() as folder:
        args = PRAConfig(f"{folder}/run", max_steps=3, batch_size=2, save_strategy="no", report_to="none")
        PRATrainer("nano", args, train_dataset=rows, callbacks=[Watch()]).train()


def question(entered: Entered, given: argparse.Namespace) -> None:
    """A cold build of the three states of one question, from reading the file to the finished folder."""
    from remind.build import BuildStatesConfig, build

    with TemporaryDirectory() as folder:
        path = Path(given.input)
        if path.suffix == ".json":
            # the file's own format, cut to its first dialogue
            (path := Path(folder) / path.name).write_text(json.dumps(json.loads(Path(given.input).read_text())[:1]))
        cfg = BuildStatesConfig(str(path), f"{folder}/states", sae=given.sae, limit=1, cache=f"{folder}/cache")
        with entered:
            build(cfg)


def memory(entered: Entered, given: argparse.Namespace) -> None:
    """A session that a memory system takes in, and a question that it finds memories for. A model is scripted."""
    from remind import read
    from remind.llm.request import Reply
    from remind.memory.base import Query, Services
    from remind.memory.systems import make_system
    from remind.models.encoder import SentenceEncoder

    class Scripted:
        name = "scripted"

        def complete(self, requests: Sequence[Any], on_reply: object = None) -> list[Reply]:
            said = {"facts": ["Ana sold a lamp."], "memory": [{"id": "0", "event": "ADD", "text": "Ana sold a lamp."}]}
            return [Reply(json.dumps(said), said) for _ in requests]

    system, dialogue = make_system(given.system), read(sample_path()).dialogues[0]
    services = Services(SentenceEncoder(), lambda *_: Scripted())
    with TemporaryDirectory() as folder, system.open(f"{folder}/bank", dialogue.id, services) as bank, entered:
        bank.ingest(dialogue.sessions[0])
        bank.finish()
        bank.retrieve(Query("Who sold a lamp?"), k=3)


#: What can be counted: each prepares, and is inside `entered` for the part that counts.
THINGS: dict[str, Callable[[Entered, argparse.Namespace], None]] = {
    "pra-step": pra_step,
    "question": question,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("things", nargs="+", choices=THINGS, help="what to count")
    parser.add_argument(
        "--input",
        default=str(sample_path() / "test.jsonl"),
        help="for question: a list of dialogues as JSON, of which the first is built, or one in another format",
    )
    parser.add_argument("--sae", help="trained SAEs, for question")
    parser.add_argument("--system", default="dense", help="for memory: its name")
    given = parser.parse_args()
    for thing in given.things:
        entered = Entered()
        THINGS[thing](entered, given)
        print(f"{thing}: {entered}")
        for file, names in sorted(entered.functions.items()):
            print(f"  {file}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
