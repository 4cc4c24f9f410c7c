"""RULER's tasks beside the needles: prompts taken apart and worked out again, lengths, depths and scores."""

import json
import re
from collections import Counter

import pytest
from characters import Characters

from swa_jax.base.errors import ConfigError
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.evaluate.ruler import RULER_TASKS, ruler_examples, ruler_grid, string_match_all, string_match_part
from swa_jax.evaluate.ruler_qa import read_hotpotqa, read_squad
from swa_jax.evaluate.ruler_words import ADJECTIVES, NOUNS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
ASK = (
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
    "often in the list are:"
)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return load_tokenizer("swa_jax/recall")


def made(task: str, length: int, **options):
    """One example of a task in characters, and the text of its prompt."""
    (example,) = ruler_examples(Characters(), task, length=length, num_examples=1, **options)
    return example, Characters().decode(example.prompt)


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    """Three articles of four paragraphs, each with a question that has an answer and one that has none."""
    data = [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {p} of article {a} says gold{a}{p}. " + "More of it follows here. " * 6,
                    "qas": [
                        {
                            "question": f"What does {a}{p} say?",
                            "answers": [{"text": f"gold{a}{p}"}, {"text": f"gold{a}{p}"}, {"text": f"Gold {a}{p}"}],
                            "is_impossible": False,
                        },
                        {"question": "What is not said?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(4)
            ]
        }
        for a in range(3)
    ]
    file = tmp_path_factory.mktemp("squad") / "squad.json"
    file.write_text(json.dumps({"data": data}))
    return file


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory):
    """Four questions with five paragraphs each, of which the second and the fourth hold the answer."""
    data = [
        {
            "question": f"Which of {q}?",
            "answer": f"silver{q}",
            "supporting_facts": [[f"Title {q}1", 0], [f"Title {q}3", 1]],
            "context": [[f"Title {q}{p}", [f"First of {q}{p}. ", f"Second of {q}{p}."]] for p in range(5)],
        }
        for q in range(4)
    ]
    file = tmp_path_factory.mktemp("hotpot") / "hotpot.json"
    file.write_text(json.dumps(data))
    return file


# ---- variable tracking ----


def follow(context: str, value: str) -> list[str]:
    """The variables that have the value, by the statements of a text, in whatever order they stand."""
    holders = [re.search(rf"VAR ([A-Z]+) = {value}\n", context)[1]]
    handed_on = dict(re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+) \n", context))
    while nexts := [name for name, source in handed_on.items() if source == holders[-1]]:
        assert len(nexts) == 1
        holders += nexts
    return holders


def parts_of_tracking(text: str) -> list[tuple[str, str, str]]:
    """(context, value, what follows "they are: ") of the solved example and of the question."""
    pattern = re.escape(TRACK) + (
        r"(.*?)\nQuestion: Find all variables that are assigned the value (\d{5}) in the text above\. "
        r"Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are assigned the "
        r"value \2, they are: (.*?)(?:\n\n|$)"
    )
    return re.findall(pattern, text, re.DOTALL)


def test_a_chain_is_tracked_through_the_noise() -> None:
    example, text = made("vt", 6000)
    solved, asked = parts_of_tracking(text)
    assert "".join((TRACK, asked[0])) in text
    assert follow(asked[0] + "\n", asked[1]) == example.references
    assert {len(name) for name in example.references} == {5}
    assert (len(set(example.references)), asked[2]) == (5, "")
    names = solved[2].split()
    assert follow(solved[0] + "\n", solved[1]) == names
    assert {len(name) for name in names} == {3}
    assert Characters().decode(example.answer) == " " + " ".join(example.references)
    rest = [line for line in asked[0].split("\n") if not line.startswith("VAR ")]
    assert all(line == NOISE for line in rest[:-1])
    assert NOISE.startswith(rest[-1])
    order = [asked[0].index(f"VAR {name} =") for name in example.references]
    assert order == sorted(order)
    start = example.meta["needle_start"]
    assert text[start:].startswith(f"VAR {example.references[0]} = {asked[1]}\n")


def test_the_solved_example_has_its_limit(bpe: Tokenizer) -> None:
    for length in (1024, 4096):
        for example in ruler_examples(bpe, "vt", length=length, num_examples=3):
            text = bpe.decode(example.prompt)
            tokens = len(bpe.encode(text[: text.index(TRACK, 1)]))
            most = 500 if length == 4096 else 256
            assert tokens <= most
            assert tokens > most - 40 or NOISE not in text[: text.index(TRACK, 1)]


# ---- common and frequent words ----


def numbered(text: str) -> list[str]:
    """The words of a list "1. a 2. b ...", whose numbers must be right."""
    numbers, words = text.split()[::2], text.split()[1::2]
    assert numbers == [f"{n}." for n in range(1, len(words) + 1)]
    return words


@pytest.mark.parametrize(
    ("length", "repeats", "example_repeats", "example_words"),
    [(4095, (6, 1), (3, 1), 20), (12_000, (30, 3), (10, 3), 40)],
)
def test_ten_words_are_common(length, repeats, example_repeats, example_words) -> None:
    example, text = made("cwe", length)
    first, second = text.split(LIST)[1:]
    listed, said = first.split(ASK)
    counts = Counter(numbered(listed))
    assert len(counts) == example_words
    assert sorted(counts.values()) == [example_repeats[1]] * (example_words - 10) + [example_repeats[0]] * 10
    assert {word for word, n in counts.items() if n == example_repeats[0]} == set(numbered(said))
    listed, nothing = second.split(ASK)
    assert nothing == ""
    words = numbered(listed)
    counts = Counter(words)
    assert {word for word, n in counts.items() if n == repeats[0]} == set(example.references)
    others = sorted(n for word, n in counts.items() if word not in example.references)
    assert set(others[1:]) == {repeats[1]}  # one may occur less often
    assert set(words) <= {*ADJECTIVES, *NOUNS}
    assert words != sorted(words, key=words.index)  # in no order
    assert example.meta["num_words"] == len(counts)
    assert numbered(Characters().decode(example.answer)) == example.references


def test_a_long_list_has_pairs_of_words() -> None:
    example, text = made("cwe", 40_000)
    words = Counter(numbered(text.split(LIST)[2].split(ASK)[0]))
    assert all(re.fullmatch(r"[a-z]+-[a-z]+", word) for word in words)
    assert {word for word, n in words.items() if n == 30} == set(example.references)


def test_frequent_words_fall_as_the_zeta_distribution() -> None:
    example, text = made("fwe", 20_000)
    opening, _, rest = text.partition("Find the three most frequently appeared coded words. ")
    listed, _, question = rest.partition("\nQuestion: ")
    assert opening == "Read the following coded text and track the frequency of each coded word. "
    assert question == (
        "Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        "words in the above coded text? Answer: According to the coded text above, the three most frequently appeared "
        "words are:"
    )
    counts = Counter(listed.split()).most_common()
    assert counts[0][0] == "..."
    assert [word for word, _ in counts[1:4]] == example.references
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])
    # Of N words, rank k has the share 1 / k^2 / zeta(2), rounded down: the quotients of all ranks agree on one N.
    low = max(n * k**2 * 1.6449 for k, (_, n) in enumerate(counts, start=1))
    high = min((n + 1) * k**2 * 1.6450 for k, (_, n) in enumerate(counts, start=1))
    assert low < high
    assert len(counts) == int((low / 1.6449) ** 0.5)
    three = ", ".join(example.references[:2]) + f", and {example.references[2]}"
    assert Characters().decode(example.answer) == f" {three}."


def test_the_third_word_is_told_from_the_fourth_in_the_shortest_prompt() -> None:
    with pytest.raises(ConfigError, match=r"that fwe can tell apart .* must be at least (\d+)") as error:
        made("fwe", 300)
    shortest = int(re.search(r"at least (\d+)", str(error.value))[1])
    for length in range(shortest, shortest + 200, 20):
        _, text = made("fwe", length)
        counts = Counter(text.split("coded words. ")[1].split("\nQuestion")[0].split()).most_common(5)
        assert counts[3][1] > counts[4][1]


# ---- questions among documents ----


def documents(text: str) -> list[str]:
    listed = text.split("The following are given documents.\n\n")[1]
    listed = listed.split("\n\nAnswer the question based on")[0]
    found = re.split(r"(?:^|\n\n)Document \d+:\n", listed)[1:]
    assert re.findall(r"(?:^|\n\n)Document (\d+):\n", listed) == [str(i + 1) for i in range(len(found))]
    return found


def test_a_question_of_squad_among_paragraphs_of_its_article_first(squad) -> None:
    file = read_squad(squad)
    assert len(file.questions) == 12
    example, text = made("qa_1", 1300, questions=file)
    number = re.search(r"Question: What does (\d\d) say\? Answer:$", text)[1]
    assert example.references == [f"gold{number}", f"Gold {number}"]
    found = documents(text)
    own = [i for i, document in enumerate(found) if f"gold{number}" in document]
    assert len(own) == 1
    assert found[own[0]] in file.documents  # whole
    assert text[example.meta["needle_start"] :].startswith(found[own[0]])
    articles = [re.match(r"Paragraph \d of article (\d)", document)[1] for document in found]
    assert articles.count(number[0]) == min(4, len(found))
    example, text = made("qa_1", 8000, questions=file)
    assert len(documents(text)) > 12  # from the beginning again, where the file is at its end
    assert sum(f"gold{number}" in document for document in documents(text)) == 1
    assert Characters().decode(example.answer) == f" gold{number}"


def test_a_question_of_hotpotqa_has_both_of_its_documents(hotpot) -> None:
    file = read_hotpotqa(hotpot)
    example, text = made("qa_2", 900, questions=file)
    (q,) = re.search(r"Question: Which of (\d)\? Answer:$", text).groups()
    found = documents(text)
    assert example.references == [f"silver{q}"]
    for p in (1, 3):
        assert found.count(f"Title {q}{p}\nFirst of {q}{p}. Second of {q}{p}.") == 1
    assert {f"Title {q}{p}" for p in range(5)} <= {document.split("\n")[0] for document in found}


def test_the_document_with_the_answer_lies_where_it_is_wanted(squad) -> None:
    for depth in (0, 0.5, 1):
        example, text = made("qa_1", 6000, questions=read_squad(squad), depths=[depth])
        found = documents(text)
        place = next(i for i, document in enumerate(found) if example.references[0] in document)
        assert place == int(depth * (len(found) - 1))
        assert example.meta["depth"] == depth


def test_questions_are_drawn_without_a_second_time(squad) -> None:
    file = read_squad(squad)
    options = {"length": 1300, "questions": file}
    asked = [e.references[0] for e in ruler_examples(Characters(), "qa_1", num_examples=12, **options)]
    assert len(set(asked)) == 12
    assert asked != sorted(asked)
    other = [e.references[0] for e in ruler_examples(Characters(), "qa_1", num_examples=4, seed=1, **options)]
    assert other != asked[:4]
    with pytest.raises(ConfigError, match=r"squad\.json has 12 questions with an answer: ask for no more"):
        ruler_examples(Characters(), "qa_1", num_examples=13, **options)


def test_files_of_another_form_are_refused(squad, hotpot, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"squad\.json is not HotpotQA's JSON \(a list of"):
        read_hotpotqa(squad)
    with pytest.raises(ConfigError, match=r"hotpot\.json is not SQuAD's JSON"):
        read_squad(hotpot)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_squad(tmp_path / "none.json")
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"empty\.json has no question with an answer"):
        read_hotpotqa(tmp_path / "empty.json")
    alone = [{"question": "q", "answer": "a", "context": [["t", ["text"]]]}]
    (tmp_path / "alone.json").write_text(json.dumps(alone))
    with pytest.raises(ConfigError, match="has no other documents"):
        made("qa_2", 900, questions=read_hotpotqa(tmp_path / "alone.json"))


# ---- all of them ----


@pytest.mark.parametrize("task", ["vt", "cwe", "fwe", "qa_1", "qa_2"])
def test_lengths_are_within_one_percent_below_the_target(bpe, squad, hotpot, task: str) -> None:
    questions = {"qa_1": read_squad(squad), "qa_2": read_hotpotqa(hotpot)}.get(task)
    for length in (2048, 8192):
        for example in ruler_examples(bpe, task, length=length, num_examples=2, questions=questions):
            new = RULER_TASKS[task].new_tokens
            assert 0.99 * length <= len(example.prompt) + new <= length
            assert (example.meta["prompt_tokens"], example.meta["max_new_tokens"]) == (len(example.prompt), new)
            assert len(bpe.encode(bpe.decode(example.answer))) <= new or task == "cwe"


@pytest.mark.parametrize("task", ["vt", "cwe", "fwe", "qa_1", "niah_multikey_1"])
def test_an_example_depends_on_its_seed_and_its_number_alone(bpe, squad, task: str) -> None:
    def build(**options):
        given = {"length": 2048, "num_examples": 2, "seed": 5, "questions": read_squad(squad)} | options
        return ruler_examples(bpe, task, **given)

    assert build() == build()
    assert build(num_examples=1) == build()[:1]
    assert build(seed=6) != build()
    assert build()[0].references != build()[1].references
    longer = build(length=3000)
    assert [example.references for example in longer] == [example.references for example in build()]


def test_answers_have_the_room_that_ruler_gives_them() -> None:
    new = {task: kind.new_tokens for task, kind in RULER_TASKS.items() if not task.startswith("niah")}
    assert new == {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert {kind.new_tokens for task, kind in RULER_TASKS.items() if task.startswith("niah")} == {128}


@pytest.mark.parametrize("task", ["vt", "cwe", "fwe"])
def test_a_depth_that_a_task_has_not_is_refused(task: str) -> None:
    with pytest.raises(ConfigError, match=f"RULER's task {task} has no depth, because what it asks for is all over"):
        made(task, 4000, depths=[0.5])
    grid = ruler_grid(Characters(), [task], lengths=[8000], depths=None, num_examples=1)
    assert list(grid) == [(task, 8000, None)]


def test_questions_need_a_file() -> None:
    with pytest.raises(ConfigError, match="RULER's task qa_1 needs a file of questions"):
        made("qa_1", 4000)


def test_one_answer_of_several_is_enough_for_a_question() -> None:
    assert string_match_part("It was Ann Lee.", ["ann lee", "Ann B. Lee"]) == 1
    assert string_match_all("It was Ann Lee.", ["ann lee", "Ann B. Lee"]) == 0.5
    assert string_match_part("It was Bob.", ["ann lee", "Ann B. Lee"]) == 0
    scores = {task: kind.score for task, kind in RULER_TASKS.items()}
    assert {task for task, score in scores.items() if score is string_match_part} == {"qa_1", "qa_2"}


def test_a_chat_template_goes_around_the_solved_example_too() -> None:
    _, text = made("vt", 4000, wrap="<user>{prompt}</user>\n")
    assert text.startswith(f"<user>{TRACK}")
    assert re.search(r"in the text above\.</user>\nAnswer: According to [^\n]*they are: $", text)
