"""From dialogues to answers nothing is connected, unpickled or started.

An audit hook of Python sees every connection, every class a pickle names and every process that is started; where the
system lets it, the process has no network besides.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WATCH = """
import json, os, sys

NAMES = {"socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind",
    "urllib.Request", "http.client.connect", "ftplib.connect", "smtplib.connect", "webbrowser.open",
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}
log = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def hook(name, arguments):
    if name in NAMES:
        frame, via = sys._getframe(1), []
        while frame and len(via) < 40:
            via.append(frame.f_globals.get("__name__", "?"))
            frame = frame.f_back
        os.write(log, (json.dumps([name, repr(arguments)[:300], via]) + "\\n").encode())

sys.addaudithook(hook)
import runpy
for words in json.loads(os.environ["WATCH_RUNS"]):
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
# torch's own threads now and then abort a process that tears down as usual
os._exit(0)
"""
#: What may happen, and why: event, a part of its arguments or of the modules that cause it.
ALLOWED = {
    ("subprocess.Popen", "platform"): "the standard library asks `uname -p` for the processor's name",
    ("subprocess.Popen", "ctypes.util"): "the standard library looks for shared libraries with ldconfig or gcc",
    ("subprocess.Popen", "lscpu"): "torch and its helpers count cores",
}


def events(tmp_path: Path, *runs: list[str]) -> list[tuple[str, str, list[str]]]:
    """What the hook saw of these scripts in one process."""
    log = tmp_path / "events.jsonl"
    log.touch()
    own = {"WATCH_LOG": str(log), "WATCH_RUNS": json.dumps(runs), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    # not even the promise to stay offline is given: nothing is to need it
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "REMIND_QUIET")}
    alone = ["unshare", "-rn"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    line, own = [*alone, sys.executable, "-c", WATCH], {**environment, **own}
    process = subprocess.run(line, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr[-3000:]
    return [tuple(json.loads(row)) for row in log.read_text().splitlines()]


def test_the_hook_sees(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import pickle, socket, subprocess, collections\n"
        "pickle.loads(pickle.dumps(collections.OrderedDict()))\n"
        "subprocess.run(['true'])\n"
        "try: socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError: pass\n"
    )
    seen = {name for name, _, _ in events(tmp_path, [str(tmp_path / "bad.py")])}
    assert {"pickle.find_class", "subprocess.Popen", "socket.connect"} <= seen


def test_states_pages_training_export_and_evaluation_stay_on_the_machine(hostile: Path, tmp_path: Path) -> None:
    """The whole way, with an encoder and models that lie on disk."""
    model = str(ROOT / "remind" / "models" / "nano")

    def run(name: str, **options: object) -> list[str]:
        words = [word for key, value in options.items() for word in (f"--{key.replace('__', '.')}", str(value))]
        return [str(ROOT / "scripts" / f"{name}.py"), *words]

    sae = {"trainer__d_sae": 64, "trainer__k": 4, "trainer__steps": 2, "trainer__batch_size": 64, "layers": "[2]"}
    loop = {"trainer__max_steps": 1, "data__eval_limit": 1, "data__max_decoded": 4}
    seen = events(
        tmp_path,
        run("train_sae", out="sae", data=hostile / "data.jsonl", backbone=model, loss_windows=0, held_out=0.5, **sae),
        run("build_states", input=hostile / "data.jsonl", out="states", backbone=model, sae="sae", cache="cache"),
        run("inspect_grounding", states="states", all="true", out="pages"),
        run("train_pra", states="states", out="run", model=model, data__max_length=4000, **loop),
        run("export", run="run", out="model"),
        run("evaluate", states="states", model="model", out="evaluation", max_new_tokens=4, bootstrap=20),
    )
    assert (tmp_path / "evaluation" / "report.html").is_file()
    for event, arguments, modules in seen:
        allowed = any(event == name and (part in arguments or part in modules) for name, part in ALLOWED)
        assert allowed, (event, arguments, modules)


def test_no_tracker_is_on() -> None:
    from remind.train_pra.config import TrainConfig
    from remind.train_pra.run import arguments_of
    from remind.train_sae import TrainSAEConfig

    assert arguments_of(TrainConfig(states="s", out="o")).report_to == []
    assert not TrainSAEConfig(out="o").trackers
