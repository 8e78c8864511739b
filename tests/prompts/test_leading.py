"""What texts begin with alike is tokenized once, and no id changes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from batchgen.models.gguf_tokenizer import gguf_tokenizer
from batchgen.prompts.leading import LeadingText

HEAD = (
    "<|im_start|>system\nYou label films.\n\nthe cat sat on the mat: positive\nthis film is bad, really: negative\n"
    "<|im_end|>\n<|im_start|>user\nLabel the film that follows as positive or negative: "
)
ROWS = [
    "it sat on the mat",
    "  two spaces",
    "\n\nlines\r\n",
    "'s",
    "7 cats",
    "",
    "é e\u0301",
    "\u0301",
    "你好 🙂",
    "or or",
]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TWO_WORDS = r"\p{L}+ \p{L}+|\s+|\S"
LOOKS_BACK = r"(?<=\s)\p{L}+|[^\p{L}]+|\p{L}+"

texts = st.text("ab 's\n\t1.é\u0301好<|>", max_size=12)


class Counted:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, backend):
        self.backend, self.chars = backend, 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode(self, text, **options):
        self.chars += len(text)
        return self.backend.encode(text, **options)


def split_by(backend, pattern):
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return backend


def whole(backend, text):
    return backend.encode(text, add_special_tokens=False).ids


@pytest.fixture(params=["gpt2", "nfc", "digits", "llama3", "two words", "looks back", "first", "legacy"])
def backend(request, byte_level, sentencepiece):
    if request.param in ("first", "legacy"):
        return sentencepiece(prepend=request.param)
    made = byte_level()
    match request.param:
        case "nfc":
            made.normalizer = normalizers.NFC()
        case "digits":
            made.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), made.pre_tokenizer]
            )
        case "llama3":
            split_by(made, LLAMA_3)
        case "two words":
            split_by(made, TWO_WORDS)
        case "looks back":
            split_by(made, LOOKS_BACK)
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(rows=st.lists(st.one_of(texts, st.sampled_from(ROWS)), min_size=3, max_size=8))
def test_ids_are_those_of_the_whole_text(backend, rows):
    leading = LeadingText(backend)
    for row in rows:
        assert leading.encode(HEAD + row) == whole(backend, HEAD + row)


def test_the_shared_text_is_tokenized_once(byte_level):
    counted = Counted(byte_level())
    leading = LeadingText(counted)
    leading.encode(HEAD + "one")
    leading.encode(HEAD + "two")
    counted.chars = 0
    for row in ROWS:
        leading.encode(HEAD + row)
    assert counted.chars == sum(len(" negative: " + row) for row in ROWS)


def test_the_cut_may_follow_an_empty_line(byte_level):
    """Two line breaks at the end of a text are one word, and two in front of a word."""
    head = HEAD + "\n\nReview: "
    counted = Counted(byte_level())
    leading = LeadingText(counted)
    for row in ROWS:
        assert leading.encode(head + row) == whole(counted.backend, head + row)
    counted.chars = 0
    leading.encode(head + "last")
    assert counted.chars == len("Review: last")


@pytest.mark.parametrize("kind", ["first", "legacy"])
def test_a_tokenizer_that_cuts_no_words_gets_whole_texts(sentencepiece, kind):
    counted = Counted(sentencepiece(prepend=kind))
    leading = LeadingText(counted)
    for row in ROWS:
        leading.encode(HEAD + row)
    assert counted.chars == sum(len(HEAD + row) for row in ROWS)


def test_a_shared_document_gives_way_to_what_all_texts_share(byte_level):
    """The rows of a table often come sorted: the first ones share more than the others do."""
    counted = Counted(byte_level())
    leading = LeadingText(counted)
    for document in ("the cat sat on the mat and looked", "this film is good, that film is bad"):
        for row in ROWS:
            assert leading.encode(HEAD + document + row) == whole(counted.backend, HEAD + document + row)
    counted.chars = 0
    leading.encode(HEAD + "another one")
    assert counted.chars == len(" negative: another one")


@pytest.mark.parametrize("added", [" negative: it", "positive or negative", "negative: "])
def test_an_added_token_over_the_cut(byte_level, added):
    backend = byte_level()
    backend.add_tokens([AddedToken(added, normalized=False)])
    leading = LeadingText(backend)
    for row in ["this", "that", *ROWS, "it"]:
        assert leading.encode(HEAD + row) == whole(backend, HEAD + row)


def test_texts_that_share_nothing_cost_nothing_more(byte_level):
    counted = Counted(byte_level())
    leading = LeadingText(counted)
    given = [f"{number} " * 40 for number in range(100)]
    for text in given:
        leading.encode(text)
    assert counted.chars == sum(map(len, given))


def test_a_real_tokenizer(smollm2):
    counted = Counted(gguf_tokenizer(smollm2).tokenizer)
    leading = LeadingText(counted)
    for row in ROWS:
        assert leading.encode(HEAD + row) == whole(counted.backend, HEAD + row)
    counted.chars = 0
    leading.encode(HEAD + "last")
    assert counted.chars == len(" negative: last")
