"""What the kernels compile to, without a GPU: registers, spills and the width of loads and stores.

    python -m benchmarks.compiled                    every kernel on every target
    python -m benchmarks.compiled --target sm_90     one target

Each op is called as a user would, on small CPU tensors. What its launches would compile is recorded, with
the types, alignments and constants that Triton's launcher derives from the arguments; then it is compiled for the
target and read back from the machine code.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
DTYPES = ("float32", "bfloat16", "float16")
# A vocabulary whose rows take several blocks and all start at multiples of 16 elements; and one beside it.
ALIGNED_V, ODD_V = 16_384, 16_385


class Launch(NamedTuple):
    """A launch that Triton would have made, and all that it would compile for it."""

    kernel: object
    key: str
    signature: dict
    constants: dict
    attributes: dict
    options: object

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.strip("_").removesuffix("_kernel")


class Compiled(NamedTuple):
    """One kernel on one target; widths in bits, of the global accesses inside loops (anywhere, if none loops)."""

    case: str
    kernel: str
    target: str
    registers: int
    spills: int
    local_bytes: int
    loads: str
    stores: str


@contextlib.contextmanager
def recorded_launches(target_name: str):
    """Yield a list that fills with the launches of the ops called inside; nothing is compiled or run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction, compute_cache_key

    from vapo_kernels import _dispatch, _row_softmax

    if not target_name.startswith("sm_"):
        target = GPUTarget("hip", target_name, 64)
    else:
        target = GPUTarget("cuda", int(target_name.removeprefix("sm_")), 32)
    launches = []

    class Driver:
        def get_current_target(self):
            return target

    def record(self, *args, grid, warmup, **kwargs):
        # As JITFunction.run does before it compiles.
        kwargs.update(debug=False, instrumentation_mode=triton.knobs.compilation.instrumentation_mode)
        _, key_cache, _, backend, binder = self.device_caches[target_name]
        bound, specialization, options = binder(*args, **kwargs)
        key = compute_cache_key(key_cache, specialization, options)
        options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
        launches.append(Launch(self, key, signature, constants, attributes, options))

    run, interpret, lanes = JITFunction.run, _dispatch.INTERPRET, _row_softmax.WARP_LANES
    triton.runtime.driver.set_active(Driver())
    JITFunction.run, _dispatch.INTERPRET, _row_softmax.WARP_LANES = record, True, target.warp_size
    try:
        yield launches
    finally:
        JITFunction.run, _dispatch.INTERPRET, _row_softmax.WARP_LANES = run, interpret, lanes


def logits_calls(dtype, V: int, *, full: bool):
    """Every op from logits, forward and backward, on two rows; ``full`` sets every optional argument."""
    import torch

    from vapo_kernels import policy_loss, token_logprobs

    def rows():
        return torch.zeros(2, V, dtype=dtype, requires_grad=True)

    ids, mask, x = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), torch.ones(2)
    options = {"mask": mask, "temperature": x} if full else {}
    loss_options = {"is_correct": mask}
    if full:
        loss_options.update(temperature=x, dual_clip=3.0, token_weights=x, ref_logprobs=x, kl_weight=0.1)

    out = token_logprobs(rows(), ids, **options)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    policy_loss(rows().detach(), ids, x, x, mask, **loss_options)
    (2 * policy_loss(rows(), ids, x, x, mask, **loss_options).loss).backward()


def token_calls(dtype, *, full: bool):
    """Every op from per-token tensors."""
    import torch

    from vapo_kernels import (
        explained_variance,
        logprob_policy_loss,
        masked_whiten,
        packed_gae,
        padded_gae,
        value_loss,
    )

    mask, x = torch.ones(4, 32, dtype=torch.bool), torch.ones(4, 32, dtype=dtype)
    cu_seqlens, per_sequence = torch.tensor([0, 32, 64, 96, 128], dtype=torch.int32), torch.full((4,), 0.5)
    options, loss_options = {}, {"is_correct": mask}
    if full:
        options = {"lam_policy": per_sequence, "lam_critic": per_sequence, "bootstrap_values": per_sequence}
        loss_options.update(dual_clip=3.0, token_weights=x, ref_logprobs=x, kl_weight=0.1, entropy=x)
    packed_gae(x.view(-1), x.view(-1), cu_seqlens, mask=mask.view(-1) if full else None, **options)
    padded_gae(x, x, mask, **options)
    logprob_policy_loss(x, x, x, mask, **loss_options)
    value_loss(x, x, mask, **({"old_values": x, "clip": 0.2} if full else {}))
    explained_variance(x, x, mask)
    masked_whiten(x, mask)


def cases():
    """(label, call) pairs that together reach every kernel in each of its variants."""
    import torch

    for name in DTYPES:
        dtype = getattr(torch, name)
        yield f"{name}", lambda dtype=dtype: logits_calls(dtype, ALIGNED_V, full=False)
    yield "bfloat16 every option", lambda: logits_calls(torch.bfloat16, ALIGNED_V, full=True)
    yield "bfloat16 odd V", lambda: logits_calls(torch.bfloat16, ODD_V, full=False)
    yield "float32 tokens", lambda: token_calls(torch.float32, full=False)
    yield "bfloat16 tokens every option", lambda: token_calls(torch.bfloat16, full=True)


def sweep_logits(dtype, V: int):
    """Calls of every op from logits that differ in N, strides, places in memory, temperature and other numbers."""
    import torch

    from vapo_kernels import policy_loss, token_logprobs

    shapes = [(1,), (2,), (15,), (16,), (17,), (48,), (1, 1), (3, 16), (16, 3), (1, 17)]
    for i, shape in enumerate(shapes, start=1):
        n = torch.Size(shape).numel()
        # Parts of larger tensors: every alignment of a micro-batch.
        ids, x = torch.zeros(n + i, dtype=torch.int64)[i:].view(shape), torch.ones(n + i)[i:].view(shape)
        mask = torch.ones(n + i, dtype=torch.bool)[i:].view(shape)
        layouts = [torch.zeros(*shape, V, dtype=dtype)]
        if len(shape) == 2:
            batch, length = shape
            layouts.append(torch.zeros(batch, length + 1, V, dtype=dtype)[:, :-1])
            layouts.append(torch.zeros(length, batch, V, dtype=dtype).transpose(0, 1))
        for logits in layouts:
            logits.requires_grad_()
            out = token_logprobs(logits, ids, mask=mask, temperature=i / 2)
            (out.logprobs.sum() + out.entropy.sum()).backward()
            numbers = {
                "clip_low": i / 100,
                "clip_high": i / 50,
                "dual_clip": 1.0 + i,
                "nll_weight": i / 3,
                "kl_weight": i / 4,
            }
            numbers |= {
                "entropy_weight": i / 5,
                "num_tokens": n + i,
                "num_correct_tokens": float(i),
                "temperature": i / 2,
            }
            options = {"is_correct": mask, "ref_logprobs": x, "token_weights": x, **numbers}
            with torch.no_grad():
                policy_loss(logits, ids, x, x, mask, **options)
            (i * policy_loss(logits, ids, x, x, mask, **options).loss).backward()
            (i * policy_loss((logits + 0.0).contiguous(), ids, x, x, mask, inplace=True, **options).loss).backward()


def sweep_linear(dtype, V: int):
    """As `sweep_logits`, from hidden states."""
    import torch

    from vapo_kernels import linear_policy_loss, linear_token_logprobs

    weight = torch.zeros(V, 16, dtype=dtype, requires_grad=True)
    for i, n in enumerate((1, 2, 16, 17, 48), start=1):
        hidden = torch.zeros(n, 16, dtype=dtype, requires_grad=True)
        ids, x, mask = torch.zeros(n + i, dtype=torch.int64)[i:], torch.ones(n + i)[i:], torch.ones(n, dtype=torch.bool)
        out = linear_token_logprobs(hidden, weight, ids, mask=mask, temperature=i / 2)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        options = {"clip_low": i / 100, "nll_weight": i / 3, "temperature": i / 2, "num_tokens": n + i}
        with torch.no_grad():
            linear_policy_loss(hidden, weight, ids, x, x, mask, **options)
        (i * linear_policy_loss(hidden, weight, ids, x, x, mask, **options).loss).backward()


def sweep_tokens(dtype):
    """Calls of every op from per-token tensors that differ in N, S, lengths, T, places in memory and every number."""
    import torch

    from vapo_kernels import (
        explained_variance,
        logprob_policy_loss,
        masked_whiten,
        packed_gae,
        padded_gae,
        value_loss,
    )

    for i, shape in enumerate([(1, 1), (1, 2), (3, 5), (4, 16), (16, 16), (16, 1), (33, 7), (2, 4096)], start=1):
        rows, length = shape
        n = rows * length
        x = torch.ones(n + i, dtype=dtype)[i:].view(shape)
        mask = torch.ones(n + i, dtype=torch.bool)[i:].view(shape)
        cu_seqlens = (torch.arange(rows + 1) * length).int()
        numbers = {"gamma": i / 10, "lam_critic": i / 11, "alpha": i / 12}
        packed_gae(x.flatten(), x.flatten(), cu_seqlens, mask=mask.flatten(), **numbers)
        padded_gae(x, x, mask, **numbers)
        loss_numbers = {
            "clip_low": i / 100,
            "clip_high": i / 50,
            "nll_weight": i / 3,
            "kl_weight": i / 4,
            "num_tokens": i,
        }
        logprob_policy_loss(x, x, x, mask, is_correct=mask, ref_logprobs=x, num_correct_tokens=i, **loss_numbers)
        value_loss(x, x, mask, old_values=x, clip=i / 10, num_tokens=i)
        explained_variance(x, x, mask)
        masked_whiten(x, mask)


def compilations_of_sweeps(target_name: str) -> dict[str, dict[str, int]]:
    """For each sweep, how many variants of each kernel its calls would compile."""
    import torch

    counts = {}
    for name in DTYPES[:2]:
        dtype = getattr(torch, name)
        sweeps = {f"{name}, V = {V}": lambda d=dtype, V=V: sweep_logits(d, V) for V in (64, 65)}
        sweeps |= {f"{name} hidden, V = {V}": lambda d=dtype, V=V: sweep_linear(d, V) for V in (64, 65)}
        sweeps[f"{name} tokens"] = lambda d=dtype: sweep_tokens(d)
        for label, call in sweeps.items():
            with recorded_launches(target_name) as launches:
                call()
            keys = {(launch.name, launch.key) for launch in launches}
            counts[label] = {kernel: sum(k == kernel for k, _ in keys) for kernel in sorted({k for k, _ in keys})}
    return counts


def compile_all(target_name: str) -> list[Compiled]:
    """Compile every distinct launch of `cases` for a target. Needs a process without TRITON_INTERPRET."""
    seen, compiled = set(), []
    for case, call in cases():
        with recorded_launches(target_name) as launches:
            call()
        for launch in launches:
            if (launch.name, launch.key) not in seen:
                seen.add((launch.name, launch.key))
                compiled.append(compile_launch(launch, case, target_name))
    return compiled


def compile_launch(launch: Launch, case: str, target_name: str) -> Compiled:
    """Compile one launch and read its machine code."""
    import triton
    from triton.compiler import ASTSource

    target = triton.runtime.driver.active.get_current_target()
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    asm = triton.compile(source, target=target, options=launch.options.__dict__).asm
    read = read_cubin if "cubin" in asm else read_amdgcn
    return Compiled(case, launch.name, target_name, *read(asm))


def read_cubin(asm: dict) -> tuple:
    """(registers, spills, local bytes, load widths, store widths) of NVIDIA machine code."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.check_output([tools / "cuobjdump", "--dump-resource-usage", file.name], text=True)
        command = [tools / "nvdisasm", "-c", "-novliw", file.name]
        sass = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    resources = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    lines = sass.splitlines()
    spills = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines)
    local_bytes = int(resources["STACK"]) + int(resources["LOCAL"])
    inside = loop_lines(lines, r"^(\.L\w+):", r"\bBRA\b.*`\((\.L\w+)\)")
    widths = {"LDG": set(), "STG": set()}
    for line in inside:
        if access := re.search(r"\b(LDG|STG)\.E(?:\.[A-Z_]+)*?(?:\.(U8|S8|U16|S16|64|128|256))?(?:\.[A-Z_]+)*\s", line):
            widths[access[1]].add(int((access[2] or "32").lstrip("US")))
    return int(resources["REG"]), spills, local_bytes, _listed(widths["LDG"]), _listed(widths["STG"])


def read_amdgcn(asm: dict) -> tuple:
    """As `read_cubin`, of AMD assembly."""
    text = asm["amdgcn"]
    names = "vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
    numbers = dict(re.findall(rf"\.({names}):\s+(\d+)", text))
    inside = loop_lines(text.splitlines(), r"^(\.L\w+):", r"\bs_c?branch\w*\s+(\.L\w+)")
    bits = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "short": 16, "dword": 32, "dwordx2": 64, "dwordx4": 128}
    widths = {"load": set(), "store": set()}
    for line in inside:
        if access := re.search(r"\b(?:global|buffer)_(load|store)_(\w+?)(?:_d16(?:_hi)?)?\s", line):
            widths[access[1]].add(bits.get(access[2], access[2]))
    spills = int(numbers["vgpr_spill_count"]) + int(numbers["sgpr_spill_count"])
    local_bytes = int(numbers["private_segment_fixed_size"])
    return int(numbers["vgpr_count"]), spills, local_bytes, _listed(widths["load"]), _listed(widths["store"])


def loop_lines(lines: list[str], label: str, branch: str) -> list[str]:
    """The lines between a label and a later branch back to it; all of them where there is no loop."""
    at, inside = {}, set()
    for number, line in enumerate(lines):
        if found := re.search(label, line.strip()):
            at[found[1]] = number
        elif (found := re.search(branch, line)) and found[1] in at:
            # A kernel ends in a branch to itself.
            inside.update(range(at[found[1]], number) if number - at[found[1]] > 2 else ())
    return [lines[number] for number in sorted(inside)] or lines


def _listed(widths: set) -> str:
    return " ".join(str(width) for width in sorted(widths)) or "–"


def run_compiled(function: str, *arguments: str):
    """The result of a function of this module, from a process where Triton compiles instead of interpreting."""
    code = f"import json, sys; from benchmarks import compiled; print(json.dumps(compiled.{function}(*sys.argv[1:])))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compiled_for(target_name: str) -> list[Compiled]:
    """`compile_all` in a process of its own."""
    return [Compiled(*row) for row in run_compiled("compile_all", target_name)]


def markdown(rows: list[Compiled]) -> str:
    """The table of `main`."""
    lines = ["| kernel | case | target | registers | spills | local bytes | load bits | store bits |", "|---" * 8 + "|"]
    for row in rows:
        cells = (row.kernel, row.case, row.target, row.registers, row.spills, row.local_bytes, row.loads, row.stores)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="one of the targets; default: all")
    print(markdown([row for target in parser.parse_args().target or TARGETS for row in compiled_for(target)]))


if __name__ == "__main__":
    main()
