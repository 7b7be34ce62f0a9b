"""Models that are planned: their sizes, their memory when they are served, and the questions of the guide."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from marks import long

from sidelane_lab.cli.model import plan
from sidelane_lab.machines.load import named
from sidelane_lab.model import plan as planning
from sidelane_lab.model import serving
from sidelane_lab.model.layer import Step, gemms_of, parallel_us, step_memory
from sidelane_lab.model.serving import ServedModel, decode_us, prefill_us
from sidelane_lab.model.transformer import of_config, preset, presets, read_model

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "start-planning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", presets())
def test_parameters_are_those_that_were_published(name):
    """Publishers count the embedding among the parameters of a token, or not."""
    model, (total, *active) = of_config(name, presets()[name]["sizes"]), presets()[name]["parameters"]
    assert model.total / 1e9 == pytest.approx(total, rel=0.005)
    for published in active:
        counts = [model.computed, model.computed + model.vocabulary * model.hidden]
        assert min(abs(count / 1e9 / published - 1) for count in counts) < 0.01


def test_models_by_the_names_that_people_use():
    asked = {
        "7B": "llama-2-7b",
        "Llama 3.1 8B": "llama-3.1-8b",
        "llama3-70b": "llama-3.1-70b",
        "70B": "llama-3.1-70b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "Qwen3-32B": "qwen3-32b",
        "32b": "qwen3-32b",
        "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
        "Mixtral-8x7B-v0.1": "mixtral-8x7b",
        "deepseek-ai/DeepSeek-V3": "deepseek-v3",
        "DeepSeek-R1": "deepseek-v3",
        "Llama-2-70b-hf": "llama-2-70b",
    }
    assert {text: preset(text).name for text in asked} == asked
    with pytest.raises(ValueError, match="the nearest are qwen3-32b, "):
        preset("qwen3-33b")
    for text in ("foo", "", "gpt2"):
        with pytest.raises(ValueError, match=r"a config\.json, or layers=32"):
            preset(text)


MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


def test_a_config_of_hugging_face_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    found, file = read_model(str(tmp_path)), read_model(str(tmp_path / "config.json"))
    assert found == file and found.total == preset("qwen3-30b-a3b").total and found.name == tmp_path.name
    nested = of_config("x", {"text_config": MOE | {"use_sliding_window": True}, "vision_config": {"depth": 3}})
    assert nested.total == found.total and not found.left_out
    assert len(nested.left_out) == 2 and nested.left_out[0] == "the vision tower"
    gemma = of_config("g", {"model_type": "gemma3_text", **presets()["gemma-3-27b"]["sizes"], "tied": None})
    assert gemma == dataclasses.replace(preset("gemma-3-27b"), name="g")
    dims = read_model("layers=48, hidden=2048, heads=32, kv_heads=4, head=128, experts=128, active=8, expert_feed=768")
    assert dims.parameters == found.parameters and dims.vocabulary == 128_256
    for wrong, problem in (
        ({**MOE, "hidden_size": None}, "hidden is missing"),
        ({**MOE, "num_hidden_layers": "48"}, "layers .*allowed=a whole number"),
        ({**MOE, "intermediate_size": None, "moe_intermediate_size": None}, "feed is missing"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=problem):
            read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match="plan: --model .*config"):
        read_model(str(tmp_path))
    with pytest.raises(ValueError, match="no such file"):
        read_model(str(tmp_path / "other.json"))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_ranks_share_a_model_evenly(name):
    model, tokens = preset(name), 1024
    for tensor in (2, 4):
        part = model.divided(tensor)
        assert part.whole == model.total and part.kv_size <= model.kv_size
        matrices = sum(gemm.flops for gemm in gemms_of(Step(model, tokens, tokens), backward=False))
        divided = sum(gemm.flops for gemm in gemms_of(Step(part, tokens, tokens), backward=False))
        assert divided == pytest.approx(matrices / tensor, rel=0.05 if not model.latent else 0.35)
    memory, shared = (step_memory(Step(model.divided(n), tokens, tokens, True, tensor=n), 8 // n) for n in (1, 4))
    assert shared.weights == pytest.approx(memory.weights, rel=0.1) and shared.activations < memory.activations
    with pytest.raises(ValueError, match="--tp 7 does not divide the .* heads"):
        model.divided(7)
    if model.experts:
        assert model.divided(1, 8).parameters < model.parameters / 6
        with pytest.raises(ValueError, match="--ep 7 does not divide the .* experts"):
            model.divided(1, 7)


def test_optimizers_and_types_take_what_they_take():
    model, ranks = preset("8B"), 8
    mine = (model.layers * model.parameters + model.ends) / ranks

    def memory(**fields):
        return step_memory(Step(model, 4096, 4096, **fields), ranks)

    assert memory().optimizer == 8 * mine and memory(dtype="bfloat16").optimizer == 4 * mine
    assert memory(optimizer="adamw-8bit", dtype="bfloat16").optimizer == memory(optimizer="adamw-8bit").optimizer
    assert memory(optimizer="sgd").optimizer == 0 and memory(dtype="bfloat16").gradients == 2 * mine
    whole = step_memory(Step(model, 4096, 4096), 1)
    assert whole.weights == 8 * memory().weights and whole.gathered == 6 * mine * ranks


def test_collectives_of_parallelism_count_by_their_bytes():
    machine, model = named("h200x8"), preset("qwen3-30b-a3b")
    assert parallel_us(machine, Step(model, 4096, 4096)) == 0
    times = [parallel_us(machine, Step(model, 4096, 4096, **{name: 8})) for name in ("tensor", "context", "experts")]
    assert times[2] > times[1] > times[0] > 0
    assert parallel_us(machine, Step(model, 4096, 4096, True, tensor=8)) == pytest.approx(1.5 * times[0])


def _measured():
    """Return model, sequences, tokens of each, the way, milliseconds, and how far the prediction may be off."""
    for row in json.loads((ROOT / "results" / "h200x2" / "e2e.json").read_text())["rows"]:
        if row["workload"] == "decode" and row["launch"] == "graph" and row["way"] in ("nccl", "group"):
            name, _, case = row["size"].partition("b-")
            batch, length = (0, int(case.rpartition("-")[2])) if "prefill" in case else (int(case[1:]), 1024)
            yield f"{name}b", batch, length, row["way"], row["step_ms"], 0.09 if row["way"] == "nccl" else 0.11
    for row in json.loads((ROOT / "results" / "h200x2" / "servers.json").read_text())["rows"]:
        plain = row["peers"] == "nvlink" and not row["batch_invariant"] and row["model"] != "sums"
        # Steps of 256 sequences, measured later, are 18 to 25% longer than predicted (docs/guide/start-planning.md).
        if plain and row["implementation"] in ("nccl", "custom", "sidelane") and row["sequences"] <= 64:
            yield row["model"], row["sequences"], 512, row["implementation"], row["ms_per_token"], 0.14


MEASURED = list(_measured())


@pytest.mark.parametrize(("name", "batch", "length", "way", "ms", "off"), MEASURED)
def test_serving_as_measured(name, batch, length, way, ms, off):
    """On two H200s; one number was fitted, to decoding with Llama 3.2 1B for one sequence by NCCL, and what vLLM's
    kernel takes longer, to sums alone. vLLM's layers have fewer kernels between GEMMs, for which the model is up to 14%
    too slow."""
    served = ServedModel(preset(name), batch or 1, length, 2)
    predicted = serving.server_us if way == "custom" else decode_us if batch else prefill_us
    found = predicted(named("h200x2"), served, **{"ours": way != "nccl"} if way != "custom" else {}) / 1e3
    assert found == pytest.approx(ms, rel=off)


def test_quantized_weights_take_their_bits(tmp_path):
    whole, quarter = (ServedModel(preset("70B"), 4, 4096, 2, each) for each in (2, serving.WEIGHT_BYTES["int4"]))
    ends = 2 * preset("70B").divided(2).ends / 1e9
    bits = [served.memory_gb()["weights"] - ends for served in (whole, quarter)]
    assert bits[1] / bits[0] == pytest.approx(4.16 / 16)
    times = [decode_us(named("h200x2"), served, ours=True) for served in (whole, quarter)]
    assert 0.25 < times[1] / times[0] < 0.5
    for about, found in (
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.16),
        ({"quant_method": "awq", "w_bit": 4}, 4.16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.16),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "a method of its own"}, 0),
        (None, 0),
    ):
        config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config | {"quantization_config": about}))
        assert read_model(str(path)).bits == found
    assert preset("gpt-oss-120b").bits == 4.16 and preset("deepseek-v3").bits == 8


def test_energy_of_a_step_is_that_of_the_cap_but_while_it_waits():
    machine = named("h200x2")
    found = planning.plan(machine, Step(dataclasses.replace(preset("8B"), layers=8), 4096, 4096), ("FSDP2",))
    joules = found.token_j(found.best)
    most = 2 * 700 * found.step_us(found.best) / 1e6 / found.tokens
    assert 0.9 * most < joules < most and found.token_j(found.usual) > joules
    assert found.rows()[0]["token_j"] == found.token_j(found.ways[0])
    assert planning.plan(named("4090x2"), found.step, ("DDP",)).rows()[0]["token_j"] is None


def test_large_gemms_of_mi300x_are_as_fast_as_others():
    """AMD expects 140 tokens/s of a GPU for Llama 3.1 405B on 32, and 900 for 70B on 8 (ROCm/cvs, mi300x_jax_*)."""
    cases = ("405B", "32xmi300x", 8192, 140, 0.2), ("70B", "8xmi300x", 16384, 900, 0.05)
    for name, machine, tokens, expected, off in cases:
        step = Step(preset(name), tokens, 8192, True, dtype="bfloat16")
        found = planning.plan(planning.with_present_gemms(named(machine)), step, ("FSDP2",))
        each = found.tokens_per_s(found.usual) / found.machine.world_size
        assert expected < each < (1 + off) * expected


def test_the_answer_says_which_comparison_is_nearest():
    """With its error, as the guide has it: no plan is said to be surer than the page says."""
    titan = planning.plan(named("h100x8"), Step(preset("8B"), 16384, 8192, True), ("FSDP2",))
    each = titan.tokens_per_s(titan.usual) / 8
    more = [round(100 * (each / published - 1)) for published in (5762, 6667)]
    assert f"predicted {more[0]}% faster than torchtitan was " in planning.TITAN and "16% before" in planning.STEPS
    assert f"{more[1]}% than compiled" in planning.TITAN
    assert f"| {each:,.0f} with NCCL: {more[0]}% and {more[1]}% more |" in GUIDE
    experts = Step(preset("Mixtral-8x7B"), 64, 64, tensor=2)
    none, both = "Nothing was compared with", [planning.STEPS, planning.TITAN]
    for name, step, said, *sharding in (
        ("h200x4", titan.step, [planning.STEPS]),
        ("h200x4", dataclasses.replace(titan.step, recomputed=False), [planning.STEPS]),
        ("4xb200", titan.step, [planning.STEPS]),
        ("32xh100", titan.step, [*both, f"{none} several nodes"]),
        ("2x2xh200", titan.step, [planning.STEPS, f"{none} several nodes"]),
        ("8xmi300x", titan.step, [planning.EXPECTED]),
        ("32xmi300x", titan.step, [planning.EXPECTED]),
        ("h200x4", experts, [planning.STEPS, f"{none} experts, --tp and --cp"]),
        ("h200x4", titan.step, [planning.STEPS, f"{none} DDP"], "DDP"),
        ("2xrtx4090", titan.step, [planning.STEPS, f"{none} GPUs without NVLink"]),
        ("8xL4", titan.step, [planning.STEPS, f"{none} GPUs without NVLink"]),
        ("1xh100", dataclasses.replace(titan.step, dtype="bfloat16"), [*both, f"{none} one GPU, --dtype bfloat16"]),
        ("h200x2", dataclasses.replace(titan.step, optimizer="sgd"), [planning.STEPS, f"{none} --optimizer sgd"]),
    ):
        texts = [text.rpartition("; ")[2] for text in planning.how_sure(named(name), step, *sharding)]
        assert [text for text in texts if "machine are assumed" not in text] == [f"{one}." for one in said] != texts
    assert len({question for question, *_ in QUESTIONS}) == len({words for _, words, _ in QUESTIONS}) == 20
    assert f"13% off at worst in {len(MEASURED)} rows" in serving.SURE and f"| {len(MEASURED)} rows of" in GUIDE


@pytest.mark.parametrize("gpus", [4, 8])
def test_sums_are_measured_where_explain_has_measured_ones(gpus):
    """64 KiB between four H200s: 4.8 us in a graph; predicted programs on copy engines would take ten times as long."""
    served = named(f"h200x{gpus}"), ServedModel(preset("8B"), 8, 4096, gpus)
    assert decode_us(*served, ours=False) - decode_us(*served, ours=True) > 2 * 32 * 4


def test_memory_of_a_served_model():
    served = ServedModel(preset("70B"), 16, 8192, 4)
    memory = served.memory_gb()
    assert memory["weights"] == pytest.approx(2 * 70.55 / 4, rel=0.01)
    assert memory["KV cache"] == pytest.approx(2 * 2 * 80 * 8 * 128 * 16 * 8192 / 4 / 1e9)
    latent = ServedModel(preset("deepseek-v3"), 1, 1000, 8).memory_gb()
    assert latent["KV cache"] == pytest.approx(2 * 61 * 576 * 1000 / 1e9)


QUESTIONS = re.findall(r"(?m)^\| ([^|]+\?) \| `sidelane plan ([^`]+)` \| (.+) \|$", GUIDE)
SLOW = re.compile("256x|32xh100|2x8xh100(?!.*--tp)")


@pytest.mark.parametrize(
    ("words", "first"),
    [(long if SLOW.search(words) else pytest.param)(words, first) for _, words, first in QUESTIONS],
)
def test_the_answer_begins_as_the_guide_says(words, first):
    shown = CliRunner().invoke(plan, shlex.split(words))
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == first
    needs = next(line for line in lines if line.startswith("Each GPU has "))
    has, needed = map(int, re.findall(r"(\d+) GB", needs)[:2])
    gb = int(re.search(r"(\d+) GB of each GPU are left|each GPU lacks (\d+) GB", first)[0].split(" GB")[0].split()[-1])
    assert abs(abs(has - needed) - gb) <= 1 and ("does not fit" in first) == (needed > has)
    assert (
        any(line.startswith("How sure: ") for line in lines)
        and "\nNot modelled: " in shown.stdout.partition(" numbers of this machine are assumed")[2]
    )
    told = "vLLM's own kernel" in shown.stdout or "not modelled here" in shown.stdout
    assert told == ("--serve" in words and " at TP 1 " not in first), "the baseline of a server is its own kernel"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("2xrtx4090 --dtype bf16", "each GPU lacks 18 GB .* GB under FSDP2(?!.*DDP )"),
        (
            "8xh200 --cp 8 --sequence 128K --tokens 16K",
            "16 GB of each GPU are left .*step of 131,072 tokens in sequences of .* 16384 tokens a rank",
        ),
        (
            "8xh200 --cp 8 --sequence 128K",
            "16 GB of each GPU are left .*step of 131,072 tokens in sequences of .* 16384 tokens a rank",
        ),
        (
            "8xh200 --cp 8 --sequence 128K --batch 1",
            "16 GB of each GPU are left .*step of 131,072 tokens in sequences of .* 16384 tokens a rank",
        ),
        (
            "8xL4 --cp 8 --sequence 16K --batch 16 --dtype bf16 --optimizer adamw-8bit",
            "It fits here with --tokens 2048 ",
        ),
        ("2xrtx4090 --batch 4", "It fits with --optimizer adamw-8bit --dtype bfloat16 --tokens 4096 on 4 GPUs "),
        (
            "8xh100 --shard ddp",
            r"fits here with --shard FSDP2 \(70 GB a GPU\), or here with --optimizer adamw-8bit --dtype bfloat16 \(64 ",
        ),
        (
            "2xh200 --nodes 2",
            r"left \(predicted: never run there\).* 60\.7 ms .* 147\.6 ms .*compared with several nodes\.",
        ),
        ("2x2xh200", r"left \(predicted: never run there\).* 60\.7 ms .* 147\.6 ms .*compared with several nodes\."),
    ],
)
def test_a_plan_is_of_what_was_asked_for(words, text):
    """A step that does not fit is planned the way that needs least; ranks share a sequence; nodes are not one node."""
    shown = CliRunner().invoke(plan, ["--model", "8b", "--machine", *words.split()])
    assert shown.exit_code == 0 and re.search(text, " ".join(shown.stdout.split())), shown.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--model 8b", "on which machine. Say --machine 8xh100"),
        ("--model 8b --machine h100", "say how many, such as 8xh100"),
        (
            "--model 8b --machine 8xh100 --tp 3",
            "--tp 3 does not divide the 8 GPUs of a node evenly; say --tp 1 or 2 or",
        ),
        ("--model 8b --machine 8xh100 --tp 16", "--tp 16 does not divide the 8 GPUs .*; say --tp 1 or 2 or 4 or 8 "),
        (
            "--model mixtral-8x7b --machine 8xh100 --tp 4 --ep 4",
            "--tp 4 times --ep 4 is 16 .*with --tp 4 say --ep 1 or 2 ",
        ),
        ("--model mixtral-8x7b --machine 8xh100 --tp 2 --ep 8", "--tp 2 times --ep 8 is 16 ranks"),
        ("--model mixtral-8x7b --machine 6xh100 --tp 2 --ep 2", "--tp 2 times --ep 2 is 4 .*with --tp 2 say --ep 1 "),
        ("--model mixtral-8x7b --machine 6xh100 --ep 4", "--ep 4 does not divide the 6 GPUs .*; say --ep 1 or 2 "),
        ("--model 8b --machine 8xh100 --tp 2 --ep 3", "--ep 3: llama-3.1-8b has no experts"),
        ("--model 8b --machine 8xh100 --dtype fp8", "--dtype fp8 is for --serve; for training say float32 or bfloat16"),
        ("--model 8b --machine 8xh100 --tokens 100", "add --sequence 100"),
        (
            "--model 8b --machine 8xh100 --shard HSDP",
            "HSDP is not for 8 x NVIDIA H100 SXM: it needs two nodes or .*; say FSDP2",
        ),
        ("--model 8b --machine 2xh100 --serve --tp 4", "--tp 4 needs more than the 2 GPUs"),
        ("--model qwen3-30b-a3b --machine 8xh100 --ep 3", "--ep"),
        ("--model dlrm --machine 8xh100", "a config.json"),
        ("--machine 8xh100", "Say --model 8B, for example, or --trace step.json"),
        ("--model layers=2,hidden=4096,heads=33,feed=99 --machine 8xh100", "heads .*allowed=divisors of 4096"),
        ("--model layers=2,hidden=4096,heads=32,kv_heads=7,feed=99 --machine 8xh100", "kv_heads .*divisors of 32"),
        ("--model layers=2,hidden=4096,heads=0,feed=99 --machine 8xh100", "heads .*allowed=a whole number"),
        ("--model 8b --machine 8xh100 --tp 0", "--tp"),
        ("--model 8b --machine 8xh100 --tp 8 --cp 8", "--tp 8 times --cp 8 is 64 ranks, .* the 8 GPUs of a node"),
        ("--model 8b --machine 8xh100 --tp 2 --cp 8", "--tp 2 times --cp 8 is 16 .*with --tp 2 say --cp 1 or 2 or 4 "),
        ("--model 8b --machine 8xh100 --cp 2 --sequence 5001", "--cp 2 does not divide the 15003 tokens"),
        ("--model 8b --machine 8xh100 --sequence 0", "'--sequence': must be at least 1"),
        ("--model 8b --machine 8xh100 --tokens 0", "'--tokens': must be at least 1"),
        ("--model 8b --machine 8xh100 --batch 0", "'--batch': must be at least 1"),
        ("--model 8b --machine 8xh100 --tokens -5", "'--tokens': must be at least 1"),
        ("--model 8b --machine 8xh100 --serve --context -4K", "'--context': must be at least 1"),
        ("--model 8b --machine 9xrtx4090", "'4090x9': up to 8 of these GPUs .* nearest names are 8x4090, "),
        ("--model 8b --machine 8xh100 --context 99", "--context is not for training; for training say --sequence"),
        ("--model 8b --machine 8xh100 --batch 2 --tokens 8K", "--tokens and --batch: one of them"),
        ("--model 8b --machine 8xh100 --serve --tokens 5", "--tokens is not for --serve; .* say --batch and --context"),
        ("--model 8b --machine 8xh100 --serve --optimizer sgd", "--optimizer is not for --serve"),
        ("--trace README.md --report out", "--report is not for --trace(?!;)"),
        ("--model 8b --machine 8xh100 --serve --nodes 2", "--nodes is not for --serve(?!;)"),
        ("8B 8xh100", "unexpected extra arguments .*; options have names, such as --model 8B --machine 8xh100"),
        ("--model 8b --gpus 8 --gpu h100", "No such option.* '?--gpus'?.*; GPUs are said with --machine 8xh100"),
        ("--model 8b --machine 8xh100 --strategy fsdp2", "; ways to shard are said with --shard"),
        ("--model 8b --machine 8xh100 --ep 8", "--ep 8: llama-3.1-8b has no experts"),
        ("--model 8b --machine 8xh100 --shard fsdp --tp 3", "--tp 3 does not divide"),
        ("--model ./config.json --machine 8xh100", "config.json: no such file"),
        ("--trace README.md --tp 2", "--tp is not for --trace; a recorded step has its own"),
        ("--model 8b --machine 8xh1000", "'8xh1000': these GPUs are not described; the nearest names are 8xh100, "),
    ],
)
def test_what_cannot_be_planned_is_refused(words, problem):
    shown = CliRunner().invoke(plan, words.split())
    assert shown.exit_code == 2 and re.search(problem, " ".join(shown.output.split())), shown.output
