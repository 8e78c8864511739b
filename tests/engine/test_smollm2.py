"""The real small model: its greedy text in float32 is transformers'."""

from pathlib import Path

import pytest
import torch
import transformers

from batchgen.engine import Engine, EngineConfig, Request, SamplingParams
from batchgen.models.gguf_tokenizer import gguf_tokenizer

EXAMPLES = """Label each review of a film as positive or negative.

Review: A gripping story, told with wit and real warmth.
Label: positive

Review: Two hours of noise; I looked at my watch more than at the screen.
Label: negative

Review: """
FILMS = ("The last ferry", "A quiet winter", "Robots of Ohio", "My uncle's garden", "Night train 404")
OPENINGS = (
    "{} is the kind of film that stays with you for weeks.",
    "I wanted to like {}, but the plot falls apart after 20 minutes.",
    "Nobody in {} seems to know what they are doing - least of all the director.",
    "With {}, the studio has made its best-looking picture since 1997.",
    "Funny, sad, and far too long: {}.",
)
QUESTIONS = ("Who wrote the novel about {}?", "Describe {} in one sentence:", "Once upon a time, near {},")
THINGS = ("a white whale", "the café on the corner", "Zürich", "two cats & a dog", "x = 3*y + 1", "the year 2049")


def prompts() -> list[str]:
    """Fifty prompts: a few-shot job over 25 reviews, and 25 raw texts."""
    reviews = [EXAMPLES + opening.format(film) + "\nLabel:" for film in FILMS for opening in OPENINGS]
    raw = [question.format(thing) for question in QUESTIONS for thing in THINGS]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in raw[:7]]
    return reviews + raw + chats


@pytest.mark.slow
def test_greedy_text_equals_transformers_on_fifty_prompts(smollm2: Path) -> None:
    tokenizer = gguf_tokenizer(smollm2).tokenizer
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in prompts()]
    assert len(ids) == 50
    config = EngineConfig(device="cpu", dtype="float32", max_length=256, page_size=16, poison_freed_pages=True)
    engine = Engine.load(smollm2, config)
    requests = [Request(i, prompt, SamplingParams(max_tokens=12)) for i, prompt in enumerate(ids)]
    done = {completion.request_id: completion for completion in engine.generate(requests)}
    engine.check()
    assert engine.stats.cached_tokens > 24 * 48, "the examples are computed once"

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    for i, prompt in enumerate(ids):
        tokens = list(done[i].token_ids) + ([] if done[i].stop_token_id is None else [done[i].stop_token_id])
        assert tokens
        # Our tokens are the greedy ones exactly when each is the likeliest after the prompt and those before it.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
        assert logits.argmax(-1).tolist() == tokens, tokenizer.decode(prompt)
