"""Every benchmark in one go: prints the tables and writes them, their numbers and their pictures to ``results/``.

    python -m benchmarks.run                               CPU, as `make bench` does
    python -m benchmarks.run --device cuda --budget 360    as gpu.sh does

``<device>_<date>.md`` holds the tables, ``.json`` the numbers, ``_<bench>.png`` the pictures. ``--docs`` also puts the
tables into docs/performance.md, between its marks.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks import bench_step, device, tables, traffic, variants
from benchmarks.harness import ROOT, Settings, load, rows, settings_from

# With the share of the budget that each gets.
BENCHES = {
    "cpu": {"gae": 0.25, "token_logprobs": 0.08, "policy_loss": 0.22, "linear_policy_loss": 0.45},
    "cuda": {"gae": 0.15, "token_logprobs": 0.25, "policy_loss": 0.35, "linear_policy_loss": 0.25},
}
DOCS = ROOT / "docs" / "performance.md"


def counted_sections(smoke: bool) -> dict[str, dict]:
    """What needs no GPU, each in a process of its own: traffic, variants, and the training step."""
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    found = {
        "traffic": (
            _json_of("traffic", **interpreted),
            lambda found: traffic.markdown([traffic.Traffic(**r) for r in found]),
        ),
        "variants": (_json_of("variants"), variants.markdown),
        "step": (_json_of("bench_step", *["--smoke"] * smoke), lambda found: bench_step.markdown(**found)),
    }
    return {
        name: {"result": result, "markdown": result["failure"] if "failure" in result else render(result)}
        for name, (result, render) in found.items()
    }


def _json_of(module: str, *arguments: str, **environment: str):
    """What ``python -m benchmarks.<module> --json`` prints, or why it failed."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failure": f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"}
    return json.loads(done.stdout.splitlines()[-1])


def compiled_section(targets: tuple[str, ...]) -> dict:
    """Registers, spills and widths; the targets need no device."""
    from benchmarks import compiled

    found = [row for target in targets for row in compiled.compiled_for(target)]
    lines = ["| kernel | case | target | registers | spills | local bytes | load bits | store bits |", "|---" * 8 + "|"]
    for row in found:
        numbers = (row.registers, row.spills, row.local_bytes, row.loads, row.stores)
        lines.append(f"| {row.kernel} | {row.case} | {row.target} | " + " | ".join(map(str, numbers)) + " |")
    return {"result": [row._asdict() for row in found], "markdown": "\n".join(lines)}


def run_benches(settings: Settings, copy: float, stem: Path) -> dict[str, dict]:
    """Measure, print and draw each benchmark."""
    sections, deadline, weights = {}, time.monotonic() + settings.budget, dict(BENCHES[settings.device])
    for name in list(weights):
        bench, left = load(name), deadline - time.monotonic()
        share = weights.pop(name)
        mine = Settings(**asdict(settings) | {"budget": left * share / (share + sum(weights.values()))})
        found = []
        for row in rows(bench, mine):
            found.append(row)
            said = f"{row.median_ms:.1f} ms" if row.median_ms is not None else row.failure
            print(f"{name}, {row.shape}, {row.dtype}, {row.provider} {row.mode}: {said}", file=sys.stderr, flush=True)
        text = tables.markdown(bench, found, copy)
        print(text, flush=True)
        if tables.picture(bench, found, Path(f"{stem}_{name}.png")):
            text += f"\n![{bench.title}]({stem.name}_{name}.png)\n"
        sections[name] = {"result": [asdict(row) for row in found], "markdown": text}
    return sections


def write(stem: Path, environment: dict, limits: dict, sections: dict[str, dict]) -> None:
    """The result files."""
    lines = [f"# {environment['device']}, {environment['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items()]
    lines += ["- " + limits_sentence(limits), ""]
    for name, section in sections.items():
        lines += [f"## {name}", "", section["markdown"], ""]
    stem.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    numbers = {name: section["result"] for name, section in sections.items()}
    content = {"environment": environment, "limits": limits, "sections": numbers}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def limits_sentence(limits: dict) -> str:
    """The device's own figures."""
    rates = ", ".join(
        f"{name.removeprefix('gemm_')} {rate / 1e12:.3g} TFLOP/s" for name, rate in limits.items() if name != "copy"
    )
    return f"measured limits: copy {limits['copy'] / 1e9:.1f} GB/s (read and write), matrix product {rates}"


def refresh_docs(stem: Path, environment: dict, limits: dict, sections: dict[str, dict]) -> None:
    """Put the tables between the marks ``<!-- NAME -->`` and ``<!-- end -->`` of docs/performance.md."""
    text = DOCS.read_text(encoding="utf-8")
    pictures = Path(os.path.relpath(stem.parent, DOCS.parent)).as_posix()
    listed = [f"- {name}: {value}" for name, value in environment.items()] + ["- " + limits_sentence(limits)]
    contents = {"environment": "\n".join(listed)} | {name: section["markdown"] for name, section in sections.items()}
    for name, content in contents.items():
        content = content.replace(f"]({stem.name}", f"]({pictures}/{stem.name}").strip()
        block = f"<!-- {name} -->\n{content}\n<!-- end -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    DOCS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tables.RESULTS, help="folder of the result files")
    parser.add_argument("--docs", action="store_true", help="also rewrite the tables of docs/performance.md")
    parser.add_argument("--target", action="append", default=[], help="also compile for this target, such as sm_90")
    parser.add_argument("--tests", default="", help="what the op tests said on this device, for the record")
    settings, arguments = settings_from(parser), parser.parse_args()
    command = f"python -m benchmarks.run {' '.join(sys.argv[1:])}".strip()
    environment = tables.environment(settings.device, command)
    if arguments.tests:
        environment["op tests"] = arguments.tests
    limits = device.limits(settings.device, settings.smoke)
    print(
        "\n".join(f"- {name}: {value}" for name, value in environment.items()),
        "\n- " + limits_sentence(limits),
        flush=True,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    family = tables.slug(device.name(settings.device)) + ("_smoke" if settings.smoke else "")
    stem = arguments.out / f"{family}_{datetime.date.today().isoformat()}"
    sections = run_benches(settings, limits["copy"], stem)
    if settings.device == "cpu" and "TRITON_INTERPRET" not in os.environ:
        for name, section in counted_sections(settings.smoke).items():
            print(f"### {name}\n\n{section['markdown']}\n", flush=True)
            sections[name] = section
        if arguments.target:
            sections["compiled"] = compiled_section(tuple(arguments.target))
            print(sections["compiled"]["markdown"])
    # Git keeps earlier results of the device; the folder holds the latest.
    for old in arguments.out.glob(f"{family}_20*"):
        if not old.name.startswith(stem.name):
            old.unlink()
    write(stem, environment, limits, sections)
    if arguments.docs and not settings.smoke:
        refresh_docs(stem, environment, limits, sections)


if __name__ == "__main__":
    main()
