"""RULER in lm-evaluation-harness: its own scoring gives our numbers on the same prompts. Skipped without lm-eval."""

import dataclasses
import json

import pytest
from flax import nnx
from ruler_files import write_ruler_data
from tiny_models import BYTES, make

from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler import RULER_TASKS, ruler_grid, ruler_task
from swa_jax.evaluate.ruler_data import RulerData
from swa_jax.evaluate.ruler_scores import ruler_scores
from swa_jax.model.decoder import Decoder

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra [eval])")

from swa_jax.evaluate.harness import HarnessModel, run_harness

theirs = pytest.importorskip("lm_eval.tasks.ruler.common_utils", reason="RULER in lm-eval needs transformers")

LENGTH, NEW, COUNT = 3000, 6, 3
TASK = """
task: ours_{task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{input}}}}"
doc_to_target: "{{{{outputs}}}}"
process_results: !function lm_eval.tasks.ruler.common_utils.{process}
metric_list: [{{metric: "4096", aggregation: mean, higher_is_better: true}}]
generation_kwargs: {{do_sample: false, temperature: 0.0, max_gen_toks: {new}, until: []}}
"""


@pytest.fixture(scope="module")
def lm(byte_tokenizer) -> HarnessModel:
    config = dataclasses.replace(BYTES, max_position_embeddings=2 * LENGTH)
    model = Decoder(config, make("Fw", sliding_window=8), rngs=nnx.Rngs(0))
    return HarnessModel(model, load_tokenizer(byte_tokenizer.parent), batch_size=COUNT)


def planted(lm: HarnessModel, examples: list[Example]) -> list[Example]:
    """The examples, with something to find in what the model says: of none, of half, and of all that is asked for."""
    found = []
    for number, example in enumerate(examples):
        text = lm.tokenizer.decode(example.prompt)
        (said,) = lm.generate_until([Request((text, {"max_gen_toks": NEW, "until": []}))])
        part = said.strip()[:2].upper() or said
        found.append(dataclasses.replace(example, references=[["never"], [part, "never"], [part]][number]))
    return found


@dataclasses.dataclass
class Request:
    args: tuple


@pytest.mark.slow
@pytest.mark.parametrize("task", ["niah_multiquery", "vt", "cwe", "fwe", "qa_1"])
def test_the_harness_gives_our_numbers_on_the_same_prompts(lm, task: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = RulerData(write_ruler_data(tmp_path / "ruler"))
    grid = ruler_grid(
        lm.tokenizer, [task], lengths=[LENGTH], depths=None, num_examples=COUNT, data=data, max_new_tokens=NEW
    )
    ((cell, examples),) = grid.items()
    examples = planted(lm, examples)
    (ours,) = ruler_scores(lm.model, lm.tokenizer, {cell: examples}, batch_size=COUNT)
    file, part = tmp_path / "prompts.jsonl", task.startswith("qa")
    file.write_text(
        "".join(
            json.dumps({"input": lm.tokenizer.decode(one.prompt), "outputs": one.references, "max_length": 4096}) + "\n"
            for one in examples
        )
    )
    process = "process_results_part" if part else "process_results"
    (tmp_path / "task.yaml").write_text(TASK.format(task=task, file=file, process=process, new=NEW))
    (row,) = run_harness(lm, [f"ours_{task}"], folder=tmp_path)
    assert ours.score == pytest.approx((0 + (1 if part else 0.5) + 1) / 3)
    # Of a question with several answers the harness takes the share that was given, where RULER takes one for enough.
    assert row["score"] == pytest.approx(0.5 if part else ours.score)


def test_scores_are_those_of_the_harness() -> None:
    answers = [" 1234567 and\x0722.", "Ann\tLEE", "", "nothing\n"]
    for task in RULER_TASKS:
        process = theirs.process_results_part if task.startswith("qa") else theirs.process_results
        for references in (["1234567"], ["ann"], ["22"], ["Lee"], ["nothing"]):
            for answer in answers:
                found = process({"max_length": 4096, "outputs": references}, [answer])["4096"]
                assert ruler_task(task).score(answer, references) == found, (task, answer, references)
