"""Train the small SAEs that `open_workbench` opens, in 16 bits: python notebooks/train_saes.py [nano] [smollm2].

Two layers of each backbone: nano on a synthetic world with drawn images, SmolLM2-135M on the bundled small talk.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from remind.data.sample import corpus_path
from remind.testbed.pictures import illustrate
from remind.testbed.world import WorldConfig, make_world
from remind.train_sae import TrainSAEConfig, train_sae
from remind.viewing.workbench import SAES
from sae.config import SAETrainConfig


def train(backbone: str, scratch: Path) -> Path:
    trainer = SAETrainConfig(d_sae=1024, k=32, steps=300, batch_size=512, lr=1e-3, warmup_steps=20, decay_share=0.5)
    config = TrainSAEConfig(str(scratch / "sae"), backbone=backbone, idf_turns=300, loss_windows=0, checkpoint_every=0)
    if backbone != "nano":
        trainer = replace(trainer, init_tokens=8192, dead_tokens=30_000, log_every=10)
        config = replace(config, data=str(corpus_path()), layers=["middle", "late"], limit=2000, window=256)
        return train_sae(replace(config, trainer=trainer))
    world = make_world(WorldConfig(train=6, dev=0, test=0, rule="none", by_template=False, seed=90_000))
    talk = illustrate(world.corpus, scratch / "talk")
    trainer = replace(trainer, d_sae=192, k=16, steps=150, warmup_steps=10, init_tokens=4096)
    trainer = replace(trainer, dead_tokens=20_000, log_every=5)
    return train_sae(replace(config, data=str(talk), layers=[2, 3], image_tokens=9, held_out=0.2, trainer=trainer))


def keep(trained: Path, folder: Path) -> None:
    """Copy SAEs with what plots of their training read; parameters are rounded, and load in single precision."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained, folder)
    for path in folder.glob("layer_*/training.json"):
        path.write_text(path.read_text().replace(f"{trained.parent}/", "").replace(f"{SAES.parents[2]}/", ""))
    for path in folder.glob("layer_*/sae_weights.safetensors"):
        save_file({name: tensor.half().contiguous() for name, tensor in load_file(path).items()}, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("nano", "smollm2"):
        with TemporaryDirectory() as temporary:
            keep(train(name, Path(temporary)), SAES / name)
