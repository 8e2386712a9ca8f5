"""What nano makes of real photos (images.md): a folder with them; number of dialogues; pixels, turned or captions."""

import json
import random
import sys
from pathlib import Path

from remind import build_states, evaluate
from remind.data.split import SplitConfig
from remind.grounding import GroundingConfig
from remind.states.dataset import read_states
from remind.states.records import blocks_of, marked_share

PHOTOS = {
    "astronaut.png": "an astronaut in an orange suit",
    "brick.png": "a brick wall",
    "camera.png": "a man with a camera",
    "chelsea.png": "a ginger cat",
    "china.jpg": "a temple with curved roofs",
    "coffee.png": "a cup of coffee",
    "coins.png": "rows of old coins",
    "flower.jpg": "a red dahlia",
    "grass.png": "grass from above",
    "gravel.png": "grey gravel",
    "horse.png": "the outline of a horse",
    "hubble_deep_field.jpg": "galaxies in the dark",
    "moon.png": "craters of the moon",
    "motorcycle_left.png": "a motorcycle in a garage",
    "page.png": "a page of a book",
    "rocket.jpg": "a rocket on its pad",
}
folder, count = Path(sys.argv[1]), int(sys.argv[2])


def measured(name: str, images: str, captions: bool, turned: int = 0) -> dict[str, str]:
    """Twelve turns a dialogue, each with a photo, and a question for each; `turned`: the photos stand elsewhere."""
    draw, rows = random.Random(0), []
    for d in range(count):
        order = draw.sample(sorted(PHOTOS), 12)
        shown = order[turned:] + order[:turned]
        turns = [
            {
                "id": f"t{n}",
                "speaker": ("Ana", "Ben")[n % 2],
                "text": "Look at this one.",
                "images": [{"path": shown[n], "caption": PHOTOS[shown[n]] if captions else None}],
            }
            for n in range(12)
        ]
        rows.append({"type": "context", "id": f"d{d}", "sessions": [{"id": "s", "time": None, "turns": turns}]})
        for n, photo in enumerate(order):
            options = draw.sample([photo, *draw.sample([other for other in sorted(PHOTOS) if other != photo], 3)], 4)
            rows.append(
                {
                    "type": "question",
                    "id": f"d{d}q{n}",
                    "context_id": f"d{d}",
                    "format": "single",
                    "split": "test",
                    "question": f"What does image #{n} show?",
                    "options": [PHOTOS[option] for option in options],
                    "answers": ["ABCD"[options.index(photo)]],
                    "evidence": [f"t{n}"],
                    "images": [n],
                    "dimension": "topic_scoped_visual_prototypes",
                }
            )
            rows.append(dict(rows[-1], id=f"d{d}w{n}", question=f"Who showed {PHOTOS[photo]}, and in which image?"))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grounding = GroundingConfig(context_codes="joint", images=images, image_tokens=16, budget_share=0.2)
    build_states(
        str(folder / f"{name}.jsonl"),
        backbone="nano",
        levels=("x0", "x1"),
        out=folder / name,
        overwrite=True,
        grounding=grounding,
        split=SplitConfig(overlap="report"),
    )
    out = str(folder / f"{name}-answers")
    result = evaluate(
        "nano",
        str(folder / name),
        contexts=["x0"],
        images=images,
        image_tokens=16,
        out=out,
        max_new_tokens=48,
        overwrite=True,
    )
    # which photo is asked about is said in words in every second question
    records = [record for record in read_states(folder / name, "test") if "w" in record.question_id]
    marked = sum(marked_share(record) or 0 for record in records) / len(records)
    chance = sum(end - start + 1 for record in records for start, end in blocks_of(record.x1)) / (12 * len(records))
    print(f"{name}: {len(records)} questions, gold turn marked {marked:.3f}, turns marked {chance:.3f}", result.table())
    rows = [json.loads(line) for line in (Path(out) / "predictions.jsonl").read_text().splitlines()]
    return {row["question_id"]: row["text"] for row in rows if "text" in row}


kind = sys.argv[3]
answers = measured(
    kind, "captions" if kind == "captions" else "pixels", kind == "captions", 5 if kind == "turned" else 0
)
if kind == "turned":  # after pixels
    lines = map(json.loads, (folder / "pixels-answers" / "predictions.jsonl").read_text().splitlines())
    before = {row["question_id"]: row["text"] for row in lines if "text" in row}
    changed = sum(before[question] != answer for question, answer in answers.items())
    print(f"answers that change with the photos: {changed} of {len(answers)}")
