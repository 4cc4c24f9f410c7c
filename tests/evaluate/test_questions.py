"""Metrics on answers by hand, the readers of LongBench, LongBench v2 and LongMemEval, long prompts, and the judge."""

import functools
import json
import sys

import command_line
import pytest
from tiny_models import byte_checkpoint, make
from web_server import Requests, web_server

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import Wrap
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate import longbench_metrics as metrics
from swa_jax.evaluate.judges import command_judge, find_judge
from swa_jax.evaluate.question_scores import _metric, _prompt_tokens, score_questions
from swa_jax.evaluate.questions import Question, longbench, longbench_v2, longmemeval
from swa_jax.model.generate import generate

# ---- metrics ----


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The cat sat.", "cat sat", 1),
        ("a cat", "the dog", 0),
        ("one two three", "two three four five", 2 * 2 / 7),
        ("no no no", "no", 2 * 1 / 4),  # a word counts as often as both have it
        ("", "word", 0),
    ],
)
def test_f1(answer: str, reference: str, score: float) -> None:
    assert metrics.qa_f1(answer, reference) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("a b c", "a b c", 1),
        ("a b c d", "a x c", 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
        ("c b a", "a b c", 1 / 3),  # one word in order
        ("a b. c d.", "c d. a b.", 1),  # the order of sentences does not count
        ("", "a", 0),
        ("...", "a", 0),
        # As `rouge` 1.0.1: the line end behind the last full stop is a sentence of one empty word, never in common.
        ("costs rose.\n", "costs fell.\n", 2 * (2 / 3) * (2 / 3) / (2 / 3 + 2 / 3)),
        (
            "The report finds that costs rose. Agencies agreed with both recommendations.\n",
            "Costs rose in all agencies. The agencies agreed with the recommendations.",
            0.45454545,
        ),
    ],
)
def test_rouge_l(answer: str, reference: str, score: float) -> None:
    assert metrics.rouge_l(answer, reference) == pytest.approx(score, abs=1e-7)


def test_classification_shares_its_point_among_the_classes_named() -> None:
    classes = ["Food", "Fast Food", "City", "Country"]
    assert metrics.classification("It is Fast Food", "Fast Food", classes) == 1  # Food lies inside the right name
    assert metrics.classification("City or Country", "City", classes) == 0.5
    assert metrics.classification("Country", "City", classes) == 0
    assert metrics.classification("nothing", "City", classes) == 0


def test_counts_and_paragraphs_are_shares_of_the_numbers_said() -> None:
    assert metrics.count("12", "12") == 1
    assert metrics.count("12 or 13", "12") == 0.5
    assert metrics.count("none", "12") == 0
    assert metrics.retrieval("Paragraph 7", "Paragraph 7") == 1
    assert metrics.retrieval("7, 8, 9 and 17", "Paragraph 7") == 0.25
    with pytest.raises(ValueError, match="names no paragraph"):
        metrics.retrieval("7", "seven")


def test_code_is_compared_by_its_first_line_of_code() -> None:
    assert metrics.code_similarity("\n# a comment\nreturn x", "return x") == 1
    assert metrics.code_similarity("```python\nreturn x\nmore", "return x") == 1
    assert metrics.code_similarity("abcd", "abxy") == 0.5
    assert metrics.code_similarity("# only", "return x") == 0


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is C**", "C"),
        ("I think it is D", None),
        ("The correct answer is (E)", None),
        ("The correct answer is A, not (B)", "A"),
    ],
)
def test_choices(answer: str, letter: str | None) -> None:
    assert metrics.chosen_letter(answer) == letter
    assert metrics.choice(answer, "B") == (letter == "B")


# ---- files ----


@pytest.fixture
def files(tmp_path):
    bench = tmp_path / "longbench"
    bench.mkdir()
    records = {
        "hotpotqa_e": {"context": "Text {x}", "input": "Who?", "answers": ["Ann", "Ann Lee"], "all_classes": None},
        "trec": {"context": "Few shots", "input": "Q", "answers": ["City"], "all_classes": ["City", "Food"]},
    }
    for name, record in records.items():
        (bench / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "prompts.json").write_text(
        json.dumps({"hotpotqa": "Read {context}\nQ {input} {y}", "trec": "{context} {input}"})
    )
    v2 = {"_id": 1, "domain": "Code", "question": "Which?", "answer": "C", "context": "long"}
    v2 |= {f"choice_{x}": x.lower() for x in "ABCD"}
    (tmp_path / "v2.json").write_text(json.dumps([v2]))
    memory = {
        "question_id": "7_abs",
        "question_type": "multi-session",
        "question": "When?",
        "answer": 42,
        "question_date": "2024/05/01",
        "haystack_dates": ["2024/04/01", "2024/04/02"],
        "haystack_sessions": [
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
            [{"role": "user", "content": "Bye"}],
        ],
    }
    (tmp_path / "memory.json").write_text(json.dumps([memory, memory | {"question_id": "8"}]))
    return tmp_path


def test_longbench_takes_its_prompts_metrics_and_answer_lengths(files) -> None:
    hotpot, trec = longbench(files / "longbench", files / "prompts.json")
    assert (hotpot.group, hotpot.prompt, hotpot.references) == (
        "hotpotqa",
        "Read Text {x}\nQ Who? {y}",
        ["Ann", "Ann Lee"],
    )
    assert (hotpot.max_new_tokens, hotpot.chat, hotpot.first_line) == (32, True, False)
    assert hotpot.score("Ann", "Ann Lee") == pytest.approx(2 / 3)
    assert (trec.max_new_tokens, trec.chat, trec.first_line) == (64, False, True)
    assert trec.score("Food or City", "City") == 0.5


def test_longbench_v2_and_longmemeval(files) -> None:
    (v2,) = longbench_v2(files / "v2.json")
    assert (v2.group, v2.references, v2.score) == ("Code", ["C"], metrics.choice)
    assert "Question: Which?\n(A) a\n(B) b\n(C) c\n(D) d\n" in v2.prompt
    unanswerable, answerable = longmemeval(files / "memory.json")
    assert "[2024/04/01]\nuser: Hi\nassistant: Hello\n\n[2024/04/02]\nuser: Bye\n" in unanswerable.prompt
    assert "Today is 2024/05/01.\nQuestion: When?" in unanswerable.prompt
    assert unanswerable.judged == {
        "type": "multi-session",
        "question": "When?",
        "reference": "42",
        "unanswerable": True,
    }
    assert answerable.judged["unanswerable"] is False


def test_files_that_do_not_fit_say_where(files) -> None:
    bench, prompts = files / "longbench", files / "prompts.json"
    (bench / "dureader.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="'dureader' is Chinese"):
        longbench(bench, prompts)
    (bench / "dureader.jsonl").unlink()
    (bench / "musiqe.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"musiqe.jsonl, record 0: no LongBench data set.*'musique'"):
        longbench(bench, prompts)
    (bench / "musiqe.jsonl").rename(bench / "musique.jsonl")
    with pytest.raises(ConfigError, match="no prompt for 'musique'"):
        longbench(bench, prompts)
    prompts.write_text('{"musique": "{context}"}')
    with pytest.raises(ConfigError, match=r"musique.jsonl, record 0 has no field 'context'"):
        longbench(bench / "musique.jsonl", prompts)
    for answers, message in (
        ("Ann", "'answers' must be a list of texts, at least one, got 'Ann'"),
        ([], "'answers' must be a list of texts"),
        ([7], "'answers' must be a list of texts"),
    ):
        (bench / "musique.jsonl").write_text(json.dumps({"context": "x", "answers": answers}))
        with pytest.raises(ConfigError, match=f"record 0: {message}"):
            longbench(bench / "musique.jsonl", prompts)
    (bench / "passage_retrieval_en.jsonl").write_text(json.dumps({"context": "x", "answers": ["twelve"]}))
    prompts.write_text('{"passage_retrieval_en": "{context}"}')
    with pytest.raises(ConfigError, match="names no paragraph"):
        longbench(bench / "passage_retrieval_en.jsonl", prompts)
    (files / "v2.json").write_text((files / "v2.json").read_text().replace('"C"', '"c"'))
    with pytest.raises(ConfigError, match="record 0: the answer must be A, B, C or D, got 'c'"):
        longbench_v2(files / "v2.json")
    (files / "v2.json").write_text("{broken")
    with pytest.raises(ConfigError, match="line 1 is not valid JSON"):
        longbench_v2(files / "v2.json")
    (files / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.jsonl files"):
        longbench(files / "empty", prompts)


# ---- answers ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    return byte_checkpoint(
        tmp_path_factory.mktemp("questions"), byte_tokenizer, make("Fw", sliding_window=16), max_position_embeddings=128
    )


def question(prompt: str, group: str = "g", **options) -> Question:
    given = {"references": ["no", "yes"], "max_new_tokens": 4, "score": lambda a, r: float(r == "yes")} | options
    return Question("bench", group, prompt, **given)


@pytest.mark.parametrize("room", [60, 61])
def test_what_is_cut_is_the_middle(checkpoint, room) -> None:
    tokenizer = load_tokenizer(checkpoint)
    asked = question("b" * 40 + "c" * 40)
    length = room + asked.max_new_tokens
    tokens, cut = _prompt_tokens(tokenizer, asked, length, cut_middle=True, wrap=Wrap())
    assert (tokenizer.decode(tokens), cut) == ("b" * 30 + "c" * (room - 30), True)
    assert _prompt_tokens(tokenizer, asked, length, cut_middle=False, wrap=Wrap()) == ([], False)
    tokens, cut = _prompt_tokens(tokenizer, asked, 80 + asked.max_new_tokens, cut_middle=True, wrap=Wrap())
    assert (tokenizer.decode(tokens), cut) == ("b" * 40 + "c" * 40, False)


@pytest.mark.slow
def test_long_prompts_are_left_out_or_cut_and_counted(checkpoint) -> None:
    from swa_jax.checkpoint.folder import load_model

    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    seen = []

    def note(answer: str, reference: str) -> float:
        seen.append(answer)
        return 0.5

    short, long = "a" * 60, "b" * 40 + "c" * 40
    asked = [question(short), question(long, "h", score=note)]
    scores, records = score_questions(model, tokenizer, asked, max_length=64)
    assert [(s.group, s.score, s.num_questions, s.num_left_out) for s in scores] == [
        ("g", 1, 1, 0),
        ("h", None, 0, 1),
        ("mean", 1, 1, 1),
        ("all", 1, 1, 1),
    ]
    assert [r["prompt_tokens"] for r in records] == [60]
    assert not seen
    scores, records = score_questions(model, tokenizer, asked, max_length=64, cut_middle=True)
    assert [(s.group, s.score, s.num_left_out, s.num_cut) for s in scores] == [
        ("g", 1, 0, 0),
        ("h", 0.5, 0, 1),
        ("mean", 0.75, 0, 1),
        ("all", 0.75, 0, 1),
    ]
    assert [r["prompt_tokens"] for r in records] == [60, 60]
    assert scores[3].interval == [0, 1]  # two numbers say little
    scores, _ = score_questions(model, tokenizer, [*asked[:1] * 3, question("d" * 9, "h", score=note)], max_length=64)
    assert [(s.group, s.score) for s in scores[2:]] == [("mean", 0.75), ("all", 0.875)]
    assert scores[2].interval is None  # one question alone, and half right
    assert scores[3].interval[0] < 0.875
    (said,) = generate(model, [tokenizer.encode("b" * 30 + "c" * 30)], max_new_tokens=4, stop_tokens=[tokenizer.eos_id])
    assert seen[0] == tokenizer.decode(said)
    with pytest.raises(ConfigError, match="none of the 1 prompts fits max_length = 64"):
        score_questions(model, tokenizer, asked[1:], max_length=64)
    with pytest.raises(ConfigError, match="name a judge's command with --judge"):
        score_questions(model, tokenizer, [question("x", score=None)], max_length=64)


def script(folder, text: str) -> str:
    file = folder / "judge.py"
    file.write_text("import json, sys\nanswers = [json.loads(line) for line in sys.stdin]\n" + text)
    return f"{sys.executable} {file}"


def test_a_judge_is_a_program(tmp_path) -> None:
    answers = [{"answer": "1", "reference": "1"}, {"answer": "2", "reference": "1"}, {"answer": "", "reference": "1"}]
    judge = command_judge(
        script(tmp_path, "for a in answers: print({'1': 'Yes.', '2': 'no', '': '0.25'}[a['answer']])")
    )
    assert judge(answers) == [1, 0, 0.25]
    for program, message in (
        ("print('yes')", "gave 1 verdicts on 3 answers"),
        ("print('maybe\\n' * 3)", "said 'maybe': it must say yes, no"),
        ("sys.exit('out of order')", "ended with status 1: out of order"),
    ):
        with pytest.raises(ConfigError, match=message):
            command_judge(script(tmp_path, program))(answers)
    with pytest.raises(ConfigError, match="cannot be started: there is no program"):
        command_judge("no-such-program-here")
    with pytest.raises(ConfigError, match="command is empty"):
        command_judge(" ")


@pytest.fixture
def endpoint():
    """A chat model at a local port that says what `replies` holds, in turn; `asked` has the requests."""
    replies, asked = [], []

    class Chat(Requests):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            status, text = replies.pop(0)
            self.say(text.encode(), status)

    with web_server(Chat) as url:
        yield f"{url}/v1", replies, asked


def says(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def test_a_judge_behind_an_endpoint(endpoint, monkeypatch) -> None:
    url, replies, asked = endpoint
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr("swa_jax.evaluate.judges.time.sleep", lambda _: None)
    told = {"type": "multi-session", "question": "Which city?", "reference": "Oslo", "unanswerable": False}
    judge = find_judge(f"{url}#small")
    replies += [says("<think>It names Oslo. No?</think>\n\nYes."), (503, "busy"), (429, "slow down"), says(" no\n")]
    answers = [told | {"answer": "Oslo {it is}"}, told | {"answer": "I cannot know", "unanswerable": True}]
    assert judge(answers) == [1, 0]
    path, key, body = asked[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret", "small", 0)
    for part in ("Which city?", "Expected answer: Oslo", "Oslo {it is}"):
        assert part in body["messages"][0]["content"]
    assert "says so" in asked[-1][2]["messages"][0]["content"]
    for reply, message in (
        ([says("perhaps")], "said 'perhaps': it must say yes, no"),
        ([(401, "no")], "did not judge: 401"),
        ([(500, "no")] * 4, "did not judge: 500"),
        ([(200, "[]")], "its reply is not that of a chat model"),
    ):
        replies[:] = reply
        with pytest.raises(ConfigError, match=message):
            judge(answers[:1])
        assert not replies
    with pytest.raises(ConfigError, match=r"names no model: write .*#MODEL"):
        find_judge(url)
    with pytest.raises(ConfigError, match=r"did not judge: .*refused"):
        find_judge("http://127.0.0.1:9/v1#x")(answers[:1])


def test_questions_on_the_command_line(checkpoint, files) -> None:
    run = functools.partial(command_line.run, "evaluate", "questions")
    out = files / "out"
    judge = script(files, "for a in answers: print('yes' if a['unanswerable'] else 'no')")
    options = ("--longmemeval", files / "memory.json", "--judge", judge, "--max-length", 800, "--out", out)
    output = run(checkpoint, *options)
    assert "multi-session" in output
    assert "sequences of 800 tokens are longer than the model's context of 128" in output
    results = json.loads((out / "results.json").read_text())
    assert [(r["group"], r["score"], r["num_questions"]) for r in results["questions"]] == [
        ("multi-session", 0.5, 2),
        ("abstention", 1, 1),
        ("all", 0.5, 2),
    ]
    assert [r["score"] for r in json.loads((out / "answers.json").read_text())["own"]] == [1, 0]
    assert "needs --longbench-prompts" in run(checkpoint, "--longbench", files / "longbench", status=2)
    trial, failed = files / "trial", files / "failed"
    fails = script(files, "sys.exit('out of order')")
    options = ("--longmemeval", files / "memory.json", "--judge", fails, "--max-length", 800, "--out", trial)
    assert "out of order" in run(checkpoint, *options, status=2)
    assert not (trial / "samples.jsonl").exists()  # it is tried before a model answers
    fails = script(files, "if answers[0]['answer']: sys.exit('out of order')\nprint('no')")
    options = ("--longmemeval", files / "memory.json", "--judge", fails, "--max-length", 800, "--out", failed)
    assert "out of order" in run(checkpoint, *options, status=2)
    kept = json.loads((failed / "answers.json").read_text())["own"]  # what the model said is not lost
    assert [(len(r["answer"]) > 0, r["score"]) for r in kept] == [(True, None)] * 2
    assert "name a judge's command" in run(
        checkpoint, "--longmemeval", files / "memory.json", "--max-length", 800, status=2
    )


def test_the_best_of_several_references_counts():
    question = Question("b", "g", "p", ["one thing", "another"], 4, metrics.qa_f1, first_line=True)
    assert _metric(question, "another\nand more") == 1
    assert _metric(question, "neither") == 0
