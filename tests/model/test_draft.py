"""The draft layer: what it drafts, what it stores, and checkpoints with and without it."""

import json
import shutil
from pathlib import Path

import pytest
import structlog
import torch
from damage import edit_config, edit_weights
from model_caches import PagedPool, PagedRequest, ResidentBatch
from networks import tensors_of
from plain_draft import PlainDraft
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from base.errors import StartupError
from kernels.operands import BlockFp8
from model.config import network_config
from model.families import FamilyName, ShapeName, published_config
from model.loader import has_draft_layer, load_model, read_spec
from model.network import Network
from model.passes import PrefillChunk
from model.roofline import RankModel, StepPart, work_of_chunk
from model.shard import Shard
from model.sparse_model import SparseModel
from model.tiny import write_tiny_checkpoint
from model.weights import RandomWeights
from tests.dequantised import write_dequantised

CPU = torch.device("cpu")
LENGTHS = (1, 2, 60, 63, 64, 150)
"""Of prompts: before and after the top-k of 64 positions."""
DRAFTS = 3
CHUNK = 40


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module", params=["as published", "float32"])
def stored(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint in block-fp8 or in float32, and one in float32 with the same weights."""
    if request.param == "float32":
        return checkpoint, checkpoint
    path = tmp_path_factory.mktemp("fp8")
    family: FamilyName = json.loads((checkpoint / "config.json").read_text())["model_type"]
    write_tiny_checkpoint(path / "fp8", family, seed=3, hidden_size=192, fp8=BlockFp8())
    write_dequantised(path / "fp8", path / "float32")
    return path / "fp8", path / "float32"


@torch.no_grad()
def expected_of(path: Path, prompt: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Hidden states of the drafts after a prompt, [DRAFTS, hidden_size], and the tokens that follow it: one of the
    network, then the drafts. The network is that of transformers, which has no such layer."""
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = prompt.unsqueeze(0)
    main = network.model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    tokens = [int(network.lm_head(main[-1]).argmax())]
    plain, found, reused = PlainDraft(path), [], None
    plain.add(torch.cat((prompt[1:], torch.tensor(tokens))), main)
    shares = plain.config.get("index_share_for_mtp_iteration", False)
    for _ in range(DRAFTS):
        hidden, selected = plain.outputs(reused)
        if shares and reused is None:
            reused = selected[-1]
        found.append(hidden[-1])
        tokens.append(int(plain.logits(hidden[-1]).argmax()))
        plain.add(torch.tensor(tokens[-1:]), hidden[-1:])
    return torch.stack(found), tokens


def prefilled(model: SparseModel, prompts: list[torch.Tensor], room: int) -> list[PagedRequest]:
    """Requests of one pool with the KV of all tokens but the last, computed in chunks."""
    pool = PagedPool(model.spec, num_pages=sum(-(-(len(prompt) + room) // 16) for prompt in prompts), page_size=16)
    requests = [PagedRequest(pool, len(prompt) + room) for prompt in prompts]
    for start in range(0, max(map(len, prompts)) - 1, CHUNK):
        model.prefill(
            [
                PrefillChunk.of(prompt, start, min(start + CHUNK, len(prompt) - 1), request)
                for prompt, request in zip(prompts, requests, strict=True)
                if start < len(prompt) - 1
            ]
        )
    return requests


def test_drafts_are_those_of_the_published_formula(stored: tuple[Path, Path]) -> None:
    path, exact = stored
    model, prompts = load_model(path, torch.float32, CPU, drafts=True), [prompt_of(length) for length in LENGTHS]
    requests = prefilled(model, prompts, DRAFTS)
    pool, positions = requests[0].pool, torch.tensor(LENGTHS) - 1
    ids = torch.stack([prompt[-1] for prompt in prompts])
    hidden = model.decode(ids, positions, ResidentBatch(pool, requests, positions.tolist()))
    ids = model.logits(hidden).argmax(-1)
    tokens, states = [ids], []
    for draft in range(DRAFTS):
        batch = ResidentBatch(pool, requests, positions.tolist())
        drafted = model.draft(ids, hidden, positions, batch, torch.arange(len(prompts)), reuse=draft > 0)
        assert drafted is not None
        hidden, ids, positions = drafted, model.logits(drafted).argmax(-1), positions + 1
        tokens.append(ids)
        states.append(hidden)
    for number, prompt in enumerate(prompts):
        expected, expected_tokens = expected_of(exact, prompt)
        assert [int(each[number]) for each in tokens] == expected_tokens
        torch.testing.assert_close(torch.stack(states)[:, number], expected, rtol=0, atol=1e-4)


def draft_kv(model: SparseModel, request: PagedRequest, tokens: int) -> list[torch.Tensor]:
    """Items and index keys of the draft layer."""
    number, rows = model.spec.draft_layer, request.rows(0, tokens)
    assert number is not None
    pools = request.kv(number), request.index_keys(model.spec.index_layer_of[number])
    return [pool[rows].view(torch.float32) for pool in pools]


def test_a_prompt_gets_the_entries_that_drafting_stores(drafting: SparseModel) -> None:
    prompt = prompt_of(100)
    [whole] = prefilled(drafting, [prompt], 0)
    [stepwise] = prefilled(drafting, [prompt[:70]], 30)
    for position in range(69, 99):
        ids, at = prompt[position : position + 1], torch.tensor([position])
        hidden = drafting.decode(ids, at, ResidentBatch(stepwise.pool, [stepwise], [position]))
        batch = ResidentBatch(stepwise.pool, [stepwise], [position])
        assert drafting.draft(prompt[position + 1 : position + 2], hidden, at, batch, None) is None
    for one, other in zip(draft_kv(drafting, whole, 99), draft_kv(drafting, stepwise, 99), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_only_picked_tokens_are_drafted_for(drafting: SparseModel) -> None:
    """Several tokens of each request are stored, and the hidden states of one each go on."""
    prompts, lengths = [prompt_of(length) for length in (90, 20)], (80, 18)
    hidden = [drafting.prefill([whole_chunk(drafting, prompt)], kv_only=False) for prompt in prompts]
    requests = prefilled(drafting, [prompt[:length] for prompt, length in zip(prompts, lengths, strict=True)], 10)
    of, at = [0, 0, 0, 1, 1, 1], [79, 80, 81, 17, 18, 0]
    picked = [1, 4]

    def draft(numbers: list[int], chosen: list[int]) -> torch.Tensor:
        owners, positions = [of[number] for number in numbers], [at[number] for number in numbers]
        cache = ResidentBatch(requests[0].pool, [requests[owner] for owner in owners], positions, chosen)
        found = drafting.draft(
            torch.stack([prompts[owner][position + 1] for owner, position in zip(owners, positions, strict=True)]),
            torch.stack([hidden[owner][position] for owner, position in zip(owners, positions, strict=True)]),
            torch.tensor(positions),
            cache,
            torch.tensor(chosen),
        )
        assert found is not None
        return found

    together = draft(list(range(6)), picked)
    alone = [draft([number], [0]) for number in (0, 1, 3, 4)]
    torch.testing.assert_close(together, torch.cat((alone[1], alone[3])), rtol=0, atol=1e-5)


def whole_chunk(model: SparseModel, prompt: torch.Tensor) -> PrefillChunk:
    pool = PagedPool(model.spec, num_pages=-(-len(prompt) // 16), page_size=16)
    return PrefillChunk.of(prompt, 0, len(prompt) - 1, PagedRequest(pool, len(prompt)))


def test_hidden_states_and_tokens_do_not_depend_on_the_draft_layer(drafting: SparseModel, model: SparseModel) -> None:
    prompt = prompt_of(80)
    states = [each.prefill([whole_chunk(each, prompt)], kv_only=False) for each in (drafting, model)]
    assert torch.equal(*states)
    assert (model.spec.draft_layer, model.network.draft) == (None, None)
    assert (drafting.spec.draft_layer, drafting.spec.num_layers) == (model.spec.num_layers, model.spec.num_layers + 1)
    assert drafting.spec.index_layer_of == (*model.spec.index_layer_of, model.spec.num_index_layers)


def test_repeated_tensors_are_loaded_once_and_nothing_is_left_unknown(checkpoint: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        network = load_model(checkpoint, torch.float32, CPU, drafts=True).network
    assert not any("not loaded" in entry["event"] or "not know" in entry["event"] for entry in logs)
    shapes = [tuple(tensor.shape) for tensor in tensors_of(network)]
    assert shapes.count(tuple(network.embedding.shape)) == 2, "the embedding and the head"


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged by the test."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


@pytest.mark.parametrize("lacks", ["weights", "configuration"])
def test_a_checkpoint_without_the_layer_serves_without_it(damaged: Path, lacks: str) -> None:
    if lacks == "weights":
        names = load_file(damaged / "model.safetensors")
        edit_weights(damaged, **{name: None for name in names if name.startswith("model.layers.5.")})
    else:
        edit_config(damaged, num_nextn_predict_layers=0)
    assert not has_draft_layer(damaged)
    model = load_model(damaged, torch.float32, CPU, drafts=True)
    assert (model.spec.draft_layer, model.network.draft, model.spec.num_layers) == (None, None, 5)


def test_a_layer_that_is_there_in_part_is_refused(damaged: Path) -> None:
    edit_weights(damaged, **{"model.layers.5.enorm.weight": None})
    assert load_model(damaged, torch.float32, CPU).spec.num_layers == 5
    with pytest.raises(StartupError, match=r"lacks 1 weights: model\.layers\.5\.enorm\.weight"):
        load_model(damaged, torch.float32, CPU, drafts=True)


def test_the_projection_stays_in_bfloat16_where_others_are_in_fp8() -> None:
    config = network_config(AutoConfig.for_model(**published_config("deepseek-v3.2", layers=4, routed_experts=8)))
    weights = RandomWeights(torch.device("meta"), torch.bfloat16, BlockFp8())
    draft = Network.load(weights, config, drafts=True).draft
    assert draft is not None
    assert (draft.projection.dtype, draft.layer.down.weight.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert draft.projection.shape == (7168, 2 * 7168)


def test_a_rank_has_its_part_of_the_experts(checkpoint: Path) -> None:
    drafts = [
        load_model(checkpoint, torch.float32, CPU, shard=Shard(rank, 2), drafts=True).network.draft for rank in (0, 1)
    ]
    whole = load_model(checkpoint, torch.float32, CPU, drafts=True).network.draft
    assert whole is not None
    parts = [draft.layer.mlp.gate_up.weight[:4] for draft in drafts if draft is not None]
    assert torch.equal(torch.cat(parts), whole.layer.mlp.gate_up.weight[:8])


def test_dummy_weights_have_the_layer(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    model = load_model(tmp_path / "m", torch.float32, CPU, load_format="dummy", drafts=True)
    assert model.network.draft is not None
    assert read_spec(tmp_path / "m", torch.float32, load_format="dummy", drafts=True) == model.spec


@pytest.mark.parametrize(
    ("shape", "billions", "shares"), [("deepseek-v3.2", 11.6, False), ("glm-5", 9.95, False), ("glm-5.2", 9.95, True)]
)
def test_published_layers_have_their_size(shape: ShapeName, billions: float, shares: bool) -> None:
    config = network_config(AutoConfig.for_model(**published_config(shape)))
    assert (config.draft_layers, config.drafts_share_selection) == (1, shares)
    draft = Network.load(RandomWeights(torch.device("meta"), torch.bfloat16), config, drafts=True).draft
    assert sum(tensor.numel() for tensor in tensors_of(draft)) == pytest.approx(billions * 1e9, rel=0.005)


def test_a_chunk_costs_the_last_layer_and_what_the_draft_layer_stores() -> None:
    config = network_config(AutoConfig.for_model(**published_config("deepseek-v3.2", layers=5, routed_experts=16)))
    without, with_drafts = (
        RankModel.build(
            config,
            ranks=1,
            fp8=False,
            context_length=4096,
            kv_cache_dtype="auto",
            device=torch.device("meta"),
            drafts=drafts,
        )
        for drafts in (False, True)
    )
    costs = [work_of_chunk(each, 4096, 1024, rank_of=1) for each in (without, with_drafts)]
    draft, last = with_drafts.network.draft, with_drafts.network.layers[-1]
    assert draft is not None
    more = costs[1][StepPart.PROJECTIONS][0].num_bytes - costs[0][StepPart.PROJECTIONS][0].num_bytes
    assert last.indexer is not None
    of_last = last.query_b.weight, last.indexer.query.weight, last.attention.out.weight
    maps = draft.projection, draft.layer.down.weight, *of_last
    assert more == sum(weight.nbytes for weight in maps)
    assert with_drafts.spec.kv_layout.token_bytes == without.spec.kv_layout.token_bytes * 6 / 5
