"""Engine "vllm": vLLM in the trainer's process, with the policy's weights pushed into it before it samples."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.models.sharding import architecture, whole, world_size
from vapo.models.weights import keeps_names
from vapo.types import Response

if TYPE_CHECKING:
    from vapo.rollout.sampling import Sampling

# Cache of a CPU engine. It takes a share of the device's memory on a GPU, where it sleeps while the trainer computes.
CPU_CACHE_BYTES = 2**30


class VllmEngine:
    """An engine of this rank, which samples this rank's responses.

    It has no process of its own, so that weights are handed over in memory, and unless the environment says otherwise
    binds no threads to cores, which would bind the trainer's too.

    Args:
        policy: Whose architecture the engine takes; its weights come with each :meth:`loaded`.
        dtype: Name of the dtype in which the engine computes, that of the trainer's forward pass.
        memory: Share of a GPU's memory for weights and cache, in (0, 1].
        max_responses: Most responses that are sampled at once; 0: vLLM's own limit.

    Raises:
        ValueError: If vLLM is not installed or cannot run the policy's architecture.
    """

    def __init__(self, policy: PreTrainedModel, *, dtype: str, memory: float, max_responses: int) -> None:
        name = architecture(policy)
        if not keeps_names(policy):
            raise ValueError(f"engine must be loop or transformers for {name}, whose weights vLLM names otherwise")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(f"engine 'vllm' needs the extra vllm: pip install 'vapo[vllm]'; got: {error}") from error
        self.device, self.dtype = policy.device, getattr(torch, dtype)
        on_gpu = self.device.type == "cuda"
        sizes = {"max_num_seqs": max_responses} if max_responses else {}
        sizes |= {"gpu_memory_utilization": memory} if on_gpu else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
        # vLLM's own start draws from the global generator.
        with tempfile.TemporaryDirectory() as folder, _separate_generators(self.device, 0):
            config = copy.deepcopy(policy.config)
            config.architectures = [name]
            config.save_pretrained(folder)
            try:
                self.llm = LLM(
                    model=folder,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    dtype=dtype,
                    max_model_len=-1,
                    logprobs_mode="processed_logprobs",
                    # Each rank has an engine to itself, inside the trainer's process group.
                    distributed_executor_backend="external_launcher" if world_size() > 1 else "uni",
                    enable_sleep_mode=on_gpu,
                    enforce_eager=not on_gpu,
                    disable_log_stats=True,
                    **sizes,
                )
            except (ValueError, NotImplementedError) as error:
                reason = str(error).strip().replace("\n", " ")
                raise ValueError(f"engine must be one that runs {name}; vllm says: {reason}") from error
        self._sleep()

    @contextmanager
    def loaded(self, policy: PreTrainedModel) -> Iterator[None]:
        """Let the engine sample from the policy's present weights; afterwards its GPU memory is free. Collective."""
        if self.device.type == "cuda":
            self.llm.wake_up(tags=["weights"])
        with torch.no_grad():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._weights(policy)})
        if self.device.type == "cuda":
            self.llm.wake_up(tags=["kv_cache"])
        # Cached prompts are those of other weights.
        self.llm.reset_prefix_cache()
        try:
            yield
        finally:
            self._sleep()

    def sample(
        self, prompts: Sequence[Tensor], group_size: int, sampling: Sampling, generator: torch.Generator | None
    ) -> list[Response]:
        """Sample ``group_size`` responses to each prompt, as :func:`vapo.rollout.sampling.sample`."""
        from vllm import SamplingParams

        seed = 0
        if sampling.temperature > 0:
            seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        settings = SamplingParams(
            n=group_size,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            # Only our stop tokens end a response; else the model's own would too.
            ignore_eos=True,
            stop_token_ids=list(sampling.stop_token_ids),
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
        )
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        # A generator for each request, vLLM's other way, fails on a CPU where a prompt is read in pieces.
        with _separate_generators(self.device, seed):
            requests = self.llm.generate(inputs, settings, use_tqdm=False)
        samples = [each for request in requests for each in sorted(request.outputs, key=lambda output: output.index)]
        return [Response(torch.tensor(each.token_ids), torch.tensor(each.logprobs.logprobs)) for each in samples]

    def close(self) -> None:
        """End the engine, and with it, as vLLM does, the process group: the last thing that a run does."""
        self.llm.llm_engine.engine_core.shutdown()

    def _sleep(self) -> None:
        if self.device.type == "cuda":
            # Level 2 drops the weights: they change before the engine wakes.
            self.llm.sleep(level=2)

    def _weights(self, policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every weight, one at a time; tied ones under both names, since vLLM copies each."""
        for name, tensor in policy.state_dict().items():
            yield name, whole(tensor.to(self.dtype))


@contextmanager
def _separate_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global generators for the block; afterwards they are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
