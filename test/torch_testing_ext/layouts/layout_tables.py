"""Trainings under layouts as tables: what is told of each planted mistake, and what nothing is told of."""

import functools

import layout_mistakes as others
import layout_mistakes_of_trainers as trainers
import layout_programs as programs
import layout_programs_of_torch as of_torch

# Kinds of mistakes that people have reported, by number.
KINDS = {
    1: "a router's gradient is not reduced over tp",
    2: "gradients of experts are multiplied by ep",
    3: "the loss is multiplied by tp",
    4: "the loss is divided by sp once too often",
    5: "the loss is multiplied by cp, and averaged again",
    6: "labels are shifted behind the cut of cp",
    7: "the norm counts replicated parameters once for each rank",
    8: "a tied embedding counts twice under pp",
    9: "the gradient of a norm layer is not reduced under sequence parallel",
    10: "a copy is reduced",
    11: "the backward of a norm runs before the all-to-all",
    12: "padded rows of the vocabulary are in the loss",
    13: "attention beside the ring",
    14: "a reduction over one of two groups",
    15: "pipelines divide after the backward",
    16: "what is accumulated is rescaled each time",
    17: "dropout is alike where ranks have parts, or unlike where they have the same",
    18: "weights are seeded by rank",
    19: "a mean of means over uneven parts",
    20: "clipping by the norm of the own part",
    21: "an auxiliary loss is averaged over the wrong group",
    22: "a sample is used twice, or never",
    23: "moments are dropped at loading",
    24: "parameters are not synchronised after loading",
    25: "a mapping is overwritten when parts are joined",
    26: "a scheduler or a generator is not restored",
    27: "the loss is divided by the counts of the own tokens",
    28: "a scatter over another group",
    29: "a parameter that is cut by heads is left out of the norm",
    30: "gradients of experts are counted too little under ep and tp",
    31: "an auxiliary loss is divided by cp",
    32: "an offset is dropped, so that its gradient is zero",
    33: "the learning rate is multiplied by dp",
    34: "a fused weight is cut into chunks, and not each of its parts",
    35: "a parameter is frozen by the cut",
    36: "tied weights are two after the cut",
    37: "a norm of the own heads, in place of all",
    38: "the loss that balances experts is behind the copy over tp",
    39: "rotary positions begin at 0 in each rank of cp",
    40: "experts have room for the own tokens, and not for those of all",
    41: "the bias of experts follows the own counts",
    42: "padding is in the number by which the loss is divided",
    43: "a reduction takes the maximum",
    44: "norms decay",
    45: "a gradient is read at a wrong offset of its bucket",
    46: "a local tensor of a DTensor without grad_placements",
    47: "the loss of the last microbatch alone is said",
    48: "gradients that accumulate are reduced after each microbatch",
    49: "a parameter is not sent to ranks that do not own its states",
    50: "a loader takes the rank for the place on dp",
    51: "labels of another microbatch",
    52: "the gradient of a microbatch is lost between stages",
    53: "the norm is the sum of the norms of ranks",
    54: "a scheduler steps twice on a rank",
    55: "states are made by a step that counts",
    56: "neighbours of a position are behind the cut",
    57: "tokens of experts are put back in another order",
}
HAND, TORCH_CUT, HEADS = programs.train_by_hand, others.train_sharded, others.train_heads
STAGES, POSITIONS, DISPATCHING = others.train_stages, others.train_positions, others.train_dispatching
MIXING = others.train_mixing
BALANCED, PARTS = programs.train_balanced, others.train_accumulating_ddp
ROUTING, IN_PARTS, HALVES = trainers.train_routing, trainers.train_in_parts, trainers.train_halves
EXPERTS, BOTH = programs.train_experts, programs.train_experts_and_tensors

# The kind of mistake, a training, its mistakes, the layout that shows them; tensor, kind and axis of what is told.
PLANTED = (
    (1, EXPERTS, ("unreduced router",), "tp=2", "moe.router.bias", "missing_sum", "tp"),
    (1, HAND, ("unreduced input",), "tp=2", "blocks.1.norm.bias", "missing_sum", "tp"),
    (2, EXPERTS, ("experts times ep",), "ep=2", "moe.experts.3.bias", "times", "ep"),
    (3, HAND, ("loss times tp",), "tp=2", "loss", "times", "tp"),
    (4, programs.train_sequence, ("loss divided by sp",), "tp=2", "loss", "divided", "tp"),
    (5, programs.train_context, ("loss times cp",), "cp=2", "2.bias", "times", "cp"),
    (7, HAND, ("norm counts replicas",), "tp=2", "norm", "norm", "tp"),
    (8, programs.train_pipeline, ("tied twice",), "pp=2", "embedding.weight", "times", "pp"),
    (8, programs.train_pipeline, ("tied unreduced",), "pp=2", "embedding.weight", "missing_sum", "pp"),
    (9, programs.train_sequence, ("unreduced norm",), "tp=2", "block.norm.bias", "missing_sum", "tp"),
    (10, HAND, ("reduced copy",), "dp=2", "head.weight", "missing_sum", "dp"),
    (14, BOTH, ("reduced over one group",), "ep=2 tp=2", "moe.router.bias", "missing_sum", "ep"),
    (14, HAND, ("unreduced dp",), "dp=2", "head.bias", "missing_sum", "dp"),
    (14, HAND, ("unreduced head",), "dp=2", "head.weight", "missing_sum", "dp"),
    (15, programs.train_pipeline, ("divided once more",), "pp=2", "loss", "divided", "pp"),
    (15, programs.train_pipeline, ("divided after backward",), "pp=2", "blocks.1.down.weight", "divided", "pp"),
    (16, programs.train_accumulating, ("rescaled",), "dp=2", "head.bias", "weighted", "microbatches"),
    (16, programs.train_accumulating, ("not cleared",), "dp=2", "head.bias", "stale", ""),
    (17, programs.train_dropping, ("dropout alike",), "tp=2", "call 0", "dropout_alike", "tp"),
    (17, HAND, ("dropout", "dropout unlike"), "tp=2", "call 0", "dropout_unlike", "tp"),
    (18, HAND, ("seeded by rank",), "tp=2", "head.weight", "unlike", "tp"),
    (19, HAND, ("mean of means",), "dp=2", "loss", "weighted", "dp"),
    (20, HAND, ("local norm",), "tp=2", "norm", "norm_local", "tp"),
    (21, BALANCED, ("balance over tp",), "dp=2 tp=2", "balance", "unlike", "dp"),
    (21, EXPERTS, ("auxiliary times ep",), "ep=2", "balance", "times", "ep"),
    (21, BALANCED, ("own balance", "in full"), "dp=2", "balance", "times", "dp"),
    (22, programs.train_with_own_loader, ("a sample twice",), "dp=2", "samples", "samples", "dp"),
    (23, HAND, ("moments lost",), "dp=2 -> dp=2", "the optimizer's state", "state_lost", ""),
    (24, HAND, ("loaded by one rank",), "dp=2 -> dp=2", "embedding.weight", "not_loaded", "dp"),
    (25, HAND, ("mapping overwritten",), "tp=2 -> single", "blocks.0.up.weight", "rows", ""),
    (26, HAND, ("scheduler lost",), "dp=2 -> dp=2", "embedding.weight", "update", ""),
    (26, others.train_normalised, ("generator not restored",), "dp=2 -> dp=2", "samples", "samples", "dp"),
    (27, HAND, ("local token counts",), "dp=2", "loss", "weighted", "dp"),
    (28, HAND, ("scattered over another group",), "tp=2", "blocks.0.up.weight", "uncovered", ""),
    (29, HAND, ("norm omits head",), "tp=2", "norm", "norm_omits", ""),
    (29, HEADS, ("norm omits sinks",), "tp=2", "norm", "norm_omits", ""),
    (30, EXPERTS, ("experts divided by ep",), "ep=2", "moe.experts.3.bias", "divided", "ep"),
    (30, BOTH, ("experts without tp",), "ep=2 tp=2", "moe.experts.3.bias", "missing_sum", "tp"),
    (30, BOTH, ("experts divided by tp",), "ep=2 tp=2", "moe.experts.3.bias", "divided", "tp"),
    (31, BALANCED, ("balance divided by cp",), "cp=2", "balance", "divided", "cp"),
    (31, BALANCED, ("balance divided by dp",), "dp=2", "balance", "divided", "dp"),
    (31, BALANCED, ("only said",), "dp=2", "balance", "divided", "dp"),
    (32, HAND, ("offset dropped",), "tp=2", "blocks.1.offset", "zero", ""),
    (33, HAND, ("learning rate times dp",), "dp=2", "embedding.weight", "update", "dp"),
    (35, ROUTING, ("frozen by the cut",), "tp=2", "attention.q_scale", "zero", ""),
    (36, ROUTING, ("tie broken",), "tp=2", "embedding.weight", "untied", ""),
    (41, ROUTING, ("bias by own counts",), "dp=2", "experts.expert_bias", "unlike", "dp"),
    (42, ROUTING, ("padding counts",), "dp=2", "loss", "padding", ""),
    (43, IN_PARTS, ("largest gradient",), "dp=2", "head.bias", "operation", "dp"),
    (44, ROUTING, ("norms decay",), "dp=2", "attention.q_scale", "decay", ""),
    (45, ROUTING, ("bucket off by one",), "dp=2", "attention.qkv.weight", "displaced", ""),
    (46, trainers.train_local, ("no grad_placements",), "tp=2", "norm.weight", "missing_sum", "tp"),
    (48, IN_PARTS, ("reduced after each part",), "dp=2", "head.bias", "weighted", "dp"),
    (49, IN_PARTS, ("last parameter not sent",), "dp=2", "head.bias", "update", "dp"),
    (50, trainers.train_loading, ("place by rank",), "dp=2 tp=2", "samples", "samples", "dp"),
    (53, HAND, ("norms added",), "tp=2", "norm", "operation", "tp"),
    (54, HAND, ("scheduler twice on a rank",), "dp=2", "embedding.weight", "update", "dp"),
    (55, HAND, ("states made by a step",), "tp=2", "step of embedding.weight", "steps", ""),
)
# The same kinds in other models, on other axes, by other factors, of biases, with other optimizers.
VARIANTS = (
    (1, DISPATCHING, ("router over ep alone",), "dp=2 ep=2", "moe.router.weight", "missing_sum", "dp"),
    (2, DISPATCHING, ("experts times ep twice",), "ep=4", "moe.w2", "squared", "ep"),
    (3, HEADS, ("bias reduced over tp",), "tp=4", "blocks.1.bias", "times", "tp"),
    (3, HEADS, ("input reduced twice",), "tp=2", "blocks.1.norm.weight", "times", "tp"),
    (4, TORCH_CUT, ("loss is not scaled",), "dp=4", "head.weight", "divided", "dp"),
    (5, POSITIONS, ("averaged over cp",), "dp=2 cp=3", "head.bias", "divided", "cp"),
    (7, HEADS, ("norm counts ranks",), "dp=2", "norm", "norm", "dp"),
    (9, POSITIONS, ("head bias over dp alone",), "dp=2 cp=3", "head.bias", "missing_sum", "cp"),
    (14, TORCH_CUT, ("only sharded",), "dp_replicate=2 dp_shard=2", "head.weight", "missing_mean", "dp_replicate"),
    (14, TORCH_CUT, ("head is ignored",), "dp=2", "head.weight", "missing_mean", "dp"),
    (14, PARTS, ("never reduced",), "dp=2", "head.weight", "missing_mean", "dp"),
    (15, STAGES, ("divided by stages",), "pp=2", "head.weight", "divided", "pp"),
    (15, STAGES, ("torch scales",), "pp=2", "head.weight", "divided", "microbatches"),
    (16, PARTS, ("not divided by parts",), "dp=2", "head.weight", "times", "microbatches"),
    (16, programs.train_accumulating, ("cleared before each part",), "dp=2", "head.bias", "weighted", "microbatches"),
    (45, ROUTING, ("bucket in reverse",), "dp=2", "norm.weight", "displaced", ""),
    (18, HEADS, ("bias by rank",), "dp=2", "blocks.1.bias", "unlike", "dp"),
    (18, HEADS, ("blocks swapped",), "tp=2", "blocks.0.bias", "other_tensor", ""),
    (19, TORCH_CUT, ("mean of means",), "dp=4", "loss", "weighted", ""),
    (20, STAGES, ("norm of a stage",), "pp=2", "norm", "norm_local", "pp"),
    (20, HEADS, ("local norm",), "dp=2 tp=2", "norm", "norm_local", "tp"),
    (21, BALANCED, ("balance over cp",), "dp=2 cp=3", "balance", "unlike", "dp"),
    (22, programs.train_with_own_loader, ("sampler without ranks",), "dp=2", "samples", "samples", "dp"),
    (
        23,
        others.train_watched,
        ("moments of the head lost",),
        "dp=2 -> dp=2",
        "the optimizer's state",
        "state_lost",
        "",
    ),
    (27, PARTS, ("parts by their own counts",), "dp=2", "loss", "weighted", ""),
    (28, STAGES, ("layers swapped",), "pp=2", "layers.0.w1.weight", "other_tensor", "pp"),
    (29, HEADS, ("norm omits the bias",), "tp=4", "norm", "norm_omits", ""),
    (30, HEADS, ("averaged over tp",), "tp=4", "blocks.0.qkv", "divided", "tp"),
    (30, DISPATCHING, ("experts by the root of ep",), "ep=2", "moe.w2", "sqrt", "ep"),
    (30, DISPATCHING, ("experts reduced",), "ep=2", "moe.w2", "parts_reduced", "ep"),
    (31, POSITIONS, ("z divided by cp",), "cp=3", "z", "divided", "cp"),
    (32, POSITIONS, ("keys cut off",), "cp=3", "wk.weight", "zero", ""),
    (32, HEADS, ("bias dropped",), "tp=2", "blocks.1.bias", "zero", ""),
    (33, TORCH_CUT, ("rate times the root of dp",), "dp=4", "embedding.weight", "update", ""),
)
# A mistake that no rule explains is told by where values first differ.
AFTERWARDS = "so it is what comes after: how gradients of parameters are computed"
LOSS = "it is the loss, or what it is given beside the model's output"
BY_MODULE = (
    (6, programs.train_context, ("labels shifted",), "cp=2", LOSS),
    (
        11,
        programs.train_exchanging,
        ("norm before the exchange",),
        "cp=2",
        "the gradient of the output of 1.mix; after that of 1,",
    ),
    (12, programs.train_vocabulary, ("padding in the loss",), "tp=2", LOSS),
    (13, programs.train_context, ("local attention",), "cp=2", "the output of 1; after that of 1.v"),
    (13, HAND, ("unreduced output",), "tp=2", "the output of blocks.0; after that of blocks.0.down"),
    (13, POSITIONS, ("positions from 0",), "cp=3", "the output of positions; after that of tokens"),
    (12, HEADS, ("others are not masked",), "tp=2", "the output of embedding"),
    (9, HEADS, ("bias on each rank",), "tp=2", "the output of blocks.0; after that of blocks.0.norm"),
    (17, others.train_normalised, ("own statistics",), "dp=2", "the output of 2; after that of 1"),
    (34, ROUTING, ("fused weight in chunks",), "tp=2", "the output of attention.out; after that of attention.qkv"),
    (37, ROUTING, ("norm of own heads",), "tp=2", "the output of attention.out; after that of attention.qkv"),
    (38, ROUTING, ("balance behind the copy",), "tp=2", "backward: the gradient of the output of experts.router"),
    (39, ROUTING, ("unlimited", "rotated from 0"), "cp=2", "attention.out; after that of attention.qkv"),
    (40, ROUTING, ("capacity of own tokens",), "dp=2", "the output of experts; after that of experts.router"),
    (43, ROUTING, ("largest gradient",), "dp=2", AFTERWARDS),
    (47, trainers.train_accumulating_sharded, ("only the last loss",), "dp=2", "only the number is wrong"),
    (51, HALVES, ("labels in another order",), "pp=2", LOSS),
    (
        1,
        HAND,
        ("unreduced input",),
        "tp=2",
        "output of blocks.1.norm has only a share on each rank, and that of blocks.1.up",
    ),
    (56, MIXING, ("own positions",), "cp=2", "the output of 2 differs only at positions 2 (rank 0) and 3 (rank 1)"),
    (56, MIXING, ("around",), "cp=2", "0 (rank 0) and 5 (rank 1): the ends of what ranks along cp have, where no rank"),
    (
        56,
        MIXING,
        ("no way back",),
        "cp=2",
        "the gradient of the output of 1 differs only at positions 2 (rank 0) and 3",
    ),
    (57, others.train_sorting, ("put back otherwise",), "dp=2", "the output of 2: row 1 has row"),
    (52, HALVES, ("first part lost",), "pp=2", "the gradient of the output of layers.0; after that of layers.1"),
)

# What one rank does otherwise, too: parts of trainings, and what is drawn by rank.
IN_REFERENCE = {"dropout", "own balance", "in full", "unlimited", "seeded by rank", "bias by rank"}


def planted(function, *mistakes):
    return lambda layout: function(layout, *mistakes)


def by_reference(table):
    """The rows of a table, in lists of those whose trainings are the same in one rank."""
    found = {}
    for row in table:
        _, function, mistakes, *_ = row
        found.setdefault((function, *sorted(IN_REFERENCE & {*mistakes})), []).append(row)
    return found.values()


def by_torch(parallelize, loads_first=True):
    return functools.partial(programs.train_torch, parallelize=parallelize, loads_first=loads_first)


# A training by its name, and its layouts.
WAYS = ("dp=2 tp=2", "tp=4", "tp=2 -> tp=2", "tp=2 -> dp=2", "dp=2 -> tp=2", "tp=2 -> single", "single -> tp=2")
BY_HAND = {
    "by hand": (HAND, *WAYS),
    "by hand, dropout": (planted(HAND, "dropout"), "tp=2", "dp=2"),
    "experts by hand": (EXPERTS, "tp=2", "ep=2", "ep=4"),
    "sequence": (programs.train_sequence, "tp=2"),
    "pipeline": (programs.train_pipeline, "pp=2"),
    "accumulating by hand": (programs.train_accumulating, "dp=2"),
    "own loader": (programs.train_with_own_loader, "dp=2", "dp=4"),
    "vocabulary": (programs.train_vocabulary, "tp=2"),
    "experts and tensors": (BOTH, "ep=2", "tp=2", "ep=2 tp=2"),
    "dropping": (programs.train_dropping, "tp=2"),
    "balanced": (BALANCED, "dp=2"),
    "own balance": (planted(BALANCED, "own balance"), "dp=2"),
    "dense, ddp": (by_torch(programs.ddp), "dp=2"),
    "dense, fsdp2": (by_torch(programs.fsdp2), "dp=2", "dp=4"),
    "dense, fsdp2, loaded when it is cut": (by_torch(programs.fsdp2, False), "dp=2"),
    "dense, fsdp2 in one rank, too": (by_torch(programs.fsdp2_of_one, False), "dp=2"),
    "dense, tp": (by_torch(programs.tensor_parallel), "tp=2"),
    "dense, tp and fsdp2": (by_torch(programs.tensor_parallel_and_fsdp2), "dp=2 tp=2"),
    "sharded": (TORCH_CUT, "dp=4", "dp_replicate=2 dp_shard=2"),
    "accumulating three parts": (PARTS, "dp=2"),
    "heads": (HEADS, "tp=2", "tp=4", "dp=2 tp=2"),
    "stages": (STAGES, "pp=2", "pp=4"),
    "dispatching": (DISPATCHING, "ep=4", "dp=2 ep=2"),
    "normalised": (others.train_normalised, "dp=2", "dp=2 -> dp=4", "dp=2 -> single"),
    "watched": (others.train_watched, "dp=2", "dp=2 -> dp=2", "dp=4 -> single"),
}
SOUND = {
    **BY_HAND,
    "balanced over positions": (BALANCED, "cp=2"),
    "context": (programs.train_context, "cp=2"),
    "exchanging": (programs.train_exchanging, "cp=2"),
    "mixing": (MIXING, "cp=2", "dp=2 cp=2"),
    "sorting": (others.train_sorting, "dp=2", "dp=4"),
    "positions": (POSITIONS, "cp=3", "dp=2 cp=3"),
    "routing": (ROUTING, "tp=2", "dp=2", "dp=2 tp=2"),
    "routing over positions": (planted(ROUTING, "unlimited"), "cp=2"),
    "local tensors": (trainers.train_local, "tp=2"),
    "accumulating, fsdp2": (trainers.train_accumulating_sharded, "dp=2"),
    "in parts": (IN_PARTS, "dp=2"),
    "own places": (trainers.train_loading, "dp=2 tp=2"),
    "halves": (HALVES, "pp=2"),
    **of_torch.SOUND,
}
