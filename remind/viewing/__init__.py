"""What notebooks show: a workbench of model, dialogues and SAEs, shaded text, plots, and what training changed.

And what else they start from: models, the synthetic world, training. Self-contained pages of grounding are made by
`remind.viewing.inspector`. Names are imported on first use, so that importing this loads neither torch nor matplotlib.
"""

from remind.core import lazy_names

_PLACES = {
    "viewing.workbench": "Workbench ask_about new_folder open_workbench",
    "viewing.pages": "Page best_features example_words feature_heat image_tokens search_table show_dialogue "
    "show_examples show_generated show_levels turn_features",
    "viewing.plots": "answer_probabilities plot_answers plot_carried plot_next plot_salience plot_settings "
    "plot_trajectory",
    "viewing.diff": "figures_of measure plot questions_of",
    "viewing.patching": "answer_score patches rankings whole",
    "models.backbone": "load_backbone",
    "models.images": "open_image",
    "alignment.config": "LoraConfig Objective",
    "train_pra.config": "DataConfig ExportConfig TrainConfig TrainerConfig",
    "train_pra.export": "export",
    "train_pra.run": "train",
    "testbed.accuracy": "accuracy_probe correct_answers",
    "testbed.ladder": "LabelConfig LadderConfig records write_states",
    "testbed.world": "WorldConfig make_world",
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}

__all__ = sorted(_MODULES)
__getattr__ = lazy_names("remind", _MODULES)
