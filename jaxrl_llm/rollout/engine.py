"""Engine specs. A spec describes an engine before it is built, with everything that a run needs to
know about the engine.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.models.spec import LoraConfig, ModelSpec
from jaxrl_llm.rollout.api import Engine, Sampling, ShareWriter
from jaxrl_llm.tasks.tokenizer import Tokenizer

Run = Callable[..., Awaitable[Any]]
"""Coroutine function `run(function, *args, **kwargs)`. It calls `function` with the other arguments
on the device thread of the trainer's process, and returns the result.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetting:
  """Settings of the run that an engine receives together with its own options."""

  spec: ModelSpec
  """Architecture of the policy."""
  dtype: str
  """Data type of the policy's computation."""
  param_dtype: str
  """Data type of the policy's parameters."""
  lora: LoraConfig | None
  """Configuration of the policy's LoRA adapters; None if the whole model is trained."""
  max_length: int
  """Length of the longest sequence in tokens, prompt included."""
  seed: int
  """Seed of all sampling."""
  tokenizer: Tokenizer
  """Tokenizer of the policy."""
  text: str
  """One of the run's prompts as text, or an empty string if the run has no tasks. It is used to
  check that the servers' tokenizers encode a text in the same way as the policy's tokenizer.
  """
  workdir: pathlib.Path
  """Run directory. Logs and other files of servers are written there."""
  registry: Registry | None = None
  """Registry in which servers can announce themselves to the run; None if the run has no
  registry.
  """
  direct: bool = False
  """Whether explorers fetch completions from servers (`Request.courier`)."""
  on_server: Callable[[str, str], None] = lambda name, how: None
  """Callback for servers from the registry that join or leave. The arguments are the server's name
  and the event: 'joined', 'left', 'expired', 'refused' or 'given up'.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
  """Description of an engine and its options, available before the engine is built."""

  build: Callable[[EngineSetting, Run], Engine]
  """Builds the engine without starting it. Called only in process 0 of the trainer."""
  served: bool = False
  """Whether servers outside the trainer's process sample the tokens. Each version is then published
  with a probe (fixed token sequences with the trainer's logprobs, which the servers must
  reproduce), because the servers' arithmetic differs from the trainer's. An engine inside the
  trainer's process needs no probe: it runs the trainer's own model on the trainer's devices.
  """
  adapters: bool = False
  """Form in which a LoRA policy is published. If True, the base weights are published once, and
  then only the adapters of each version. If False, each version is published with its adapters
  merged into the base weights.
  """
  dtype: str | None = None
  """Data type to which the trainer's devices convert the weights for publication: a Hugging Face
  name, or 'policy' for the data type of the policy's computation. None keeps the data type of the
  parameters. Adapters are never converted.
  """
  addresses: tuple[str, ...] = ()
  """Addresses of running servers to which the engine attaches, or a description if the servers are
  found in a registry. The tuple is empty if the engine starts its own servers or needs none.
  Another program that opens the run must not load weights into these servers, because the run
  controls them.
  """
  may_change: tuple[str, ...] = ()
  """Names of the engine's options that may differ when a run is resumed, because they do not affect
  the sampled tokens. Examples are the number, addresses and deadlines of servers.
  """
  unsupported: Callable[[Sampling], str | None] = lambda sampling: None
  """Returns the reason why the engine cannot sample with the given parameters, or None if it can.
  Every engine supports greedy sampling.
  """
  loads_device_arrays: bool = False
  """Whether `Engine.load` takes the weights as arrays on the devices of process 0 (`jax.Array`),
  which are then never copied to the host. Only an engine inside the trainer's process can.
  """
  check_devices: Callable[[EngineSetting, Sequence[jax.Device]], None] = lambda setting, devices: (
    None
  )
  """Raises UserError if the engine cannot run on the devices of process 0. Called before the run
  reads weights.
  """
  programs: Callable[
    [EngineSetting, Sequence[jax.Device]], Iterable[tuple[str, jax.stages.Lowered]]
  ] = lambda setting, devices: ()
  """Returns (name, lowered program) pairs for the devices of process 0. `--dry_run` lists the
  memory of these programs.
  """
  device_bytes: Callable[[EngineSetting, Sequence[jax.Device]], int] = lambda setting, devices: 0
  """Returns the number of bytes that the engine keeps on each of the devices of process 0 that it
  uses; 0 if it keeps nothing there.
  """
  commands: Callable[[EngineSetting], Mapping[str, str]] = lambda setting: {}
  """Returns the shell command of each server that the engine starts, keyed by server name.
  `--dry_run` prints the commands.
  """
  share_writer: Callable[[ModelSpec], ShareWriter] | None = None
  """Builds what writes shares of the weights in the trainer's other processes, for an engine that
  is a `SharingEngine`. If None, process 0 writes all weights.
  """
  compares_on_devices: bool = False
  """Whether the trainer's devices keep the bits of the newest version, and find the elements that
  the next version changes. If not, `share_writer` compares the versions.
  """
