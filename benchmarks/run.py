"""Every benchmark in one go: prints the tables and writes them, their numbers and their pictures to ``results/``.

    python -m benchmarks.run                               CPU, as `make bench` does
    python -m benchmarks.run --device cuda --budget 360    as gpu.sh does
    python -m benchmarks.run --bench gae --only verl       one table, of one provider

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
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import bench_step, compiled, device, tables, traffic, variants
from benchmarks.harness import ROOT, Settings, rows, settings_from
from benchmarks.worker import load

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


def compiled_section(targets: list[str]) -> dict:
    """Registers, spills and widths; the targets need no device."""
    found = [row for target in targets for row in compiled.compiled_for(target)]
    return {"result": [row._asdict() for row in found], "markdown": compiled.markdown(found)}


def run_benches(weights: dict[str, float], settings: Settings, copy: float, stem: Path | None) -> dict[str, dict]:
    """Measure and print each benchmark, and draw it where ``stem`` says; each gets its share of the time left."""
    sections, deadline, weights = {}, time.monotonic() + settings.budget, dict(weights)
    for name in list(weights):
        bench, left = load(name), deadline - time.monotonic()
        share = weights.pop(name)
        found = []
        for row in rows(bench, replace(settings, budget=left * share / (share + sum(weights.values())))):
            found.append(row)
            said = f"{row.median_ms:.1f} ms" if row.median_ms is not None else row.failure
            print(f"{name}, {row.shape}, {row.dtype}, {row.provider} {row.mode}: {said}", file=sys.stderr, flush=True)
        text = tables.markdown(bench, found, copy)
        print(text, flush=True)
        if stem and tables.picture(bench, found, Path(f"{stem}_{name}.png")):
            text += f"\n![{bench.title}]({stem.name}_{name}.png)\n"
        sections[name] = {"result": [asdict(row) for row in found], "markdown": text}
    return sections


def write(stem: Path, environment: dict, limits: dict, sections: dict[str, dict]) -> None:
    """The result files; Git keeps earlier ones of the device, the folder holds the latest."""
    for old in stem.parent.glob(f"{stem.name.rpartition('_')[0]}_20*"):
        if not old.name.startswith(stem.name):
            old.unlink()
    lines = [f"# {environment['device']}, {environment['date']}", "", tables.listed(environment, limits), ""]
    for name, section in sections.items():
        lines += [f"## {name}", "", section["markdown"], ""]
    stem.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    numbers = {name: section["result"] for name, section in sections.items()}
    content = {"environment": environment, "limits": limits, "sections": numbers}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def refresh_docs(stem: Path, contents: dict[str, str]) -> None:
    """Put each content between the marks ``<!-- NAME -->`` and ``<!-- end -->`` of docs/performance.md."""
    text = DOCS.read_text(encoding="utf-8")
    pictures = Path(os.path.relpath(stem.parent, DOCS.parent)).as_posix()
    for name, content in contents.items():
        content = content.replace(f"]({stem.name}", f"]({pictures}/{stem.name}").strip()
        block = f"<!-- {name} -->\n{content}\n<!-- end -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    DOCS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", action="append", choices=BENCHES["cpu"], help="print this table and write nothing")
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
    print(tables.listed(environment, limits) + "\n", flush=True)
    weights = BENCHES[settings.device]
    if arguments.bench:
        run_benches({name: weights[name] for name in arguments.bench}, settings, limits["copy"], None)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    family = tables.slug(device.name(settings.device)) + ("_smoke" if settings.smoke else "")
    stem = arguments.out / f"{family}_{datetime.date.today().isoformat()}"
    sections = run_benches(weights, settings, limits["copy"], stem)
    if settings.device == "cpu" and "TRITON_INTERPRET" not in os.environ:
        sections |= counted_sections(settings.smoke)
        if arguments.target:
            sections["compiled"] = compiled_section(arguments.target)
        for name, section in list(sections.items())[len(weights) :]:
            print(f"### {name}\n\n{section['markdown']}\n", flush=True)
    write(stem, environment, limits, sections)
    if arguments.docs and not settings.smoke:
        contents = {name: section["markdown"] for name, section in sections.items()}
        refresh_docs(stem, contents | {"environment": tables.listed(environment, limits)})


if __name__ == "__main__":
    main()
