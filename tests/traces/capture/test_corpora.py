import pytest

from ground.errors import InputError
from tests.support.tiny_moe import write_corpus
from traces.capture.corpora import DOMAINS, documents, normalised, read_domain

CUAD, LICENCE = "HazyResearch/legalbench:CUAD_Insurance", "CC BY 4.0"


def rows(
    count=100, source=CUAD, response="the party shall give notice within thirty days of the end of the term, " * 2
):
    return [(source, f"Clause {number} of the contract", response) for number in range(count)]


def test_sources_are_openly_licensed_or_say_that_routes_alone_may_be_passed_on():
    open_licences = ("CC BY 4.0", "CC0", "MIT", "Apache-2.0", "PSF-2.0")
    assert all(domain.sources for domain in DOMAINS.values())
    for licence in (one for domain in DOMAINS.values() for one in domain.sources.values()):
        assert licence.startswith(open_licences) != licence.endswith("; routes alone may be passed on"), licence


def test_closed_sources_and_other_languages_are_left_out(tmp_path):
    closed = [
        ("sahil280114/codealpaca:new_codealpaca", "write a script", "print(1)"),  # CC BY-NC
        ("uccollab/AnnoMI", "Client: yes", "Therapist: go on"),  # no licence
        ("HazyResearch/legalbench:eurlex", "Article 1", "Member States"),  # no licence in its folder
        ("HazyResearch/legalbench:CUAD_Insurance", "单项选择题：下列哪一项", "答案：B"),
    ]
    write_corpus(tmp_path, "law", rows() + closed)
    text = read_domain(tmp_path, "law")
    kept = [*text.train, *text.profile, *text.eval]
    assert {(row.source, row.licence) for row in kept} == {(CUAD, LICENCE)}
    assert len(kept) == 100


def test_no_prompt_is_on_two_sides_even_in_another_spelling(tmp_path):
    again = [(source, prompt.upper().replace(" ", "  "), response + " Again.") for source, prompt, response in rows()]
    write_corpus(tmp_path, "law", rows() + again)
    text = read_domain(tmp_path, "law")
    sides = [{normalised(row.prompt) for row in side} for side in (text.train, text.profile, text.eval)]
    assert all(sides)
    assert not sides[0] & sides[1] and not sides[0] & sides[2] and not sides[1] & sides[2]
    assert len(text.train) == 2 * len(sides[0])  # every row of a training prompt
    assert len(text.profile) == len(sides[1])  # one row a captured prompt


def test_captured_rows_are_split_70_to_30_and_the_seed_decides(tmp_path):
    write_corpus(tmp_path, "law", rows(400))
    text = read_domain(tmp_path, "law", seed=3)
    assert len(text.profile) == round(0.7 * 60) and len(text.eval) == 60 - len(text.profile)
    assert read_domain(tmp_path, "law", seed=3) == text
    assert read_domain(tmp_path, "law", seed=4).profile != text.profile


def test_the_split_does_not_depend_on_the_order_of_the_file(tmp_path):
    write_corpus(tmp_path / "a", "law", rows())
    write_corpus(tmp_path / "b", "law", rows()[::-1])
    one, two = read_domain(tmp_path / "a", "law"), read_domain(tmp_path / "b", "law")
    assert (one.profile, one.eval) == (two.profile, two.eval)


def test_prompts_with_many_responses_or_much_text_go_to_training(tmp_path):
    popular = [(CUAD, "Quote a clause", f"clause {number}: " + "the party shall pay " * 5) for number in range(30)]
    long = [(CUAD, f"{number} " + "long words " * 60, "the party shall pay " * 5) for number in range(30)]
    write_corpus(tmp_path, "law", rows() + popular + long)
    text = read_domain(tmp_path, "law")
    assert {row.prompt.split()[0] for row in [*text.profile, *text.eval]} == {"Clause"}
    assert sum(row.prompt.startswith("Quote") for row in text.train) == 30


def test_banking_is_a_conversation(tmp_path):
    source = "PolyAI-LDN/task-specific-datasets:banking77/train"
    asked = [
        (source, f"Customer query: Where is card {number}?\nWhat is the banking intent?", "card arrival")
        for number in range(40)
    ]
    write_corpus(tmp_path, "finance", asked)
    text = read_domain(tmp_path, "banking")
    first = text.train[0]
    assert first.prompt.startswith("Customer: Where is card") and first.prompt.endswith("?\nAgent:")
    document, turns = documents(text.train, "banking")[0], DOMAINS["banking"].turns
    assert document.count("Customer: ") == document.count("\nAgent: card arrival") == turns


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"not xz", "not a whole xz file"),
        ("{", "line 1: not JSON"),
        ('{"source": "x", "prompt": 3, "response": ""}', "line 1: field 'prompt'"),
        (r'{"source": "x", "prompt": "\ud83d", "response": ""}', "line 1: field 'prompt' holds"),
        ("", "0 allowed prompts"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, content, message):
    import lzma

    path = tmp_path / "law.jsonl.xz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_bytes(lzma.compress(content.encode()))
    with pytest.raises(InputError, match=message) as raised:
        read_domain(tmp_path, "law")
    assert "\n" not in str(raised.value)


def test_a_cut_file_is_refused(tmp_path):
    write_corpus(tmp_path, "law", rows(300))
    path = tmp_path / "law.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match="not a whole xz file"):
        read_domain(tmp_path, "law")


def test_an_unknown_domain_is_named(tmp_path):
    with pytest.raises(InputError, match="'cooking' is unknown; one of law, banking"):
        read_domain(tmp_path, "cooking")
