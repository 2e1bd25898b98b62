"""The grammar: every object that has a spec comes back from its text and from its JSON.

Strategies below make objects of every class, nested in every way; a new class needs one more line.
"""

import copy
import json
import re
from collections.abc import Callable
from glob import escape
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire import feedback, methods, policies, spec
from thinwire.compressors import Chain, JointCompressor, LocalCompressor, SparseCompressor
from thinwire.feedback.registry import FEEDBACKS
from thinwire.policies import ByName, Fixed, Layerwise, PolicyContext, Rule, TensorInfo
from thinwire.policies.layerwise import KINDS, RULES
from thinwire.spec import Kind, from_json, to_json

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

# An example takes a fraction of a millisecond, so there may be more than eight.
often = settings(max_examples=max(200, settings().max_examples))
NAMESPACE = {**vars(tw.compressors), **vars(feedback), **vars(policies), **vars(methods)}
PARSE: dict[str, Callable[[str], Any]] = {
    "compressor": tw.parse,
    "feedback": feedback.parse,
    "policy": policies.parse,
    "method": methods.parse,
    "rule": RULES.parse,
}

# Objects of every class

ratios = st.floats(1e-6, 1) | st.sampled_from([1, 0.01, 0.5])
positive = st.floats(1e-300, 1e300) | st.integers(1, 10**9)
steps = st.integers(1, 10**9)
blocks = st.none() | st.integers(1, 1 << 20).map(lambda n: 8 * n)
maybe = st.sampled_from([None, True, False])
sparsifiers = st.one_of(
    st.builds(tw.TopK, ratios, st.none() | st.integers(1, 1 << 40)),
    st.builds(tw.RandomK, ratios, maybe, st.booleans()),
    st.builds(tw.Bernoulli, ratios, maybe, st.booleans()),
    st.builds(tw.Threshold, positive),
)
symmetric = st.builds(
    tw.Quantize, st.sampled_from([8, 4, 2]), blocks, st.just(True), st.booleans(), st.booleans()
)
affine = st.builds(tw.Quantize, st.sampled_from([8, 4, 2]), blocks, st.just(False), st.booleans())
levels = st.integers(1, 127)
signs = st.builds(tw.ScaledSign, st.sampled_from(["l1", "l2"]))
dense = st.one_of(
    st.just(tw.NoCompression()),
    st.builds(tw.Cast, st.sampled_from(["fp16", "bf16"])),
    st.builds(tw.Cast, st.just("fp8"), blocks.filter(bool)),
    symmetric,
    affine,
    st.builds(tw.QSGD, levels, blocks, st.sampled_from(["l2", "max"]), st.booleans()),
    st.builds(tw.OneBit, blocks),
    st.builds(tw.TwoBit, blocks),
    signs,
    st.builds(tw.TernGrad, st.none() | positive),
    st.just(tw.Natural()),
)
lossless = st.builds(tw.Lossless, st.sampled_from(["zstd", "zlib"]), st.integers(1, 9))
flat_chains = st.one_of(
    st.builds(lambda *stages: Chain(stages), sparsifiers, dense),
    st.builds(lambda *stages: Chain(stages), sparsifiers, sparsifiers, dense, lossless),
    st.builds(lambda *stages: Chain(stages), dense, lossless),
)
simple = sparsifiers | dense | lossless | flat_chains
tiered = st.one_of(
    st.builds(tw.Tiered, ratios, simple, simple),
    st.builds(tw.Tiered, st.just(0.0), simple, simple, positive),
)
local = st.one_of(
    simple,
    tiered,
    st.builds(lambda a, b: a | b, sparsifiers, tiered),
)
joint = st.one_of(
    st.builds(tw.PowerSGD, st.integers(1, 99), st.integers(1, 3), st.floats(0, 100)),
    st.builds(
        tw.ARCTopK,
        ratios,
        st.integers(1, 64),
        st.booleans(),
        st.integers(0, 999),
        st.integers(0, 9999),
    ),
)
compressors = local | joint

kept = {
    "storage": st.sampled_from(["fp32", "bf16", "int8", "host"]),
    "reset": st.integers(0, 10**6),
}
shares = st.floats(0, 1) | st.sampled_from([0, 1])
below = st.floats(0, 1, exclude_max=True)
feedbacks = st.one_of(
    st.just(feedback.NoFeedback()),
    st.builds(feedback.EF14, shares, **kept),
    st.builds(feedback.EF21, **kept),
    st.builds(feedback.EF21M, shares.filter(bool), **kept),
    st.builds(feedback.DGC, below, st.booleans(), st.floats(0, 1e9), **kept),
    st.builds(feedback.Vote, below, **kept),
)

named = st.one_of(
    st.builds(
        methods.DeepGradientCompression,
        ratios,
        st.integers(0, 1000),
        st.floats(0, 1e9),
        below,
        st.booleans(),
    ),
    st.just(methods.SignSGD()),
    st.builds(methods.Signum, below),
    st.just(methods.EFSignSGD()),
    st.just(methods.OneBitSGD()),
    st.builds(methods.BitQSGD, st.integers(2, 8)),
    st.builds(methods.AdamUpdate, ratios, st.sampled_from([0, 2, 4, 8]), st.integers(0, 1000)),
    st.builds(methods.LocalSGD, st.integers(1, 1000), compressor=local),
    st.builds(methods.PostLocalSGD, st.integers(1, 1000), st.integers(0, 1000), compressor=local),
    st.builds(methods.DiLoCo, st.integers(1, 1000), st.floats(0.01, 2), below, compressor=local),
    st.builds(
        methods.SparseLoCo,
        st.integers(1, 1000),
        ratios,
        below,
        st.floats(0.01, 2),
        st.sampled_from(["world", "senders"]),
        st.integers(8, 9000),
    ),
    st.builds(
        methods.StreamingDiLoCo,
        st.sampled_from([8, 64]),
        st.sampled_from([1, 2, 4]),
        st.integers(0, 1),
        below,
        st.floats(0.01, 2),
        below,
        compressor=local,
    ),
)

# Names as they may be, and as they are likely to break something.
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text(st.sampled_from(list("ab.*?[]!-/\\:;,=()|\"' $%{}#@+\n\t\x7f0e")), max_size=12),
    st.sampled_from(["none", "true", "5", "1e3", "4bit", "dense", "*", "", " x", "é", "𝄞", "(a)"]),
)
adjustable = st.one_of(
    st.builds(tw.TopK, st.floats(1e-4, 0.3)),
    st.builds(tw.Quantize, st.sampled_from([8, 4, 2])),
    st.builds(tw.QSGD, levels),
    st.builds(lambda a, b: a | b, st.builds(tw.TopK, st.floats(1e-4, 0.3)), dense),
)
curves = st.lists(st.integers(0, 10**6), min_size=1, max_size=4, unique=True).flatmap(
    lambda at: st.tuples(*(st.tuples(st.just(step), st.floats(-99, 99)) for step in sorted(at)))
)
leaves = st.one_of(
    st.builds(Fixed, compressors),
    st.builds(
        policies.Ramp, steps, adjustable, ratios, st.sampled_from(["exponential", "linear"])
    ),
    st.builds(policies.Ramp, steps, st.builds(tw.TopK, ratios), ratios, st.just("dgc")),
    st.builds(policies.Progressive, steps, compressors, st.booleans()),
    st.builds(policies.Solve, adjustable, positive, steps),
    st.builds(policies.Solve, local, positive, steps, st.lists(local, min_size=1, max_size=3)),
    st.builds(policies.Magnitude, ratios, simple.filter(lambda c: c != tw.Lossless()),
              st.just(tw.OneBit()), steps),
    st.builds(policies.Magnitude, ratios, dense, st.none(), steps),
    st.builds(policies.Bandwidth, compressors, positive),
    st.builds(policies.Accuracy, compressors, positive,
              st.none() | st.floats(-1e9, 1e9) | texts | curves, st.booleans()),
    st.builds(policies.Auto, steps, positive),
    st.just(Layerwise()),
)  # fmt: skip


def rules_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Rule]:
    return st.builds(
        lambda then, match, kind, least, more: Rule(
            then, match, kind, least, None if more is None else least + more
        ),
        st.none() | inner,
        st.just("*") | texts,
        st.none() | st.sampled_from(KINDS),
        st.sampled_from([0, 1, 4096]),
        st.none() | st.integers(0, 10**6),
    )


chosen = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(policies.Warmup, steps, inner),
        st.builds(Layerwise, st.lists(rules_of(inner), min_size=1, max_size=3)),
    ),
    max_leaves=6,
)
STRATEGIES = {
    "compressor": compressors,
    "feedback": feedbacks,
    "policy": chosen,
    "method": named,
    "rule": rules_of(chosen),
}
anything = st.one_of(st.tuples(st.just(kind), made) for kind, made in STRATEGIES.items())


@often
@given(anything)
def test_text_and_json_lead_back(pair):
    kind, made = pair
    text = str(made)
    assert PARSE[kind](text) == made, text
    assert str(PARSE[kind](text)) == text
    assert hash(PARSE[kind](text)) == hash(made)
    assert PARSE[kind](f" {text} ") == made
    assert eval(repr(made), dict(NAMESPACE)) == made
    data = to_json(made)
    assert from_json(json.loads(json.dumps(data, allow_nan=False))) == made
    assert data["kind"] == kind
    assert copy.deepcopy(made) == made


def test_strategies_make_objects_of_every_class():
    seen: dict[str, set[str]] = {kind: set() for kind in STRATEGIES}

    def note(value: Any) -> None:
        for kind in Kind.every.values():
            if isinstance(value, kind.base) and kind.noun in seen:
                seen[kind.noun].add(value.name)
                for field in spec.ordered(value):
                    inner = getattr(value, field.name)
                    for each in inner if isinstance(inner, tuple) else (inner,):
                        note(each)

    @settings(max_examples=1000)
    @given(anything)
    def run(pair):
        note(pair[1])

    run()
    for noun, names in seen.items():
        kind = Kind.every[noun]
        assert names == {*kind.classes, *kind.unnamed}, noun


@often
@given(st.dictionaries(texts, local, min_size=1, max_size=4))
def test_settings_by_exact_names_lead_back(choices):
    """As `wire.settings()` gives them, whatever parameters are called."""
    policy = Layerwise(tuple(Rule(Fixed(c), escape(name)) for name, c in choices.items()))
    again = policies.parse(str(policy))
    assert again == policy
    tensors = [TensorInfo(name, torch.Size([9])) for name in choices]
    chooser = again.begin(PolicyContext(tensors, 2, True, policies.Journal()))
    assert {t.name: chooser.choose(t, 1) for t in tensors} == choices


@often
@given(st.lists(rules_of(leaves), min_size=1, max_size=3))
def test_files_lead_back(tmp_path_factory, rules):
    for suffix in ("toml", "json"):
        path = tmp_path_factory.getbasetemp() / f"rules.{suffix}"
        Layerwise(rules).save(path)
        assert Layerwise(path) == Layerwise(rules)


# What is written


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Layerwise([Rule("dense", most=4096), Rule("topk:0.1")]),
         "layerwise:((most=4096)=dense; *=topk:0.1)"),
        (Layerwise([Rule("topk:0.1", "embed*", "last", 5, 9)]),
         "layerwise:((match=embed*,kind=last,least=5,most=9)=topk:0.1)"),
        (Layerwise({"a;b": "warmup:5,(topk:0.1)"}), 'layerwise:("a;b"=warmup:5,(topk:0.1))'),
        (Layerwise([Rule("dense", 'say "x"', "norm")]),
         'layerwise:((match="say \\"x\\"",kind=norm)=dense)'),
        (Layerwise({"a$b[0].w": "onebit"}), "layerwise:(a$b[0].w=onebit)"),
        (Layerwise(), "layerwise"),
        (Fixed(tw.TopK(0.1)), "topk:0.1"),
        (policies.Warmup(5, Layerwise({"*": "onebit"})), "warmup:5,(layerwise:(*=onebit))"),
        (policies.Solve("quantize:4", candidates=["onebit", "quantize:8"]),
         "solve:(quantize:4),candidates=(onebit; quantize:8)"),
        (policies.Accuracy("topk:0.1", 1, [(0, 50), (100, 90.5)]),
         "accuracy:(topk:0.1),1,(0.0=50.0; 100.0=90.5)"),
        (policies.Accuracy("topk:0.1", 1, "a b.json"), 'accuracy:(topk:0.1),1,"a b.json"'),
        (tw.QSGD(7), "qsgd:7"),
        (methods.BitQSGD(4), "qsgd:4bit"),
        (methods.DeepGradientCompression(0.01, warmup=3), "dgc:0.01,3"),
    ],
)  # fmt: skip
def test_specs_are_written_like_this(made, text):
    assert str(made) == text
    (kind,) = (k for k in Kind.every.values() if isinstance(made, k.base))
    assert kind.parse(text) == made


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("solve:(quantize:4),candidates=onebit; quantize:8",
         policies.Solve(tw.Quantize(4), candidates=(tw.OneBit(), tw.Quantize(8)))),
        ("solve:(quantize:4),candidates=(none; (topk:0.1|onebit))",
         policies.Solve(tw.Quantize(4), candidates=("none", "topk:0.1|onebit"))),
        ("warmup:5,topk:0.01", policies.Warmup(5, tw.TopK(0.01))),
        (" WARMUP : 5 , ( TopK : 0.01 ) ", policies.Warmup(5, tw.TopK(0.01))),
        ("layerwise:embed*=topk:0.1", Layerwise({"embed*": "topk:0.1"})),
        ("layerwise:(a=DENSE;; b=none;)", Layerwise({"a": "dense", "b": "none"})),
        ("layerwise:( (kind=norm) = dense )", Layerwise([Rule(None, kind="norm")])),
        ("layerwise:((kind=norm,match=\"a,b\")=dense)", Layerwise([Rule(None, "a,b", "norm")])),
        ("auto", policies.Auto()),
        ("topk:0.1|onebit", Fixed(tw.TopK(0.1) | tw.OneBit())),
    ],
)  # fmt: skip
def test_other_ways_to_write_it_are_read(text, made):
    assert policies.parse(text) == made


def test_qsgd_by_levels_and_by_bits():
    for bits, levels in ((2, 1), (4, 7), (8, 127)):
        assert tw.parse(f"qsgd:{bits}bit") == tw.QSGD(levels)
        assert tw.parse(f"qsgd: {bits} BIT ,norm=max") == tw.QSGD(levels, norm="max")
        method = methods.parse(f"qsgd:{bits}bit")
        assert method.recipe().compressor == tw.QSGD(levels)
        assert (str(method), str(method.recipe().compressor)) == (
            *(f"qsgd:{bits}bit", f"qsgd:{levels}"),
        )
    assert tw.parse("qsgd:4") == tw.QSGD(4)
    assert tw.parse("quantize:4bit") == tw.Quantize(4)
    assert tw.parse("topk:0.1|qsgd:4bit") == tw.TopK(0.1) | tw.QSGD(7)
    assert methods.method_of("qsgd:7") is None
    with pytest.raises(ValueError, match="the method is written with bits, as in 'qsgd:4bit'"):
        methods.parse("qsgd:7")
    for text in ("qsgd:9bit", "qsgd:1bit"):
        with pytest.raises(ValueError, match=r"QSGD: bits must be an integer in \[2, 8\]"):
            tw.parse(text)
    with pytest.raises(ValueError, match="steps from 1, got 4bit"):
        policies.parse("warmup:4bit,(onebit)")


# What is refused


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (tw.parse, "topkk:1", "unknown compressor 'topkk': did you mean 'topk'? compressors: arc"),
        (tw.parse, "warmpu:5", "unknown compressor 'warmpu': did you mean 'warmup'?"),
        (tw.parse, "zzz", "unknown compressor 'zzz'; compressors: arc"),
        (tw.parse, "auto", "unknown compressor 'auto': that is a policy; compressors: "),
        (tw.parse, "dgc", "unknown compressor 'dgc': that is a method; "),
        (tw.parse, "zzz", "; methods: 1bit-sgd, adam-update, dgc, diloco, ef-signsgd, local-sgd, "),
        (tw.parse, "zzz", "; policies: accuracy, auto, bandwidth, layerwise"),
        (policies.parse, "signum", "unknown compressor or policy 'signum': that is a method"),
        (methods.parse, "sigum", "unknown method 'sigum': did you mean 'signum'? methods: 1bit"),
        (methods.parse, "topk:0.1", "unknown method 'topk': that is a compressor"),
        (feedback.parse, "ef144", "unknown feedback 'ef144': did you mean 'ef14'? feedbacks: dgc"),
        (tw.parse, "topk:ratio=0.1,ratio=0.2", "has an argument twice: ratio"),
        (tw.parse, "topk:(0.1)", "TopK: (0.1): parentheses enclose objects and lists"),
        (tw.parse, "tiered:0.1,small=(topk)", "Tiered: 'topk' lacks an argument, ratio"),
        (policies.parse, 'layerwise:("a=onebit)', "a quote is not closed"),
        (policies.parse, 'layerwise:("a"b=onebit)', "something follows the closing quote"),
        (policies.parse, 'layerwise:("\\q"=onebit)', "not a string as in JSON"),
        (policies.parse, "layerwise:()", "Layerwise: no rules"),
        (policies.parse, "layerwise:(onebit)", "'onebit': a rule is PATTERN=SPEC"),
        (policies.parse, "layerwise:(a=)", "'a=': a rule is PATTERN=SPEC"),
        (policies.parse, "layerwise:((size=5)=onebit)", "'size' is none of match=, kind=, least="),
        (policies.parse, "layerwise:((then=auto)=onebit)", "'then' is none of match="),
        (policies.parse, "layerwise:((kind=huge)=onebit)", "kind must be one of embedding"),
        (policies.parse, "layerwise:((least=-1)=onebit)", "least must be a whole number from 0"),
        (policies.parse, "layerwise:((least=9,most=5)=none)", "most must be a whole number from 9"),
        (policies.parse, "auto|onebit", "'|' chains compressors, and auto is a policy"),
        (policies.parse, "<function of names, no spec>", "unknown compressor or policy"),
        (policies.parse, "warmup:1,(" * 60 + "onebit" + ")" * 60, "more than 50 parentheses"),
        (policies.parse, "accuracy:(onebit),1,(1; 2)", "a pair is written with '='"),
        (policies.parse, "accuracy:(onebit),1,true", "Accuracy: target must be a finite number"),
        (tw.parse, "threshold:" + "9" * 400, "Threshold: value must be positive and finite"),
        (tw.parse, "powersgd:worth=1e999", "PowerSGD: worth must be at least 0 and finite"),
        (tw.parse, "topk:1_0", "TopK: ratio must be in (0, 1], got '1_0'"),
    ],
)  # fmt: skip
def test_a_wrong_spec_says_what_is_wrong(parse, text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(text)


def parsed(parse: Callable[[str], Any], text: str) -> None:
    """Whatever the text: an object, or ValueError."""
    try:
        made = parse(text)
    except ValueError:
        return
    assert parse(str(made)) == made


words = st.sampled_from(
    [
        *("topk", "quantize", "tiered", "warmup", "layerwise", "solve", "accuracy", "qsgd", "dgc"),
        *("ef14", "magnitude", "ratio", "large", "rules", "then", "0.1", "4", "4bit", "none"),
        *(":", ",", "=", "|", ";", "(", ")", '"', "\\", "*", " ", "-", "1e999", "true", "é", "\0"),
    ]
)


@often
@given(st.sampled_from(sorted(PARSE)), st.lists(words, max_size=14).map("".join) | texts)
def test_any_text_is_read_or_refused_with_a_value_error(kind, text):
    parsed(PARSE[kind], text)


@often
@given(anything, st.data())
def test_a_damaged_spec_is_read_or_refused_with_a_value_error(pair, data):
    kind, made = pair
    text = str(made)
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, len(text)))
    parsed(PARSE[kind], text[:at] + data.draw(words) + text[end:])


def test_what_is_no_spec_is_a_type_error():
    for kind in Kind.every.values():
        with pytest.raises(TypeError, match="a spec is a string such as"):
            kind.parse(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tw.compressors.compressor_of(tw.TopK),
        lambda: policies.policy_of(tw.TopK),
        lambda: Rule(tw.TopK),
        lambda: Layerwise({"*": tw.TopK}),
        lambda: policies.Warmup(5, tw.TopK),
        lambda: policies.Bandwidth(tw.TopK),
        lambda: policies.Magnitude(0.1, large=tw.TopK),
        lambda: Fixed(tw.TopK),
        lambda: tw.Quantize(4) | tw.TopK,
    ],
)
def test_a_class_in_place_of_an_object_is_told(make):
    with pytest.raises(TypeError, match=r"TopK is a class, give an object such as TopK\(\.\.\.\)"):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rule("onebit", match=3), "match must be a pattern of names, got 3"),
        (lambda: Layerwise(3), "rules are rules, a mapping or a path, got 3"),
        (lambda: Layerwise([("a", "onebit", 3)]), r"a rule is a Rule or \(pattern, compressor\)"),
        (lambda: Layerwise(["onebit"]), r"a rule is a Rule or \(pattern, compressor\)"),
    ],
)
def test_rules_of_other_types_are_refused(make, said):
    with pytest.raises(TypeError, match=said):
        make()


def test_a_function_of_names_has_no_spec():
    policy = ByName.of({"a": "onebit"}.get, ["a"])
    with pytest.raises(ValueError, match="unknown compressor or policy"):
        policies.parse(str(policy))
    with pytest.raises(ValueError, match="has no spec"):
        to_json(policy)
    with pytest.raises(ValueError, match="has no spec"):
        to_json(policies.Warmup(3, policy))


# JSON


def test_json_is_kind_name_and_fields():
    assert to_json(tw.TopK(0.1) | tw.OneBit()) == {
        "kind": "compressor",
        "name": "chain",
        "fields": {
            "stages": [
                {"kind": "compressor", "name": "topk", "fields": {"ratio": 0.1}},
                {"kind": "compressor", "name": "onebit", "fields": {}},
            ]
        },
    }
    for strange in (3, "topk:0.1", None, tw.TopK, tw.Key()):
        with pytest.raises(ValueError, match="has no spec"):
            to_json(strange)


ONEBIT = {"kind": "compressor", "name": "onebit", "fields": {}}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("onebit", "expected an object with kind, name and fields, got 'onebit'"),
        ([ONEBIT], "expected an object with kind, name and fields"),
        ({**ONEBIT, "more": 1}, "expected an object with kind, name and fields"),
        ({"kind": "compressor", "name": "onebit"}, "expected an object with kind"),
        ({**ONEBIT, "kind": "os"}, "unknown kind 'os', known: compressor, feedback"),
        ({**ONEBIT, "kind": ["a"]}, "unknown kind ['a']"),
        ({**ONEBIT, "name": "onebite"}, "unknown compressor 'onebite': did you mean 'onebit'"),
        ({**ONEBIT, "name": ["onebit"]}, "unknown compressor"),
        ({**ONEBIT, "fields": {"blocks": 8}}, "compressor onebit has the fields block, got"),
        ({**ONEBIT, "fields": [8]}, "compressor onebit has the fields block, got [8]"),
        ({**ONEBIT, "fields": {"block": 9}}, "OneBit: block must be a positive multiple of 8"),
        ({**ONEBIT, "fields": {"block": "8"}}, "OneBit: '8' is not what this field holds"),
        ({**ONEBIT, "fields": {"block": [8]}}, "OneBit: [8] is not what this field holds"),
        ({**ONEBIT, "name": "topk"}, "compressor topk lacks ratio"),
        ({**ONEBIT, "name": "topk", "fields": {"ratio": None}}, "null is not what"),
        ({**ONEBIT, "name": "topk", "fields": {"ratio": float("nan")}}, "ratio must be in (0, 1]"),
        ({**ONEBIT, "name": "topk", "fields": {"ratio": {}}}, "TopK: expected an object with kind"),
        ({**ONEBIT, "name": "topk", "fields": {"ratio": ONEBIT}}, "is not what this field holds"),
        ({"kind": "policy", "name": "fixed", "fields": {"compressor": "onebit"}},
         "Fixed: 'onebit' is not what this field holds"),
        ({"kind": "policy", "name": "layerwise", "fields": {"rules": "/etc/passwd"}},
         "Layerwise: '/etc/passwd' is not what this field holds"),
        ({"kind": "policy", "name": "layerwise", "fields": {"rules": [ONEBIT]}},
         "Layerwise: OneBit(block=1024) is not what this field holds"),
        ({"kind": "policy", "name": "accuracy",
          "fields": {"then": ONEBIT, "band": 1, "target": [[1, 2, 3]]}}, "expected 2 values"),
        ({"kind": "policy", "name": "by-name", "fields": {}}, "unknown policy 'by-name'"),
    ],
)  # fmt: skip
def test_wrong_json_says_what_is_wrong(data, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        from_json(data)


def test_json_that_is_too_deep_is_refused():
    data: dict[str, Any] = {"kind": "policy", "name": "auto", "fields": {}}
    for _ in range(60):
        data = {"kind": "policy", "name": "warmup", "fields": {"steps": 1, "then": data}}
    with pytest.raises(ValueError, match="more than 50"):
        from_json(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "name", "fields", "then", "ratio"]), inner)
    ),
    max_leaves=8,
)


@often
@given(anything, values, st.data())
def test_damaged_json_is_read_or_refused_with_a_value_error(pair, value, data):
    whole = to_json(pair[1])
    places = [(whole, key) for key in whole]
    places += [(whole["fields"], key) for key in whole["fields"]]
    place, key = data.draw(st.sampled_from(places))
    place[key] = value
    try:
        made = from_json(whole)
    except ValueError:
        return
    assert from_json(to_json(made)) == made


# What compressors are


@often
@given(compressors)
def test_every_question_has_one_answer(compressor):
    """Joint ones have no payload; what begins with a sparsifier is sparse, nothing else."""
    assert isinstance(compressor, JointCompressor) != isinstance(compressor, LocalCompressor)
    assert hasattr(compressor, "encode") == isinstance(compressor, LocalCompressor)
    first = compressor.stages[0] if isinstance(compressor, Chain) else compressor
    expected = isinstance(first, tw.TopK | tw.RandomK | tw.Bernoulli | tw.Threshold)
    assert isinstance(compressor, SparseCompressor) == expected
    assert hasattr(compressor, "pick") == expected
    if isinstance(compressor, Chain):
        assert type(Chain(compressor.stages)) is type(compressor)


def test_every_feedback_can_be_read():
    assert [type(FEEDBACKS.parse(name)).__name__ for name in tw.list_feedbacks()] == [
        *("NoFeedback", "EF14", "EF21", "EF21M", "DGC", "Vote")
    ]
