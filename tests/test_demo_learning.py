"""The demonstration's model, task and learner, without any network."""

from __future__ import annotations

import copy
from collections import deque
from itertools import product

import pytest
import torch

from aiosync.demo.learner import Learner, LearnerConfig, Rollouts, group_advantages
from aiosync.demo.model import TinyConfig, TinyModel
from aiosync.demo.task import SortTask

TASK = SortTask(digits=6, count=4)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sample(learner: Learner, model: TinyModel, generator: torch.Generator) -> Rollouts:
    prompts = learner.make_prompts()
    tokens, logprobs = model.generate(prompts, learner.task.count, generator=generator)
    return Rollouts(prompts=prompts, tokens=tokens, logprobs=logprobs)


@pytest.mark.parametrize(
    ("digits", "answer", "reward", "credit"),
    [
        ([3, 1, 2, 0], [0, 1, 2, 3], 1.0, [1, 1, 1, 1]),
        ([3, 1, 2, 0], [3, 1, 2, 0], 0.5, [0, 1, 1, 0]),
        ([3, 1, 2, 0], [3, 2, 1, 0], 0.0, [0, 0, 0, 0]),
        ([5, 5, 1, 5], [1, 5, 5, 5], 1.0, [1, 1, 1, 1]),
        ([5, 5, 1, 5], [5, 5, 5, 5], 0.75, [0, 1, 1, 1]),
        ([4, 4, 4, 4], [6, 6, 6, 6], 0.0, [0, 0, 0, 0]),  # separators are no digits
        ([0, 0, 0, 1], [0, 0, 0, 6], 0.75, [1, 1, 1, 0]),
    ],
)
def test_reward(digits, answer, reward, credit):
    prompt = torch.tensor([[*digits, TASK.separator]])
    answers = torch.tensor([answer])
    assert TASK.reward(prompt, answers).tolist() == [reward]
    assert TASK.credit(prompt, answers).tolist() == [credit]


def test_full_reward_only_for_the_sorted_digits():
    task = SortTask(digits=3, count=3)
    answers = torch.tensor(list(product(range(task.vocabulary), repeat=3)))
    for digits in product(range(3), repeat=3):
        prompts = torch.tensor([[*digits, task.separator]]).expand(len(answers), -1)
        rewards = task.reward(prompts, answers)
        assert ((rewards >= 0) & (rewards <= 1)).all()
        assert answers[rewards == 1].tolist() == [sorted(digits)]


def test_prompts_and_their_text():
    prompts = TASK.prompts(50, torch.Generator().manual_seed(1))
    assert prompts.shape == (50, TASK.prompt_length)
    assert (prompts[:, -1] == TASK.separator).all()
    assert set(prompts[:, :-1].unique().tolist()) == set(range(TASK.digits))
    assert torch.equal(prompts, TASK.prompts(50, torch.Generator().manual_seed(1)))
    line = TASK.show(torch.tensor([3, 1, 2, 0, 6]), torch.tensor([0, 1, 2, 3]))
    assert line == "3 1 2 0 > 0 1 2 3"


def tiny(seed: int = 0, context: int = 9) -> TinyModel:
    return TinyModel(TinyConfig(vocabulary=7, context=context, width=16, heads=2, seed=seed))


def test_equal_configurations_give_equal_weights_and_leave_the_random_state():
    state = torch.get_rng_state()
    first, second, other = tiny(), tiny(), tiny(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not list(first.buffers())
    weights = first.state_dict()
    assert all(torch.equal(weights[name], w) for name, w in second.state_dict().items())
    assert not torch.equal(weights["head.weight"], other.head.weight)
    assert first.head.weight.data_ptr() != first.tokens.weight.data_ptr()


def test_generate_is_deterministic_and_shaped():
    model = tiny()
    prompts = TASK.prompts(5, torch.Generator().manual_seed(0))
    tokens, logprobs = model.generate(prompts, 4, generator=torch.Generator().manual_seed(3))
    again, _ = model.generate(prompts, 4, generator=torch.Generator().manual_seed(3))
    others, _ = model.generate(prompts, 4, generator=torch.Generator().manual_seed(4))
    assert tokens.shape == logprobs.shape == (5, 4)
    assert tokens.dtype == torch.int64
    assert not logprobs.requires_grad
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, others)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_logprobs_are_those_of_the_sampled_tokens(temperature):
    model = tiny()
    torch.nn.init.normal_(model.head.weight)
    prompts = TASK.prompts(6, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs = model.generate(prompts, 4, temperature=temperature, generator=generator)
    logits = model(torch.cat((prompts, tokens), dim=1))[:, TASK.prompt_length - 1 : -1]
    expected = (logits / temperature).log_softmax(dim=-1).gather(2, tokens.unsqueeze(2))
    torch.testing.assert_close(logprobs, expected.squeeze(2).detach())


def test_temperature_zero_takes_the_likeliest_token():
    model = tiny()
    torch.nn.init.normal_(model.head.weight)
    prompts = TASK.prompts(6, torch.Generator().manual_seed(0))
    tokens, _ = model.generate(prompts, 1, temperature=0)
    assert torch.equal(tokens, model(prompts)[:, -1].argmax(dim=-1, keepdim=True))


def test_the_model_is_causal():
    model = tiny()
    tokens = torch.tensor([[1, 2, 3, 4]])
    changed = torch.tensor([[1, 2, 3, 0]])
    torch.testing.assert_close(model(tokens)[:, :3], model(changed)[:, :3])


def test_refusals_name_what_does_not_fit():
    with pytest.raises(ValueError, match="multiple of heads"):
        TinyConfig(vocabulary=7, context=9, width=10, heads=4)
    with pytest.raises(ValueError, match="context of 9"):
        tiny().generate(torch.zeros(1, 5, dtype=torch.int64), 5)
    learner = Learner(LearnerConfig(task=TASK))
    prompts = learner.make_prompts()
    answers = torch.zeros(len(prompts), 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rollouts\.logprobs has shape"):
        learner.learn(Rollouts(prompts=prompts, tokens=answers, logprobs=torch.zeros(3, 4)))
    with pytest.raises(ValueError, match=r"rollouts\.prompts has shape"):
        learner.learn(Rollouts(prompts=prompts[:0], tokens=answers[:0], logprobs=answers[:0]))


def test_advantages_compare_equal_prompts_wherever_they_stand():
    prompts = torch.tensor([[0, 6], [1, 6], [0, 6], [1, 6]])
    credit = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    advantages = group_advantages(prompts, credit)
    assert advantages[1].tolist() == advantages[3].tolist() == [0.0, 0.0]
    assert advantages[0, 0] == -advantages[2, 0] > 0
    assert advantages[:, 1].tolist() == [0.0] * 4


def test_answers_all_alike_teach_nothing():
    learner = Learner(LearnerConfig(task=TASK, entropy=0.0))
    before = copy.deepcopy(learner.model.state_dict())
    prompts = learner.make_prompts()
    zeros = torch.zeros(len(prompts), TASK.count)
    learner.learn(Rollouts(prompts=prompts, tokens=zeros.long(), logprobs=zeros))
    assert all(torch.equal(before[name], w) for name, w in learner.model.state_dict().items())


def test_equal_seeds_learn_equally():
    def steps():
        learner = Learner(LearnerConfig(task=TASK, prompts=8), seed=5)
        generator = torch.Generator().manual_seed(5)
        return [learner.learn(sample(learner, learner.model, generator)) for _ in range(3)]

    assert steps() == steps()


def test_rewards_rise_though_answers_come_from_older_weights():
    seed = 0
    learner = Learner(seed=seed)
    sampler = TinyModel(learner.config.model(seed))
    generator = torch.Generator().manual_seed(seed)
    published = deque([copy.deepcopy(learner.model.state_dict())] * 2, maxlen=2)
    rewards = []
    for _ in range(20):
        sampler.load_state_dict(published[0])
        stats = learner.learn(sample(learner, sampler, generator))
        published.append(copy.deepcopy(learner.model.state_dict()))
        rewards.append(stats.reward)
    assert learner.step == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
