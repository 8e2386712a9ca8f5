"""Every shipped configuration is one its script takes."""

from pathlib import Path

import pytest

from experiments.cost import InferenceCostConfig
from experiments.faithfulness import FaithfulnessConfig
from experiments.proof.config import ProofConfig
from experiments.stability import StabilityConfig
from remind.alignment.config import TrainConfig
from remind.core.cli import parse
from remind.demo import DemoConfig
from remind.evaluation.config import EvaluateConfig
from remind.pipeline import BuildStatesConfig
from remind.refmem.config import RefMemConfig
from remind.testbed.write import MakeWorldConfig
from remind.train_sae import TrainSAEConfig
from remind.viewing.inspector import InspectConfig

CONFIGS = Path(__file__).parents[2] / "configs"
KINDS = {
    "build": (BuildStatesConfig, ["--input", "i", "--out", "o"]),
    "demo": (DemoConfig, []),
    "evaluate": (EvaluateConfig, ["--states", "s", "--model", "m", "--out", "o"]),
    "faithfulness": (FaithfulnessConfig, []),
    "inference": (InferenceCostConfig, []),
    "inspect": (InspectConfig, ["--question", "q"]),
    "pra": (TrainConfig, ["--states", "s", "--out", "o"]),
    "proof": (ProofConfig, ["--model", "m", "--out", "o"]),
    "refmem": (RefMemConfig, ["--input", "i", "--out", "o"]),
    "sae": (TrainSAEConfig, ["--out", "o"]),
    "world": (MakeWorldConfig, ["--out", "o"]),
    "stability": (StabilityConfig, ["--model", "m", "--out", "o"]),
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_config_is_taken_by_its_script(path: Path) -> None:
    kind, required = KINDS[path.stem.split("_")[0]]
    assert isinstance(parse(kind, "", ["--config", str(path), *required]), kind)
