"""The models are seeded, tied and causal. The data is complete, and windows have the promised shape."""

import pytest
import torch

from shared.data import CharTokens, digits, text
from shared.models import MLP, GPTConfig, TinyGPT


@pytest.mark.parametrize(
    "build", [lambda seed: MLP(seed=seed), lambda seed: TinyGPT(seed=seed)], ids=["MLP", "TinyGPT"]
)
def test_a_seed_determines_the_weights_and_does_not_change_the_callers_random_numbers(build):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    weights = [torch.cat([p.detach().flatten() for p in build(seed).parameters()]) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_embedding_is_tied_and_counted_once():
    model = TinyGPT()
    assert model.output.weight is model.token_embedding.weight
    assert sum(parameter is model.output.weight for parameter in model.parameters()) == 1


def test_no_token_sees_the_future():
    model, tokens = TinyGPT().double(), torch.randint(96, (1, 20))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 96
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-12)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_the_gpt_learns_from_the_text():
    tokens = CharTokens()
    model = TinyGPT(GPTConfig(vocab_size=tokens.vocab_size, context=32, layers=1, width=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        starts = torch.randint(len(tokens.tokens) - 33, (16,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(*tokens.windows(starts, 32))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    uniform = torch.tensor(tokens.vocab_size).log().item()
    assert losses[0] == pytest.approx(uniform, abs=0.3) and losses[-1] < 0.75 * uniform


def test_the_text_is_ascii_english_of_the_promised_size():
    source = text()
    assert 200_000 < len(source) < 250_000 and source.isascii() and " the " in source


def test_tokens_decode_to_what_was_encoded():
    tokens = CharTokens("hello, world")
    assert tokens.decode(tokens.encode("world")) == "world"
    assert tokens.vocab_size == len(set("hello, world"))


def test_targets_are_the_inputs_shifted_by_one():
    tokens = CharTokens()
    inputs, targets = tokens.windows([0, 100], 16)
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("start", [-1, 10, 99])
def test_a_window_past_the_end_is_rejected(start):
    with pytest.raises(ValueError, match="does not fit"):
        CharTokens("0123456789").window(start, 4)


def test_digits_are_those_that_scikit_learn_loads():
    from sklearn.datasets import load_digits

    images, labels = digits(torch.float64)
    expected_images, expected_labels = load_digits(return_X_y=True)
    assert torch.equal(images * 16, torch.tensor(expected_images))
    assert torch.equal(labels, torch.tensor(expected_labels)) and labels.dtype == torch.int64


def test_digits_are_all_there_and_scaled():
    images, labels = digits()
    assert images.shape == (1797, 64) and labels.shape == (1797,)
    assert images.min() == 0 and images.max() == 1 and set(labels.tolist()) == set(range(10))
