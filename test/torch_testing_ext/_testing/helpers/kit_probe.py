"""Uses names of a test kit, PyTorch's or ours, and prints what each gives: run as `kit_probe.py KIT`.

A name that this version of PyTorch's kit lacks is left out.
"""

import functools
import importlib
import io
import json
import sys
import unittest

import probes_of_settings  # noqa: F401
import torch
from probes import PROBES, attempt, probe


class Kit:
    """The modules of a kit; a name may be in any of them."""

    def __init__(self, name):
        modules = ["common_utils", "common_cuda", "common_device_type", "distributed.multi_threaded_pg"]
        self.modules = [importlib.import_module(f"{name}.{module}") for module in modules]
        self.checkpoints = importlib.import_module(f"{name}.distributed.checkpoint_utils")

    def __getattr__(self, name):
        for module in self.modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


def outcome(kit, decorated):
    """Run a test, decorated as a function or with its class, whose setUp tells that it ran."""
    events = []
    if isinstance(decorated, type):
        cls = decorated
    else:
        cls = type("Case", (kit.TestCase,), {"test_it": decorated, "setUp": lambda self: events.append("setUp")})
    result = unittest.TestResult()
    unittest.TestLoader().loadTestsFromTestCase(cls).run(result)
    kinds = ("failures", "errors", "skipped", "expectedFailures", "unexpectedSuccesses")
    found = {kind: len(getattr(result, kind)) for kind in kinds if getattr(result, kind)}
    reasons = [reason for _, reason in result.skipped]
    return [events, found, reasons]


def marks(thing):
    return [mark.name for mark in getattr(thing, "pytestmark", [])]


def passes(self):
    pass


def fails(self):
    self.fail("no")


DECORATORS = [
    "requires_cuda",
    "requires_xpu",
    "requires_multigpu",
    "periodic",
    "requires_accelerator",
    "requires_mkl",
    "requires_onednn",
    "skipIfNoDill",
    "requires_cuda_python_bindings",
    "skipIfSlowGradcheckEnv",
    "skipIfCompiledWithoutNumpy",
    "skipIfCachingAllocatorDisabled",
    "skipIfNoLapack",
    "skipIfNoXNNPACK",
    "skipIfRocm_BUGGY",
    "skipIfXpu_BUGGY",
    "skipIfHpu_BUGGY",
    "xfailIfPy314Plus",
    "xfailIfPy313AndEarlier",
    "xfailIfACL",
    "xfailIfS390X",
    "recover_orig_fp32_precision",
    "with_ieee_matmul_precision",
    "setBlasBackendsToDefaultFinally",
    "setLinalgBackendsToDefaultFinally",
    "setSdpaBackendsToDefaultFinally",
    "wrapDeterministicFlagAPITest",
    "expectedFailureIfRocm",
    "requires_triton_ptxas_compat",
    "with_tf32_off",
    "xfailIfSM89",
    "xfailIfSM90",
    "xfailIfSM100OrLater",
    "xfailIfSM120OrLater",
    "xfailIfSM12X",
    "xfailIfSM89PreCUDA13",
    "xfailIfDistributedNotSupported",
]

MADE = {
    "skipIfNotRegistered": ("MyOp", "linked?"),
    "skipRocmIfTorchInductor": (),
    "skipIfNNModuleInlined": (),
    "skipIfRocmVersionAtLeast": ((1, 2),),
    "skipIfRocmVersionInRange": ((1, 2), (3, 4), "why"),
    "runWithoutCompiledAutograd": (),
    "wrapSwapTensorsTest": (True,),
    "tf32_on_and_off": (0.1,),
    "retry": (ValueError,),
    "serialTest": (),
}


def _decorator_probe(name, arguments):
    def run(kit):
        def decorate(target):
            found = getattr(kit, name)
            return (found if arguments is None else found(*arguments))(target)

        def test(self):
            return passes(self)

        def failing(self):
            return fails(self)

        decorated, decorated_failing = decorate(test), decorate(failing)
        return [
            [outcome(kit, decorated), outcome(kit, decorated_failing)],
            [marks(decorated), marks(test), getattr(decorated, "__unittest_skip__", False)],
        ]

    PROBES[name] = run


for _name in DECORATORS:
    _decorator_probe(_name, None)
for _name, _arguments in MADE.items():
    _decorator_probe(_name, _arguments)


def _class_probe(name):
    def run(kit):
        cls = getattr(kit, name)(type("Case", (kit.TestCase,), {"test_it": passes}))
        return [outcome(kit, cls), marks(cls)]

    PROBES[f"{name} of a class"] = run


for _name in [
    "requires_cuda",
    "requires_xpu",
    "requires_multigpu",
    "periodic",
    "requires_accelerator",
    "skipIfNoLapack",
]:
    _class_probe(_name)

FLAGS = [
    "TEST_WITH_PERIODIC",
    "TEST_WITH_TV",
    "TEST_WITHOUT_COMPILED_AUTOGRAD",
    "IS_APPLE_M1",
    "IS_AVX512_VNNI_SUPPORTED",
    "NOTEST_CPU",
    "IS_CPU_EXT_SVE_SUPPORTED",
    "IS_CPU_CAPABILITY_SVE",
    "IS_CPU_CAPABILITY_SVE256",
    "TEST_CUDA_CUDSS",
    "TEST_FAIRSEQ",
    "TEST_LIBROSA",
    "TEST_CUDA_GRAPH_CONDITIONAL_NODES",
    "TEST_CUDA_PYTHON_BINDINGS",
    "SM53OrLater",
    "SM60OrLater",
    "SM70OrLater",
    "SM75OrLater",
    "SM80OrLater",
    "SM89OrLater",
    "SM90OrLater",
    "SM100OrLater",
    "SM120OrLater",
    "IS_SM89",
    "IS_SM90",
    "IS_SM100",
    "IS_SM10X",
    "IS_SM12X",
    "IS_THOR",
    "IS_JETSON",
    "TEST_CUDNN",
    "PLATFORM_SUPPORTS_FLASH_ATTENTION",
    "PLATFORM_SUPPORTS_MEM_EFF_ATTENTION",
    "TEST_NUMBA_CUDA",
    "PLATFORM_SUPPORTS_CUDNN_ATTENTION",
    "PLATFORM_SUPPORTS_FUSED_ATTENTION",
    "PLATFORM_SUPPORTS_FUSED_SDPA",
    "TEST_MULTIGPU",
    "PLATFORM_SUPPORTS_BF16",
    "PLATFORM_SUPPORTS_BF16_ATOMICS",
    "TEST_MTIA",
    "PLATFORM_SUPPORTS_HALF_ATOMICS",
    "PLATFORM_SUPPORTS_FP8",
    "PLATFORM_SUPPORTS_MX_GEMM",
    "PLATFORM_SUPPORTS_FP8_GROUPED_GEMM",
    "PLATFORM_SUPPORTS_MXFP8_GROUPED_GEMM",
    "CUDA_ALREADY_INITIALIZED_ON_IMPORT",
]
for _name in FLAGS:
    PROBES[_name] = lambda kit, name=_name: bool(getattr(kit, name))

CONSTANTS = [
    "NATIVE_DEVICES",
    "GRADCHECK_NONDET_TOL",
    "dtype2prec_DONTUSE",
    "numpy_to_torch_dtype_dict",
    "torch_to_numpy_dtype_dict",
    "NAVI3_5_ARCH",
    "CUDA_DEVICE",
    "TRITON_PTXAS_VERSION",
    "DEVICE_ASSERT_MARKERS",
]
for _name in CONSTANTS:
    PROBES[_name] = lambda kit, name=_name: repr(getattr(kit, name))

FUNCTIONS = [
    "is_navi3_arch",
    "CDNA2OrLater",
    "CDNA3OrLater",
    "CDNA5OrLater",
    "evaluate_platform_supports_fp8",
    "getRocmVersion",
    "evaluate_platform_supports_flash_attention",
    "_get_torch_cuda_version",
    "_get_torch_rocm_version",
    "_get_magma_version",
]
for _name in FUNCTIONS:
    PROBES[_name] = lambda kit, name=_name: repr(getattr(kit, name)())


@probe
def suffixes(kit):
    names = ["test_a_cpu_float32", "test_a_float32", "test_a", "test_a_cpu", "float32", "test_a_cuda_int8", "a_b_bool"]
    return [kit.remove_device_and_dtype_suffixes(name) for name in names]


@probe
def retries(kit):
    def run(failures, **options):
        left = list(failures)

        @kit.retry((ValueError, KeyError), delay=0, **options)
        def function():
            if left:
                raise left.pop(0)("m")
            return len(left)

        return [attempt(function), len(left)]

    return [
        run([ValueError, KeyError]),
        run([ValueError] * 3),
        run([ValueError] * 5, tries=2),
        run([TypeError]),
        run([ValueError] * 3, skip_after_retries=True),
        run([ValueError], tries=1),
    ]


@probe
def concurrency(kit):
    import threading

    together = threading.Barrier(2, timeout=60)

    def work(value, add=0):
        together.wait()
        return value + add

    def raises():
        raise KeyError("k")

    return [
        kit.run_concurrently(work, 2, args=(1,), kwargs={"add": 2}),
        kit.run_concurrently([lambda: 1, lambda: 2]),
        attempt(kit.run_concurrently, [lambda: 1, raises]),
        attempt(kit.run_concurrently, work),
    ]


@probe
def swapping(kit):
    seen = []

    class Case(kit.TestCase):
        @kit.swap([True, False])
        def test_it(self):
            seen.append(torch.__future__.get_swap_module_params_on_conversion())

    kit.instantiate_parametrized_tests(Case)
    names = [name for name in dir(Case) if name.startswith("test_it")]
    result = outcome(kit, Case)
    with kit.SwapTensorsGuard(None):
        seen.append(torch.__future__.get_swap_module_params_on_conversion())
    return [names, seen, result, torch.__future__.get_swap_module_params_on_conversion()]


@probe
def assertions_of_devices(kit):
    texts = ["device-side assert triggered", "all good", "x: unspecified launch failure", ""]
    return [kit.has_device_side_assert(text) for text in texts]


@probe
def context_of_cuda(kit):
    return attempt(kit.initialize_cuda_context_rng)


@probe
def libraries(kit):
    return [attempt(kit.find_library_location, "libtorch_cpu.so"), attempt(kit.find_library_location, "no.so")]


@probe
def base_for_dynamic_classes(kit):
    return [issubclass(kit.TestCaseBase, kit.TestCase), kit.TestCaseBase is kit.TestCase]


@probe
def hardware_classifications(kit):
    classes = kit.HardwareClassification
    values = {one.name: one.value for one in classes}
    cases = {
        name: type(name, (kit.TestCase,), {"test_it": passes, "hw_classification": value})
        for name, value in {"Any": classes.GENERIC, "Cuda": classes.CUDA, "None_": None}.items()
    }
    wrong = type("Wrong", (), {"hw_classification": "cuda"})
    asked = [repr(kit.get_hw_classification(cls)) for cls in (*cases.values(), object)]
    return [values, asked, attempt(kit.get_hw_classification, wrong)]


@probe
def capabilities(kit):
    class Case(kit.CPUTestBase):
        def wanted(self, *names):
            return attempt(kit.requires_capabilities(*names)(lambda self: "ran"), self)

        def runTest(self):
            pass

    case = Case()
    return [
        kit.CPUTestBase.get_capabilities(),
        kit.DeviceTypeTestBase.get_capabilities(),
        case.wanted(kit.Capability.dtype.fp8),
        case.wanted(kit.Capability.attention.mem_efficient_attention, kit.Capability.dtype.bf16),
        case.wanted("dtype.unheard_of"),
    ]


@probe
def extension_of_checkpoints(kit):
    class Stream(io.BytesIO):
        pass

    extension = kit.checkpoints.Rot13Example.from_descriptor("1.2")
    written = Stream()
    stream = extension.transform_to(written)
    count = stream.write(b"Hello, World 13")
    stream.flush()
    reader = extension.transform_from(io.BytesIO(written.getvalue()))
    registry = kit.checkpoints.get_test_extension_registry()
    described = [type(one).__name__ for one in registry.from_descriptor_list([extension.get_descriptor()])]
    return [
        [count, written.getvalue().decode(), reader.read(5).decode(), reader.tell(), reader.seekable()],
        [reader.seek(1), reader.read().decode(), extension.get_descriptor(), described],
        attempt(kit.checkpoints.Rot13Example.from_descriptor, "2"),
    ]


def main(name):
    kit = Kit(name)
    found = {}
    for title, run in PROBES.items():
        with_output = functools.partial(run, kit)
        try:
            found[title] = with_output()
        except (AttributeError, TypeError, RuntimeError) as error:
            found[title] = f"{type(error).__name__}: {error}"
    print(json.dumps(found, default=repr))


if __name__ == "__main__":
    main(sys.argv[1])
