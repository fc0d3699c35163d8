"""Between what travels in messages and what the model takes."""

import torch

from control.messages import ModelIdentity, Sampling, Token
from engine.sampling import Sampled, SamplingParams
from hisparse.layout import KVLayout
from model.spec import ModelSpec


def sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        logprobs=sampling.top_logprobs or 0,
        want_logprobs=sampling.top_logprobs is not None,
    )


def token_message(sampled: Sampled) -> Token:
    return Token(token_id=sampled.token_id, logprob=sampled.logprob, top_logprobs=tuple(sampled.top or ()))


def kv_layout(spec: ModelSpec) -> KVLayout:
    return KVLayout(spec.num_layers, spec.index_layer_of, spec.item_dim, spec.index_dim, spec.dtype)


def identity(spec: ModelSpec) -> ModelIdentity:
    layout = kv_layout(spec)
    return ModelIdentity(
        fingerprint=spec.fingerprint,
        dtype=str(spec.dtype).removeprefix("torch."),
        num_layers=layout.num_layers,
        num_index_layers=layout.num_index_layers,
        item_bytes=layout.item_bytes,
        index_key_bytes=layout.index_key_bytes,
    )


def prompt_tensor(prompt_ids: tuple[int, ...] | list[int]) -> torch.Tensor:
    """int64, in host memory: who computes takes it to the device, and no loop waits for that."""
    return torch.tensor(prompt_ids, dtype=torch.int64)
