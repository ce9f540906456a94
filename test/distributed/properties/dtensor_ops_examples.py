"""The examples of test_dtensor_ops_properties.py, by value; choose_examples.py chose them."""

from torch.distributed.tensor import Partial, Replicate, Shard

from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, whole_numbers


def of_one(name, mesh, shape, placements):
    full = whole_numbers(shape)
    return {"name": name, "case": ((DTensorPlan(full, MeshPlan(mesh), placements),), (full,))}


def of_two(name, mesh, left_shape, left_placements, right_shape, right_placements):
    return {"name": name, **factors(mesh, left_shape, left_placements, right_shape, right_placements)}


def factors(mesh, left_shape, left_placements, right_shape, right_placements):
    left, right = whole_numbers(left_shape), whole_numbers(right_shape)
    plans = DTensorPlan(left, MeshPlan(mesh), left_placements), DTensorPlan(right, MeshPlan(mesh), right_placements)
    return {"case": (plans, (left, right))}


POINTWISE = [
    ("sin, sin has the right answer, a rank without rows", of_one("sin", (2, 2), (1,), (Shard(0), Replicate()))),
    ("relu, relu has the right answer, uneven shards", of_one("relu", (4, 1), (1, 7), (Shard(1), Partial()))),
    (
        "reciprocal, reciprocal has the right answer, a dim that 2 mesh dims shard",
        of_one("reciprocal", (1, 4), (1, 4, 7), (Shard(2), Shard(2))),
    ),
    ("div 2, div 2 has the right answer, mesh of 4", of_one("div 2", (4,), (1, 1, 1), (Shard(1),))),
    ("floor, floor has the right answer", of_one("floor", (4, 1), (1,), (Shard(0), Shard(0)))),
    ("nan_to_num, nan_to_num has the right answer", of_one("nan_to_num", (2, 2), (1, 4, 1), (Partial(), Shard(2)))),
    ("rsqrt, rsqrt has the right answer", of_one("rsqrt", (2, 2), (1, 5), (Shard(1), Replicate()))),
    ("sqrt, sqrt has the right answer", of_one("sqrt", (1, 4), (1, 2, 1), (Replicate(), Shard(0)))),
    ("full_like, full_like has the right answer", of_one("full_like", (1, 4), (7,), (Partial(), Shard(0)))),
    ("clamp, clamp has the right answer", of_one("clamp", (1, 4), (3, 2), (Shard(1), Shard(0)))),
    ("sign, sign has the right answer", of_one("sign", (4, 1), (7, 1, 2), (Shard(1), Shard(2)))),
    ("log1p, log1p has the right answer", of_one("log1p", (2, 2), (1, 1, 8), (Shard(1), Shard(1)))),
    ("round, round has the right answer", of_one("round", (4, 1), (1,), (Shard(0), Replicate()))),
    ("gelu, gelu has the right answer", of_one("gelu", (1, 4), (3, 1, 3), (Replicate(), Shard(2)))),
    ("dropout, dropout has the right answer", of_one("dropout", (1, 4), (4, 3, 1), (Shard(0), Shard(2)))),
    ("neg, neg has the right answer", of_one("neg", (4,), (1,), (Shard(0),))),
    ("lerp, lerp has the right answer", of_one("lerp", (2, 2), (1,), (Replicate(), Shard(0)))),
    ("mul_ 2, mul_ 2 has the right answer", of_one("mul_ 2", (4, 1), (1,), (Shard(0), Replicate()))),
    ("sigmoid, sigmoid has the right answer", of_one("sigmoid", (1, 4), (1,), (Replicate(), Shard(0)))),
    ("add_ 1, add_ 1 has the right answer", of_one("add_ 1", (1, 4), (1,), (Shard(0), Shard(0)))),
    ("threshold, threshold has the right answer", of_one("threshold", (2, 2), (1,), (Shard(0), Replicate()))),
    ("to double, to double has the right answer", of_one("to double", (2, 2), (1,), (Shard(0), Replicate()))),
    ("logical_not, logical_not has the right answer", of_one("logical_not", (4, 1), (1,), (Shard(0), Replicate()))),
    ("zeros_like, zeros_like has the right answer", of_one("zeros_like", (1, 4), (1,), (Shard(0), Shard(0)))),
    ("cos, cos has the right answer", of_one("cos", (4, 1), (1, 1, 1), (Shard(0), Partial()))),
    ("clone, clone has the right answer", of_one("clone", (2, 2), (1, 1, 1), (Shard(2), Shard(2)))),
    ("silu, silu has the right answer", of_one("silu", (1, 4), (1, 2, 2), (Partial(), Shard(2)))),
    ("pow, pow has the right answer", of_one("pow", (2, 2), (1, 7), (Shard(0), Replicate()))),
    ("remainder, remainder has the right answer", of_one("remainder", (2, 2), (1, 8), (Shard(0), Partial()))),
    ("softplus, softplus has the right answer", of_one("softplus", (4, 1), (2, 2, 1), (Shard(1), Replicate()))),
    ("add 1, add 1 has the right answer", of_one("add 1", (2, 2), (1, 5, 1), (Shard(1), Partial()))),
    ("exp, exp has the right answer", of_one("exp", (2, 2), (7, 1), (Shard(1), Replicate()))),
    ("leaky_relu, leaky_relu has the right answer", of_one("leaky_relu", (4, 1), (7, 1), (Shard(0), Replicate()))),
    ("hardtanh, hardtanh has the right answer", of_one("hardtanh", (1, 4), (7, 1, 1), (Shard(1), Shard(0)))),
    ("abs, abs has the right answer", of_one("abs", (2, 2), (1, 8, 5), (Shard(2), Replicate()))),
    ("gt, gt has the right answer", of_one("gt", (2, 2), (1,), (Replicate(), Partial()))),
    ("masked_fill, masked_fill has the right answer", of_one("masked_fill", (4, 1), (2, 2), (Shard(1), Shard(1)))),
    ("erf, erf has the right answer", of_one("erf", (4,), (1, 4, 3), (Shard(2),))),
    ("to bfloat16, to bfloat16 has the right answer", of_one("to bfloat16", (4,), (1, 7, 7), (Shard(1),))),
    ("to int, to int has the right answer", of_one("to int", (4,), (1,), (Shard(0),))),
    ("elu, elu has the right answer", of_one("elu", (4, 1), (1,), (Replicate(), Shard(0)))),
    ("square, square has the right answer", of_one("square", (1, 4), (1,), (Partial(), Replicate()))),
    ("ones_like, ones_like has the right answer", of_one("ones_like", (1, 4), (2,), (Replicate(), Shard(0)))),
    ("tanh, tanh has the right answer", of_one("tanh", (4, 1), (3,), (Shard(0), Shard(0)))),
    ("sub from 1, sub from 1 has the right answer", of_one("sub from 1", (4, 1), (2,), (Shard(0), Replicate()))),
    ("isnan, isnan has the right answer", of_one("isnan", (4,), (3, 1), (Replicate(),))),
    ("mul 2, mul 2 has the right answer", of_one("mul 2", (2, 2), (7,), (Shard(0), Replicate()))),
    ("eq, eq has the right answer", of_one("eq", (4, 1), (2, 2, 4), (Shard(1), Replicate()))),
    ("where, where has the right answer", of_one("where", (1, 4), (2, 8, 2), (Replicate(), Shard(0)))),
    ("bitwise_and, bitwise_and has the right answer", of_one("bitwise_and", (4,), (1,), (Partial(),))),
]
REDUCTIONS = [
    ("norm 1, norm 1 has the right answer, uneven shards", of_one("norm 1", (2, 2), (1, 3), (Shard(0), Shard(1)))),
    ("all, all has the right answer, sharded dim 2", of_one("all", (1, 4), (1, 5, 1), (Partial(), Shard(2)))),
    ("amin has an answer or a refusal, amin, mesh of 4 x 1", of_one("amin", (4, 1), (1,), (Shard(0), Replicate()))),
    (
        "amax of a dim has an answer or a refusal, amax of a dim, a dim that 2 mesh dims shard",
        of_one("amax of a dim", (1, 4), (1,), (Shard(0), Shard(0))),
    ),
    ("layer_norm, layer_norm has the right answer, mesh of 4", of_one("layer_norm", (4,), (1, 3, 7), (Shard(2),))),
    ("prod, prod has the right answer", of_one("prod", (1, 4), (1, 7), (Replicate(), Shard(1)))),
    (
        "log_softmax, log_softmax has the right answer",
        of_one("log_softmax", (2, 2), (1, 3, 1), (Replicate(), Shard(2))),
    ),
    ("softmax, softmax has the right answer", of_one("softmax", (2, 2), (1,), (Shard(0), Partial()))),
    (
        "sum of a dim, sum of a dim has the right answer",
        of_one("sum of a dim", (4, 1), (7, 4, 7), (Shard(0), Shard(0))),
    ),
    ("norm, norm has the right answer", of_one("norm", (2, 2), (1, 5), (Shard(1), Partial()))),
    ("std, std has the right answer", of_one("std", (4,), (1,), (Shard(0),))),
    ("median, median has the right answer", of_one("median", (4, 1), (1,), (Shard(0), Partial()))),
    ("logsumexp, logsumexp has the right answer", of_one("logsumexp", (2, 2), (1,), (Shard(0), Shard(0)))),
    ("cummax, cummax has the right answer", of_one("cummax", (4, 1), (1, 5), (Shard(0), Replicate()))),
    ("argmin has an answer or a refusal, argmin", of_one("argmin", (1, 4), (1, 1, 8), (Replicate(), Shard(1)))),
    ("sort, sort has the right answer", of_one("sort", (4, 1), (1,), (Shard(0), Replicate()))),
    ("norm inf has an answer or a refusal, norm inf", of_one("norm inf", (4, 1), (1,), (Shard(0), Replicate()))),
    ("any, any has the right answer", of_one("any", (2, 2), (1, 1), (Replicate(), Shard(0)))),
    ("sum kept, sum kept has the right answer", of_one("sum kept", (4, 1), (1,), (Shard(0), Replicate()))),
    ("max of a dim, max of a dim has the right answer", of_one("max of a dim", (2, 2), (1,), (Replicate(), Shard(0)))),
    (
        "softmax of the first dim, softmax of the first dim has the right answer",
        of_one("softmax of the first dim", (2, 2), (1,), (Shard(0), Replicate())),
    ),
    ("min of a dim, min of a dim has the right answer", of_one("min of a dim", (2, 2), (1, 4), (Shard(1), Shard(1)))),
    (
        "norm of a dim, norm of a dim has the right answer",
        of_one("norm of a dim", (2, 2), (1, 5), (Shard(1), Replicate())),
    ),
    (
        "count_nonzero, count_nonzero has the right answer",
        of_one("count_nonzero", (2, 2), (1, 2, 1), (Partial(), Shard(0))),
    ),
    ("argmax has an answer or a refusal, argmax", of_one("argmax", (2, 2), (2, 1, 8), (Partial(), Shard(1)))),
    ("max has an answer or a refusal, max", of_one("max", (2, 2), (1, 5, 3), (Partial(), Shard(1)))),
    ("nansum, nansum has the right answer", of_one("nansum", (1, 4), (1,), (Replicate(), Partial()))),
    ("kthvalue, kthvalue has the right answer", of_one("kthvalue", (2, 2), (3,), (Shard(0), Partial()))),
    ("mean kept, mean kept has the right answer", of_one("mean kept", (4, 1), (3, 1, 2), (Replicate(), Shard(2)))),
    ("cumprod, cumprod has the right answer", of_one("cumprod", (4, 1), (1, 3, 7), (Partial(), Shard(1)))),
    (
        "mean of a dim, mean of a dim has the right answer",
        of_one("mean of a dim", (1, 4), (4, 2, 2), (Shard(2), Shard(2))),
    ),
    ("topk, topk has the right answer", of_one("topk", (2, 2), (2, 2, 7), (Shard(2), Shard(1)))),
    ("sum, sum has the right answer", of_one("sum", (4,), (1, 1), (Replicate(),))),
    ("var of a dim, var of a dim has the right answer", of_one("var of a dim", (4,), (1,), (Shard(0),))),
    ("sum of two dims, sum of two dims has the right answer", of_one("sum of two dims", (4,), (1,), (Shard(0),))),
    ("var, var has the right answer", of_one("var", (1, 4), (2,), (Replicate(), Shard(0)))),
    ("min has an answer or a refusal, min", of_one("min", (4, 1), (2,), (Shard(0), Shard(0)))),
    ("amax has an answer or a refusal, amax", of_one("amax", (1, 4), (2,), (Replicate(), Shard(0)))),
    ("mean, mean has the right answer", of_one("mean", (2, 2), (2,), (Shard(0), Shard(0)))),
    ("cumsum, cumsum has the right answer", of_one("cumsum", (1, 4), (4, 1, 8), (Shard(1), Partial()))),
    ("mse_loss, mse_loss has the right answer", of_one("mse_loss", (4, 1), (4,), (Shard(0), Replicate()))),
    ("argmin has the right answer", of_one("argmin", (4,), (3,), (Partial(),))),
    ("max has the right answer", of_one("max", (4,), (2, 7), (Shard(1),))),
    ("amin has a refusal", of_one("amin", (4,), (2, 3, 5), (Shard(2),))),
    ("argmax has the right answer", of_one("argmax", (4,), (3,), (Replicate(),))),
    ("amax has the right answer", of_one("amax", (4,), (7,), (Shard(0),))),
    ("amax of a dim has the right answer", of_one("amax of a dim", (4,), (3, 3, 2), (Replicate(),))),
    ("max has a refusal", of_one("max", (4,), (5, 5, 3), (Shard(0),))),
    ("min has the right answer", of_one("min", (4,), (4, 4, 7), (Replicate(),))),
    ("norm inf has the right answer", of_one("norm inf", (4,), (3, 8, 7), (Shard(1),))),
    ("amin has the right answer", of_one("amin", (4,), (3,), (Partial(),))),
]
VIEWS = [
    ("pad, pad has the right answer, a rank without rows", of_one("pad", (4, 1), (1,), (Shard(0), Replicate()))),
    (
        "cat of the last dim, cat of the last dim has the right answer, uneven shards",
        of_one("cat of the last dim", (2, 2), (1, 5, 1), (Shard(1), Partial())),
    ),
    (
        "tile, tile has the right answer, a dim that 2 mesh dims shard",
        of_one("tile", (1, 4), (3, 5), (Shard(1), Shard(1))),
    ),
    ("flip, flip has the right answer, sharded dim 2", of_one("flip", (4,), (3, 2, 1), (Shard(2),))),
    ("chunk, chunk has the right answer", of_one("chunk", (1, 4), (1, 7), (Replicate(), Shard(1)))),
    ("narrow, narrow has the right answer", of_one("narrow", (2, 2), (1,), (Shard(0), Shard(0)))),
    ("flatten has an answer or a refusal, flatten", of_one("flatten", (4, 1), (1, 2), (Shard(0), Partial()))),
    ("cat, cat has the right answer", of_one("cat", (2, 2), (1, 8, 5), (Shard(2), Replicate()))),
    ("movedim, movedim has the right answer", of_one("movedim", (1, 4), (7,), (Partial(), Shard(0)))),
    ("view has an answer or a refusal, view", of_one("view", (4, 1), (2, 1, 1), (Shard(0), Shard(0)))),
    (
        "select of the last dim, select of the last dim has the right answer",
        of_one("select of the last dim", (1, 4), (8, 1, 1), (Shard(1), Shard(2))),
    ),
    ("expand, expand has the right answer", of_one("expand", (4, 1), (8, 1), (Shard(1), Shard(0)))),
    ("triu, triu has the right answer", of_one("triu", (4, 1), (5, 1, 5), (Shard(2), Partial()))),
    ("permute, permute has the right answer", of_one("permute", (2, 2), (1, 1), (Replicate(), Shard(1)))),
    ("unbind has an answer or a refusal, unbind", of_one("unbind", (2, 2), (3, 1, 3), (Shard(2), Shard(2)))),
    ("tril, tril has the right answer", of_one("tril", (4,), (1,), (Shard(0),))),
    ("diagonal, diagonal has the right answer", of_one("diagonal", (4,), (1, 1), (Shard(1),))),
    ("roll, roll has the right answer", of_one("roll", (2, 2), (1,), (Shard(0), Replicate()))),
    ("slice, slice has the right answer", of_one("slice", (2, 2), (1,), (Shard(0), Replicate()))),
    ("split, split has the right answer", of_one("split", (2, 2), (1,), (Replicate(), Shard(0)))),
    ("repeat, repeat has the right answer", of_one("repeat", (4, 1), (1,), (Shard(0), Replicate()))),
    ("squeeze has an answer or a refusal, squeeze", of_one("squeeze", (2, 2), (1,), (Shard(0), Replicate()))),
    ("select, select has the right answer", of_one("select", (4, 1), (1,), (Shard(0), Partial()))),
    ("contiguous, contiguous has the right answer", of_one("contiguous", (2, 2), (1,), (Shard(0), Replicate()))),
    ("index_select, index_select has the right answer", of_one("index_select", (4, 1), (1,), (Shard(0), Replicate()))),
    (
        "slice of every second, slice of every second has the right answer",
        of_one("slice of every second", (2, 2), (1,), (Shard(0), Replicate())),
    ),
    ("unsqueeze, unsqueeze has the right answer", of_one("unsqueeze", (2, 2), (1, 5), (Replicate(), Shard(1)))),
    ("transpose, transpose has the right answer", of_one("transpose", (2, 2), (1, 7), (Shard(1), Replicate()))),
    ("view_as, view_as has the right answer", of_one("view_as", (2, 2), (3, 1, 2), (Partial(), Shard(0)))),
    ("unflatten, unflatten has the right answer", of_one("unflatten", (2, 2), (1,), (Replicate(), Partial()))),
    ("stack, stack has the right answer", of_one("stack", (2, 2), (2, 5), (Shard(1), Shard(1)))),
    ("flatten has the right answer", of_one("flatten", (4,), (3,), (Replicate(),))),
    ("unbind has the right answer", of_one("unbind", (4,), (3,), (Partial(),))),
    ("view has the right answer", of_one("view", (4,), (4,), (Replicate(),))),
    ("squeeze has the right answer", of_one("squeeze", (4,), (5, 5), (Partial(),))),
]
OF_TWO = [
    (
        "a dim that 2 mesh dims shard on the right, add, add has the right answer",
        of_two("add", (1, 4), (1,), (Replicate(), Shard(0)), (1,), (Shard(0), Shard(0))),
    ),
    (
        "uneven shards on the right, uneven shards on the left, sharded dim 1 on the right",
        of_two("where", (2, 2), (1, 5), (Shard(1), Partial()), (4, 5), (Shard(1), Partial())),
    ),
    (
        "sharded dim 2 on the left, sharded dim 2 on the right, minimum",
        of_two("minimum", (4, 1), (2, 4, 4), (Shard(2), Partial()), (2, 4, 1), (Shard(2), Replicate())),
    ),
    (
        "gt, gt has the right answer, mesh of 4 on the left",
        of_two("gt", (4,), (4, 1), (Shard(1),), (4, 1), (Shard(1),)),
    ),
    (
        "a dim that 2 mesh dims shard on the left, mul, mul has the right answer",
        of_two("mul", (2, 2), (8, 3, 1), (Shard(1), Shard(1)), (8, 3, 1), (Shard(1), Shard(1))),
    ),
    (
        "atan2, atan2 has the right answer",
        of_two("atan2", (4, 1), (1,), (Shard(0), Shard(0)), (1,), (Partial(), Replicate())),
    ),
    (
        "maximum, maximum has the right answer",
        of_two("maximum", (2, 2), (1, 4, 5), (Replicate(), Shard(0)), (2, 4, 5), (Shard(2), Partial())),
    ),
    (
        "sub, sub has the right answer",
        of_two("sub", (4, 1), (1, 2), (Shard(1), Replicate()), (2, 2), (Shard(0), Shard(0))),
    ),
    ("eq, eq has the right answer", of_two("eq", (1, 4), (7,), (Partial(), Shard(0)), (1,), (Replicate(), Shard(0)))),
    (
        "div, div has the right answer",
        of_two("div", (1, 4), (1, 2, 1), (Partial(), Shard(0)), (3, 2, 1), (Partial(), Shard(0))),
    ),
]
MATMUL = [
    (
        "sharded dim 2 on the right, uneven shards on the left, uneven shards on the right",
        factors((2, 2), (1, 7, 4), (Partial(), Shard(1)), (1, 4, 5), (Shard(0), Shard(2))),
    ),
    (
        "sharded dim 0 on the left, a rank without rows on the left, matmul of 2-D and 2-D",
        factors((4, 1), (2, 1), (Shard(0), Replicate()), (1, 5), (Shard(1), Replicate())),
    ),
    (
        "a dim that 2 mesh dims shard on the left, a dim that 2 mesh dims shard on the right",
        factors((1, 4), (1, 5, 4), (Shard(2), Shard(2)), (4, 1), (Shard(1), Shard(1))),
    ),
    (
        "mesh of 4 on the left, mesh of 4 on the right, 1-D on the right",
        factors((4,), (1, 2), (Shard(0),), (2,), (Partial(),)),
    ),
    ("matmul of a batch and a matrix has the right answer", factors((4,), (4, 7, 4), (Shard(1),), (4, 7), (Shard(1),))),
    ("matmul of a batch and a matrix has a refusal", factors((4,), (5, 5, 3), (Shard(0),), (3, 8), (Shard(0),))),
    (
        "mesh of 4 x 1 on the left with uneven shards on the left",
        factors((4, 1), (7, 7), (Shard(1), Shard(1)), (7,), (Shard(0), Shard(0))),
    ),
    (
        "a rank without rows on the left with mesh of 1 x 4 on the left",
        factors((1, 4), (3, 3, 3), (Replicate(), Shard(2)), (3, 3, 7), (Replicate(), Partial())),
    ),
]
