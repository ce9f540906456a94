#!/usr/bin/env python3
"""Choose the examples that a property suite replays in every run, and write them as a module of data.

    python docs/tools/choose_examples.py test/distributed/properties/test_c10d_properties.py

Of each property of the suite, the tool draws examples by Hypothesis and computes the traits of each: operations, sizes,
meshes, placements and options by name. It takes the example that adds most traits and pairs of traits to those chosen
before, until each trait is there; its phrase names what it adds. Fields on which no trait depends get their defaults.
Read the result before you commit it: another version of Hypothesis chooses others.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from example_suites import SUITES, Suite
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from torch_testing_ext._hypothesis.property_roles import Participant
from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, PerRank

Example = dict[str, Any]
LONGEST_PHRASE, LONGEST_LINE = 3, 90  # traits, characters

# -- drawing and choosing


def drawn(test: Callable[..., None], world_size: int, count: int) -> list[Example]:
    """Draw examples of a property, as rank 0 of so many ranks does."""
    found: list[Example] = []
    strategies = test.hypothesis._given_kwargs  # type: ignore[attr-defined]

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.fixed_dictionaries(strategies))
    def collect(example: Example) -> None:
        found.append({name: example[name] for name in strategies})

    Participant.current = SimpleNamespace(world_size=world_size)  # type: ignore[assignment]
    try:
        collect()
    finally:
        Participant.current = None
    return found


def features(named: Iterable[str]) -> set[Hashable]:
    """Return traits, and pairs of traits."""
    each = sorted(set(named))
    return {*each, *itertools.combinations(each, 2)}


def weight(feature: Hashable) -> int:
    return 1 if isinstance(feature, tuple) else 50


def choose(
    examples: list[Example], traits_of: Callable[[Example], Iterable[str]], fewest: int, most: int
) -> list[tuple[str, Example]]:
    """Choose examples that have all traits together, and as many pairs of traits as `most` examples can have."""
    all_features = [features(traits_of(example)) for example in examples]
    frequency = Counter(itertools.chain.from_iterable(all_features))
    seen: set[Hashable] = set()
    chosen = []
    while len(chosen) < most:
        gains = [sum(weight(one) for one in found - seen) for found in all_features]
        # Of those that add much, the smallest: it is the fastest, and the easiest to read.
        best = max(range(len(examples)), key=lambda i: (gains[i], -len(repr(examples[i]))))
        new = all_features[best] - seen
        if not new or (len(chosen) >= fewest and all(isinstance(one, tuple) for one in new)):
            break
        seen |= new
        chosen.append((phrase(new, frequency), reduced(examples[best], traits_of)))
    return chosen


def phrase(new: set[Hashable], frequency: Counter[Hashable]) -> str:
    """Name what an example adds: its rarest traits, or its rarest pair of traits."""
    singles = sorted((one for one in new if isinstance(one, str)), key=lambda one: (frequency[one], one))
    if singles:
        return ", ".join(singles[:LONGEST_PHRASE])[:LONGEST_LINE]
    rarest: Any = min(new, key=lambda pair: (frequency[pair], repr(pair)))
    return " with ".join(rarest)


def reduced(example: Example, traits_of: Callable[[Example], Iterable[str]]) -> Example:
    """Give fields their defaults, and drop entries, as long as the traits stay the same."""
    wanted = set(traits_of(example))
    for smaller in smaller_ones(example):
        try:
            if set(traits_of(smaller)) == wanted:
                return reduced(smaller, traits_of)
        except (LookupError, ValueError):
            continue
    return example


def smaller_ones(value: Any) -> Iterator[Any]:
    """Return values that differ from this one in one place, where each is simpler."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                yield {other: item for other, item in value.items() if other != key}
            for smaller in smaller_ones(value[key]):
                yield {**value, key: smaller}
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            for smaller in smaller_ones(item):
                yield type(value)([*value[:number], smaller, *value[number + 1 :]])
    elif dataclasses.is_dataclass(value) and not isinstance(value, (DTensorPlan, MeshPlan, PerRank, type)):
        for field in dataclasses.fields(value):
            mine = getattr(value, field.name)
            if field.default is not dataclasses.MISSING and mine != field.default:
                yield dataclasses.replace(value, **{field.name: field.default})
            for smaller in smaller_ones(mine):
                yield dataclasses.replace(value, **{field.name: smaller})


def load(file: Path, suite: Suite) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    # The module of data may not exist yet, and its examples do not matter here.
    stand_in = ModuleType(suite.data)
    vars(stand_in).update({prop.name: [] for prop in suite.properties})
    sys.modules[suite.data] = stand_in
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def written(module: ModuleType, suite: Suite) -> Iterator[str]:
    """Write the module of data."""
    yield f'"""The examples of {Path(str(module.__file__)).name}, by value; choose_examples.py chose them."""\n'
    yield suite.header
    for prop in suite.properties:
        class_name, _, method = prop.test.partition(".")
        test = getattr(getattr(module, class_name), method)
        lists = {}
        for size in prop.world_sizes:
            examples = [example for example in drawn(test, size, prop.draws) if prop.keep(example)]
            most = prop.most if size == prop.world_sizes[0] else max(prop.most // 2, 6)
            chosen = choose(examples, prop.traits_of, min(prop.fewest, most), most)
            lists[size] = ",".join(f"({what!r}, {prop.write(example)})" for what, example in chosen) + ","
            print(f"{prop.test} on {size} ranks: {len(chosen)} examples", file=sys.stderr)
        if len(lists) == 1:
            yield f"{prop.name} = [{lists[prop.world_sizes[0]]}]"
        else:
            yield f"{prop.name} = {{{', '.join(f'{size}: [{text}]' for size, text in lists.items())}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    file = Path(parser.parse_args().suite).resolve()
    suite = SUITES[str(file.relative_to(Path.cwd()))]
    target = file.with_name(f"{suite.data}.py")
    text = "\n".join(written(load(file, suite), suite))
    target.write_text(text)
    subprocess.run(["ruff", "check", "--select=I,F401", "--fix", "--quiet", target], check=True)
    subprocess.run(["ruff", "format", "--quiet", target], check=True)


if __name__ == "__main__":
    main()
