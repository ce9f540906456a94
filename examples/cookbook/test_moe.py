"""Mixture of experts: tokens travel to the rank of their expert and back, with uneven splits.

Run it: pytest examples/cookbook/test_moe.py
"""

import pytest
import torch
import torch.distributed as dist


def exchange(tokens, send, receive):
    arrived = tokens.new_empty((sum(receive), tokens.shape[1]))
    dist.all_to_all_single(arrived, tokens, receive, send)
    return arrived


def apply_experts(tokens, expert_of_token, expert):
    """Send each token to the rank of its expert, apply `expert` there, and bring the results back in order."""
    size = dist.get_world_size()
    order = expert_of_token.argsort(stable=True)
    send = torch.bincount(expert_of_token, minlength=size)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    send, receive = send.tolist(), receive.tolist()
    results = exchange(expert(exchange(tokens[order], send, receive)), receive, send)
    back = torch.empty_like(results)
    back[order] = results
    return back


@pytest.mark.world_size([1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 5, 64])
def test_every_token_meets_its_expert(dist_env, tokens):
    # Rank r's expert multiplies by r + 1.
    torch.manual_seed(dist_env.rank)
    mine = torch.randn(tokens, 3, device=dist_env.device)
    expert_of_token = torch.randint(dist_env.world_size, (tokens,), device=dist_env.device)
    results = apply_experts(mine, expert_of_token, lambda x: x * (dist_env.rank + 1))
    torch.testing.assert_close(results, mine * (expert_of_token + 1)[:, None])
